"""The main job, end to end: train in float, quantize, fine-tune, export to int8, verify.

    python tutorials/demo.py                        # handwritten digits, 8x8 pixels
    python tutorials/demo.py --data fashion-mnist   # photos of clothes, 28x28 pixels

Ends with a table of what was measured, and fails if the int8 file is not as good as it should be.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from demo_data import DATA, Data
from demo_results import Results

import keras_qat
from keras_qat.keras2.backend import keras
from keras_qat.tflite.interpreter import FileInterpreter

BATCH = 32
EPOCHS = {"digits": (12, 6), "fashion-mnist": (4, 3)}
"""Data -> epochs in float, and of fine-tuning."""


def build(shape: tuple[int, int, int], classes: int = 10) -> keras.Model:
    """A small residual network: convolution, depthwise convolution, one residual block."""
    layers = keras.layers

    def conv(x: Any, filters: int, size: int, strides: int = 1) -> Any:
        x = layers.Conv2D(filters, size, strides, padding="same", use_bias=False)(x)
        return layers.BatchNormalization(momentum=0.9)(x)

    image = keras.Input(shape, name="image")
    x = layers.ReLU()(conv(image, 32, 3, strides=1 if shape[0] < 16 else 2))
    x = layers.DepthwiseConv2D(3, strides=2, padding="same", use_bias=False)(x)
    x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
    x = shortcut = layers.ReLU()(conv(x, 128, 1))
    x = layers.ReLU()(conv(x, 128, 3))
    x = layers.ReLU()(layers.Add()([conv(x, 128, 3), shortcut]))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(image, layers.Dense(classes, name="logits")(x))


def train(
    model: keras.Model, data: Data, epochs: int, learning_rate: float, callbacks: Any = ()
) -> None:
    """Trains with a learning rate that falls to zero along a cosine."""
    steps = epochs * -(-len(data.x_train) // BATCH)
    schedule = keras.optimizers.schedules.CosineDecay(learning_rate, steps)
    model.compile(
        keras.optimizers.Adam(schedule),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(data.x_train, data.y_train, BATCH, epochs, verbose=2, callbacks=list(callbacks))


def convert_float(model: keras.Model) -> bytes:
    """The float model as a float TFLite file, to compare with."""
    signature = [tf.TensorSpec(model.inputs[0].shape, tf.float32, name="image")]
    function = tf.function(lambda image: model(image, training=False), signature)
    converter = tf.lite.TFLiteConverter.from_concrete_functions(
        [function.get_concrete_function()], model
    )
    return converter.convert()


def latencies(files: list[FileInterpreter], image: np.ndarray, rounds: int = 500) -> list[float]:
    """Median time in ms that each file takes for one image. They take turns, to be fair."""
    times: list[list[float]] = [[] for _ in files]
    for file in files:
        file.run({"image": image})  # Sets the shape and the input, and warms up.
    for _ in range(rounds):
        for file, result in zip(files, times, strict=True):
            start = time.perf_counter()
            file.interpreter.invoke()
            result.append(1000 * (time.perf_counter() - start))
    return [statistics.median(result) for result in times]


def run(data: Data, epochs: int, qat_epochs: int, directory: Path) -> Results:
    """Does the job and measures the result."""
    x_test, y_test = data.x_test, data.y_test
    directory.mkdir(parents=True, exist_ok=True)

    heading(f"1. Train in float: {len(data.x_train)} images")
    keras.utils.set_random_seed(0)
    model = build(data.x_train.shape[1:])
    train(model, data, epochs, learning_rate=3e-3)

    heading("2. Quantize and fine-tune")
    print(keras_qat.plan(model), flush=True)
    qat = keras_qat.quantize_model(model)
    steps = len(data.x_train) // BATCH
    train(
        qat,
        data,
        qat_epochs,
        learning_rate=3e-5,
        callbacks=[
            # The ranges settle for an epoch before anything is rounded to them.
            keras_qat.callbacks.QuantDelay(steps),
            keras_qat.callbacks.FreezeBatchNorm(steps * qat_epochs // 2),
        ],
    )

    heading("3. Save and reload")
    qat.save(directory / "qat.keras")
    reloaded = keras.models.load_model(directory / "qat.keras")
    predicted = qat.predict(x_test, verbose=0)
    same = np.array_equal(predicted, reloaded.predict(x_test, verbose=0))
    print(f"The reloaded model's outputs are {'identical' if same else 'DIFFERENT'}.")

    heading(f"4. Export to {directory}")
    keras_qat.export_saved_model(reloaded, directory / "saved_model")
    keras_qat.export_tflite(reloaded, directory / "int8.tflite")
    (directory / "float.tflite").write_bytes(convert_float(model))
    print(*sorted(path.name for path in directory.iterdir()), sep="\n")

    heading(f"5. Verify: {len(x_test)} test images that were never trained on")
    report = keras_qat.verify(reloaded, directory / "int8.tflite", x_test)
    print(report)
    float_file, int8_file = (
        FileInterpreter(directory / f"{kind}.tflite") for kind in ("float", "int8")
    )
    operations = [
        name
        for name, reads, writes in int8_file.operations()
        if any(dtype.kind == "f" for dtype in reads + writes)
    ]
    (codes,) = int8_file.run({"image": x_test}).values()
    classes, tflite_classes = predicted.argmax(-1), codes.argmax(-1)
    float_latency, int8_latency = latencies([float_file, int8_file], x_test[:1])
    return Results(
        float_accuracy=float(np.mean(model.predict(x_test, verbose=0).argmax(-1) == y_test)),
        qat_accuracy=float(np.mean(classes == y_test)),
        tflite_accuracy=float(np.mean(tflite_classes == y_test)),
        agreement=float(np.mean(classes == tflite_classes)),
        identical=report.identical,
        max_difference=report.max_difference,
        float_size=float_file.size,
        int8_size=int8_file.size,
        float_latency=float_latency,
        int8_latency=int8_latency,
        float_operations=len(operations),
        reloaded_identical=same,
    )


def heading(text: str) -> None:
    """Says what comes next."""
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo from the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", choices=DATA, default="digits")
    parser.add_argument("--epochs", type=int, help="epochs in float")
    parser.add_argument("--qat-epochs", type=int, help="epochs of fine-tuning, 2 or more")
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="where files go")
    options = parser.parse_args(arguments)
    epochs, qat_epochs = EPOCHS[options.data]
    start = time.perf_counter()
    results = run(
        DATA[options.data](),
        options.epochs or epochs,
        options.qat_epochs or qat_epochs,
        options.out,
    )
    heading(f"Result on {options.data}")
    print(results)
    print()
    for check, reached in results.checks().items():
        print(f"{'reached' if reached else 'MISSED':<8} {check}")
    print(f"\n{time.perf_counter() - start:.0f} s in all.")
    return 0 if all(results.checks().values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
