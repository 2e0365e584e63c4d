"""ESP-DL: a network with scales of powers of two, beside what ESP-PPQ computes of it.

    python -m benchmarks.esp_dl write FOLDER               # where keras_qat is installed
    python benchmarks/esp_dl.py compare FOLDER esp32s3     # where esp-ppq is, which brings torch

The second command shows how scales get into ESP-PPQ, which calibrates networks by itself: the file
of `export_onnx` is read as a float network with a scale for each tensor, and these replace
ESP-PPQ's. It also writes the `.espdl` file. Espressif compares its chips with
ESP-PPQ's executor.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

TARGETS = ("esp32s3", "esp32p4")
"""Targets of ESP-PPQ."""


def write(folder: Path) -> None:
    """Calibrates a small residual network on random data and writes it with inputs and outputs."""
    import keras_qat
    from benchmarks.zoo_worker import settle
    from keras_qat.keras2.backend import keras

    layers = keras.layers
    keras.utils.set_random_seed(0)
    image = keras.Input((16, 16, 3))
    x = layers.Conv2D(16, 3, padding="same", use_bias=False)(image)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    y = layers.DepthwiseConv2D(3, padding="same", use_bias=False)(x)
    y = layers.ReLU()(layers.BatchNormalization()(y))
    x = layers.Add()([x, layers.Conv2D(16, 1)(y)])
    x = layers.ReLU()(layers.Conv2D(24, 3, strides=2)(layers.MaxPooling2D()(x)))
    model = keras.Model(image, layers.Dense(10)(layers.Flatten()(x)))
    images = np.random.default_rng(1).normal(size=(64, 16, 16, 3)).astype(np.float32)
    settle(model, images)
    qat = keras_qat.quantize_model(model, keras_qat.recipes.power_of_two())
    keras_qat.calibrate(qat, images)
    folder.mkdir(parents=True, exist_ok=True)
    keras_qat.export_onnx(qat, folder / "network.onnx")
    (read,) = keras_qat.resolve(qat).inputs.values()
    assert read.params is not None
    inputs = read.params.dequantize(read.params.quantize(images))  # Without halves at the input.
    outputs = qat.predict(inputs, verbose=0)
    np.savez(folder / "values.npz", inputs=inputs, outputs=outputs)


def as_float(path: Path) -> tuple[Any, dict[str, float]]:
    """Returns a QDQ file as a float network with a batch of 1, and the scale of each tensor."""
    import onnx
    from onnx import helper, numpy_helper

    model = onnx.load(path)
    constants = {array.name: numpy_helper.to_array(array) for array in model.graph.initializer}
    scales: dict[str, float] = {}
    names: dict[str, str] = {}  # Tensor behind Q and DQ -> tensor in front of them.
    nodes: list[Any] = []
    for node in model.graph.node:
        read = [names.get(name, name) for name in node.input]
        if node.op_type == "DequantizeLinear" and read[0] in constants:
            scales[node.output[0]] = step = float(np.ravel(constants[read[1]])[0])
            constants[node.output[0]] = constants[read[0]].astype(np.float32) * np.float32(step)
        elif node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            names[node.output[0]] = read[0]
            scales.setdefault(read[0], float(constants[read[1]]))
        elif node.op_type == "Add" and nodes[-1].output[0] == read[0] and read[1] in constants:
            product = nodes.pop()
            nodes.append(helper.make_node("Gemm", [*product.input, read[1]], node.output))
        else:
            copied = onnx.NodeProto()
            copied.CopyFrom(node)
            copied.input[:] = read
            nodes.append(copied)
            if node.op_type == "Transpose" and read[0] in scales:
                scales[node.output[0]] = scales[read[0]]
    (output,) = model.graph.output
    inner = names[output.name]
    scales[output.name] = scales[inner]
    nodes.append(helper.make_node("Identity", [inner], [output.name]))
    for end in (*model.graph.input, output):
        end.type.tensor_type.shape.dim[0].dim_value = 1
    used = {name for node in nodes for name in node.input} & constants.keys()
    arrays = [numpy_helper.from_array(constants[name], name) for name in sorted(used)]
    graph = helper.make_graph(nodes, "network", model.graph.input, [output], arrays)
    plain = helper.make_model(graph, opset_imports=model.opset_import)
    plain.ir_version = 8
    return plain, scales


def compare(folder: Path, target: str) -> None:
    """Prints how many codes ESP-PPQ's executor has in common with the model."""
    import onnx
    import torch
    from esp_ppq import QuantizationSettingFactory
    from esp_ppq.api import espdl_quantize_onnx
    from esp_ppq.api.espdl_interface import get_target_platform
    from esp_ppq.executor import TorchExecutor
    from esp_ppq.lib import Exporter

    plain, scales = as_float(folder / "network.onnx")
    onnx.save(plain, folder / "plain.onnx")
    with np.load(folder / "values.npz") as values:
        inputs, expected = torch.tensor(values["inputs"]), values["outputs"]
    setting = QuantizationSettingFactory.espdl_setting()
    setting.fusion_setting.align_elementwise_to = "None"  # Sums have inputs of several scales.
    graph = espdl_quantize_onnx(
        onnx_import_file=str(folder / "plain.onnx"),
        espdl_export_file="",
        skip_export=True,
        calib_dataloader=list(inputs[:8].split(1)),
        calib_steps=8,
        input_shape=list(inputs[:1].shape),
        collate_fn=lambda batch: batch,
        target=target,
        num_of_bits=8,
        setting=setting,
        device="cpu",
        error_report=False,
        verbose=0,
    )
    for operation in graph.operations.values():
        for config, variable in getattr(operation, "config_with_variable", ()):
            config = config.dominated_by or config
            if config.scale is not None and variable.name in scales:
                config.scale = torch.full_like(config.scale, scales[variable.name])
        if operation.type in ("Conv", "Gemm"):
            read, weights, *biases = operation.config.input_quantization_config
            read = read.dominated_by or read
            for bias in biases:
                bias.scale = (read.scale * weights.scale).reshape(bias.scale.shape)
    executor = TorchExecutor(graph, device="cpu")
    results = np.concatenate([executor.forward([x])[0].numpy() for x in inputs.split(1)])
    exporter = Exporter(platform=get_target_platform(target, 8))
    exporter.export(file_path=str(folder / f"{target}.espdl"), graph=graph)
    step = scales[plain.graph.output[0].name]
    differences = np.abs(np.rint(results / step) - np.rint(expected / step))
    same = np.mean(differences == 0)
    print(
        f"{target}: {same:.2%} of {differences.size} codes, at most {differences.max():.0f} apart"
    )


def main() -> None:
    """Runs one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["write", "compare"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("target", nargs="?", choices=TARGETS, default="esp32s3")
    options = parser.parse_args()
    if options.command == "write":
        write(options.folder)
    else:
        compare(options.folder, options.target)


if __name__ == "__main__":
    main()
