"""Files and arenas on microcontrollers, beside those of TFLite's own converter.

    python -m benchmarks.arena
    python -m benchmarks.arena --zoo

The same float model, quantized by `calibrate` and by the converter's post-training quantization, a
batch of one. Arenas are what TFLite Micro keeps of them on this computer. With `--zoo` networks of
keras.applications, whether they run there, and the share of the model's codes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import keras_qat
from benchmarks.runtime_worker import apart
from keras_qat.keras2.backend import keras
from keras_qat.tflite.micro_interpreter import MicroInterpreter

layers = keras.layers


def _stack(shape: tuple[int, ...], *stack: Any) -> Any:
    return keras.Sequential([keras.Input(shape), *stack])


def _normalized(*stack: Any) -> list[Any]:
    """Each layer with BatchNormalization and ReLU behind it."""
    result: list[Any] = []
    for item in stack:
        result += [item, layers.BatchNormalization(), layers.ReLU()]
    return result


def _keywords() -> Any:
    """A depthwise-separable network of MLPerf Tiny's kind."""
    blocks: list[Any] = [layers.Conv2D(64, (10, 4), 2, "same", use_bias=False)]
    for _ in range(4):
        blocks.append(layers.DepthwiseConv2D(3, padding="same", use_bias=False))
        blocks.append(layers.Conv2D(64, 1, use_bias=False))
    ends = [layers.GlobalAveragePooling2D(), layers.Dense(12, "softmax")]
    return _stack((49, 10, 1), *_normalized(*blocks), *ends)


def _residual() -> Any:
    """ResNet8 for 32x32 images, of MLPerf Tiny's kind."""
    x = inputs = keras.Input((32, 32, 3))
    for block in _normalized(layers.Conv2D(16, 3, padding="same")):
        x = block(x)
    for filters, stride in ((16, 1), (32, 2), (64, 2)):
        y = x
        for block in _normalized(layers.Conv2D(filters, 3, stride, "same")):
            y = block(y)
        y = layers.BatchNormalization()(layers.Conv2D(filters, 3, padding="same")(y))
        if stride > 1:
            x = layers.Conv2D(filters, 1, stride, "same")(x)
        x = layers.ReLU()(layers.Add()([x, y]))
    x = layers.Flatten()(layers.AveragePooling2D(8)(x))
    return keras.Model(inputs, layers.Dense(10, "softmax")(x))


def _encoder() -> Any:
    """The autoencoder of machine sounds, of MLPerf Tiny's kind."""
    sizes = [128] * 4 + [8] + [128] * 4
    hidden = _normalized(*(layers.Dense(size, use_bias=False) for size in sizes))
    return _stack((640,), *hidden, layers.Dense(640))


NETWORKS: dict[str, Callable[[], Any]] = {
    "dense, 64-32-10": lambda: _stack((64,), layers.Dense(32, "relu"), layers.Dense(10)),
    "dense, six of 64": lambda: _stack(
        (64,), *(layers.Dense(64, "relu") for _ in range(6)), layers.Dense(4, "softmax")
    ),
    "dense, with tanh and sigmoid": lambda: _stack(
        (32,), layers.Dense(32, "tanh"), layers.Dense(16, "sigmoid"), layers.Dense(1)
    ),
    "dense on steps": lambda: _stack(
        (20, 12),
        layers.Dense(24, "relu"),
        layers.Dense(8, "relu"),
        layers.Flatten(),
        layers.Dense(3),
    ),
    "autoencoder": _encoder,
    "LeNet": lambda: _stack(
        (28, 28, 1),
        *(layers.Conv2D(6, 5, padding="same", activation="relu"), layers.MaxPooling2D()),
        *(layers.Conv2D(16, 5, activation="relu"), layers.MaxPooling2D(), layers.Flatten()),
        *(layers.Dense(120, "relu"), layers.Dense(84, "relu"), layers.Dense(10, "softmax")),
    ),
    "sensor, Conv1D": lambda: _stack(
        (128, 3),
        *_normalized(layers.Conv1D(16, 5, 2), layers.Conv1D(32, 5, 2)),
        *(layers.GlobalAveragePooling1D(), layers.Dense(6, "softmax")),
    ),
    "keywords, DS-CNN": _keywords,
    "ResNet8": _residual,
    "MobileNet 0.25, 96x96": lambda: keras.applications.MobileNet(
        (96, 96, 1), 0.25, weights=None, classes=2
    ),
}


