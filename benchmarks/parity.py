"""Trained networks, layer by layer: does the exported file compute what was trained?

    python -m benchmarks.parity                        handwritten digits, some minutes on 2 cores
    python -m benchmarks.parity --data fashion-mnist   photos of clothes, 28x28
    python -m benchmarks.parity --recipe int16x8       with 16-bit activations
    python -m benchmarks.parity resnet --tfmot         beside tensorflow_model_optimization

Trains small networks of the usual kinds in float and quantized, exports them and compares each
layer, fed the model's own codes, with every family of kernels. The model computes in its rounding.
With `--tfmot` the output codes of tfmot's file are compared with tfmot's model, too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tutorials"))

import demo
import numpy as np
from demo_data import DATA, Data

import keras_qat
from benchmarks.accuracy import by_tflite
from benchmarks.parity_models import MODELS
from keras_qat.keras2.backend import keras
from keras_qat.tflite.interpreter import FileInterpreter, Kernels

KERNELS: tuple[Kernels, ...] = ("xnnpack", "reference", "tflm")
NETWORKS = {"demo": lambda shape: demo.build(shape, 10), **MODELS}
BATCH = 32
HEADER = (
    f"{'network':<13} {'kernels':<10} {'layers':>6} {'agree':>6} {'worst fed':>10} {'LSB':>4}  "
    f"{'codes out':>9} {'LSB':>4} {'same class':>10}"
)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NETWORKS)}; all")
    parser.add_argument("--data", choices=DATA, default="digits")
    parser.add_argument("--recipe", default="int8", help="int8, int16x8, int4_weights or contrib")
    parser.add_argument("--layers", action="store_true", help="print each layer too")
    parser.add_argument("--epochs", type=int, default=6, help="of each of the two trainings")
    parser.add_argument("--tfmot", action="store_true", help="compare tfmot's model and file too")
    parser.add_argument("--output", type=Path, help="a JSON file with every figure")
    arguments = parser.parse_args()
    data = DATA[arguments.data]()
    results: dict[str, Any] = {}
    differing: dict[str, list[str]] = {}
    print(HEADER)
    for name in arguments.names or NETWORKS:
        quantize = partial(keras_qat.quantize_model, recipe=arguments.recipe)
        qat = trained(name, data, arguments.epochs, quantize)
        for kernels in KERNELS:
            qat.kernels = kernels
            contents = keras_qat.export_tflite(qat, batch_size=1 if kernels == "tflm" else None)
            report = keras_qat.verify(
                qat, contents, data.x_test, per_layer=True, kernels=kernels, batch_size=64
            )
            results.setdefault(name, {})[kernels] = report.to_dict()
            print(row(name, report), flush=True)
            if arguments.layers:
                print(report.table(width=100))
            for problem in report.differing:
                result = "" if problem.fed is None else f" {problem.fed.identical:.2%}"
                text = f"{name} {problem.name} ({'+'.join(problem.kernels)}){result}"
                differing.setdefault(kernels, []).append(text)
        if arguments.tfmot:
            print(row_of_tfmot(name, data, arguments.epochs), flush=True)
    for family, names in differing.items():
        print(f"\nBelow 99.9 % or off by more than 1 LSB with the {family} kernels:")
        print("\n".join(f"  {name}" for name in names))
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=1))


def trained(name: str, data: Data, epochs: int, quantize: Callable[[Any], Any]) -> Any:
    """A network that was trained in float, and then with quantization."""
    keras.utils.set_random_seed(0)
    model = NETWORKS[name](data.x_train.shape[1:])
    steps = -(-len(data.x_train) // BATCH)
    qat = None
    for rate in (3e-3, 1e-4):
        if rate == 1e-4:
            model = qat = quantize(model)
        model.compile(
            keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(rate, steps * epochs)),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        callbacks = [
            keras_qat.callbacks.QuantDelay(steps),
            keras_qat.callbacks.FreezeBatchNorm(steps * epochs // 2),
        ]
        model.fit(
            data.x_train,
            data.y_train,
            BATCH,
            epochs,
            verbose=0,
            callbacks=callbacks if isinstance(qat, keras_qat.QuantizedModel) else [],
        )
    return qat


def row_of_tfmot(name: str, data: Data, epochs: int) -> str:
    """One line: the output codes of tfmot's file, against its model's outputs in those codes."""
    import tensorflow_model_optimization as tfmot

    qat = trained(name, data, epochs, tfmot.quantization.keras.quantize_model)
    file = FileInterpreter(by_tflite(qat))
    (input_name,), (output,) = file.inputs, file.outputs.values()
    (codes,) = file.run({input_name: data.x_test}, 64).values()
    real = qat.predict(data.x_test, verbose=0)
    expected = np.clip(np.rint(real / output.scale) + output.zero_point, -128, 127)
    apart = np.abs(codes.astype(int) - expected)
    same = np.mean(codes.argmax(-1) == real.argmax(-1))
    return (
        f"{name:<13} {'tfmot':<10} {'':>6} {'':>6} {'':>10} {'':>4}  "
        f"{np.mean(apart == 0):>9.2%} {apart.max():>4.0f} {same:>10.2%}"
    )


def row(name: str, report: Any) -> str:
    """One line of the table."""
    fed = [tensor.fed for tensor in report.tensors if tensor.fed is not None]
    agree = len(report.tensors) - len(report.differing)
    (output,) = report.outputs
    return (
        f"{name:<13} {report.kernels:<10} {len(report.tensors):>6} {agree:>6} "
        f"{min(item.identical for item in fed):>10.3%} "
        f"{max(item.max_difference for item in fed):>4.0f}  {output.identical:>9.2%} "
        f"{output.max_difference:>4.0f} {output.argmax_agreement:>10.2%}"
    )


if __name__ == "__main__":
    main()