ZOO: dict[str, dict[str, Any]] = {
    "MobileNet": {"alpha": 0.25},
    "MobileNetV2": {"alpha": 0.35},
    "MobileNetV3Small": {"alpha": 0.75},
    "MobileNetV3Large": {"alpha": 0.75},
    "EfficientNetB0": {},
    "EfficientNetV2B0": {},
    "NASNetMobile": {},
    "DenseNet121": {},
    "ResNet50": {},
    "ResNet50V2": {},
    "ResNetRS50": {},
    "RegNetX002": {},
    "RegNetY002": {},
    "RegNetY004": {},
    "Xception": {"input_shape": (71, 71, 3)},
    "InceptionV3": {"input_shape": (75, 75, 3)},
}
"""Networks of keras.applications and how they are made, if not of 32x32 pixels."""


def zoo(only: str) -> None:
    """Prints what TFLite Micro makes of each network."""
    print("| network | same codes | arena, kB | file, kB |\n| --- | --- | --- | --- |")
    for name, options in ZOO.items():
        if only not in name:
            continue
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        build = getattr(keras.applications, name, None) or getattr(keras.applications.regnet, name)
        shape = options.get("input_shape", (32, 32, 3))
        model = build(**{"input_shape": shape, "weights": None, "classes": 10, **options})
        x = np.random.default_rng(1).uniform(-1, 1, (4, *shape)).astype(np.float32)
        qat = keras_qat.quantize_model(model, target="tflm")
        keras_qat.calibrate(qat, x)
        contents = keras_qat.export_tflite(qat)
        report = keras_qat.verify(qat, contents, x)
        assert report.arena_size is not None
        sizes = f"{report.arena_size / 1000:.0f} | {len(contents) / 1000:.0f}"
        print(f"| {name} | {report.identical:.2%} | {sizes} |", flush=True)


def converted(model: Any, x: np.ndarray) -> bytes:
    """The file of TFLite's own converter."""
    fixed = keras.models.clone_model(
        model, input_tensors=keras.Input(model.input_shape[1:], batch_size=1)
    )
    fixed.set_weights(model.get_weights())
    converter = tf.lite.TFLiteConverter.from_keras_model(fixed)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: ([row[None]] for row in x)
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    converter.inference_input_type = converter.inference_output_type = tf.int8
    return converter.convert()


def sizes(contents: bytes) -> tuple[int, int]:
    """Bytes of a file and of its arena."""
    return len(contents), MicroInterpreter(contents).arena_size()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="networks whose name has this in it")
    parser.add_argument("--operators", action="store_true", help="prints those of both files")
    parser.add_argument("--zoo", action="store_true", help="networks of keras.applications instead")
    given = parser.parse_args()
    if given.zoo:
        zoo(given.only)
        return
    print("| network | same codes | file | converter's | | arena | converter's | |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, build in NETWORKS.items():
        if given.only not in name:
            continue
        keras.utils.set_random_seed(1)
        model = build()
        numbers = np.random.default_rng(1)
        for weight in model.trainable_weights:
            if "bias" in weight.name:  # The converter leaves out those that are zero.
                weight.assign(numbers.normal(0, 0.1, weight.shape))
        x = numbers.normal(size=(8, *model.input_shape[1:])).astype(np.float32)
        qat = keras_qat.quantize_model(model, target="tflm")
        keras_qat.calibrate(qat, x)
        ours, theirs = keras_qat.export_tflite(qat), converted(model, x)
        # Of one of them TFLite Micro ends the process.
        others = apart(sizes, theirs)
        others = others if isinstance(others, list) else [len(theirs), None]
        cells = [
            f"{one} | {other or '-'} | {f'{one / other:.2f}x' if other else '-'}"
            for one, other in zip(sizes(ours), others, strict=True)
        ]
        codes = keras_qat.verify(qat, ours, x).identical
        print(f"| {name} | {codes:.2%} | {' | '.join(cells)} |", flush=True)
        if given.operators:
            from keras_qat.tflite.reader import FileGraph

            for item in (ours, theirs):
                print([operation.kernel for operation in FileGraph(item).operations])


if __name__ == "__main__":
    main()
