"""Training in half precision against float32: accuracy of the file, training against file.

    PYTHONPATH=tutorials python -m benchmarks.half_precision
    PYTHONPATH=tutorials python -m benchmarks.half_precision --rounding

Three small networks on Fashion-MNIST, each trained in float32 and then quantization-aware with each
policy, from the same weights on the same batches. CPUs take minutes for a step in float16, so its
convolutions are computed as GPUs do: numbers of float16 in, sums in float32, rounded to float16.
`--rounding` trains nothing: it prints how far half precision moves quantized values.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import demo
import numpy as np
import tensorflow as tf
from demo_data import DATA, Data

import keras_qat
from keras_qat.keras2.backend import keras
from keras_qat.rewriting.quantized_model import QuantizedModel
from keras_qat.tflite.interpreter import FileInterpreter

POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")
EPOCHS, QAT_EPOCHS, BATCH = 4, 2, 64
TRAIN, SIMULATED = 4_000, 1_000
layers = keras.layers


def _conv(x: Any, filters: int, size: int, strides: int = 1, end: float | None = None) -> Any:
    x = layers.Conv2D(filters, size, strides, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization(momentum=0.9)(x)
    return layers.ReLU(end)(x)


def mobilenet_v2() -> Any:
    """Inverted residual blocks with ReLU6 and linear bottlenecks."""
    inputs = keras.Input((28, 28, 1), name="image")
    x = _conv(inputs, 16, 3, 2, 6.0)
    for filters, strides in ((16, 1), (24, 2), (24, 1), (32, 2), (32, 1)):
        y = _conv(x, 4 * x.shape[-1], 1, 1, 6.0)
        y = layers.DepthwiseConv2D(3, strides, padding="same", use_bias=False)(y)
        y = layers.ReLU(6.0)(layers.BatchNormalization(momentum=0.9)(y))
        y = layers.Conv2D(filters, 1, use_bias=False)(y)
        y = layers.BatchNormalization(momentum=0.9)(y)
        x = layers.Add()([x, y]) if x.shape == y.shape else y
    return _classifier(inputs, _conv(x, 128, 1, 1, 6.0))


def resnet() -> Any:
    """Residual blocks of two convolutions."""
    inputs = keras.Input((28, 28, 1), name="image")
    x = _conv(inputs, 16, 3, 2)
    for filters, strides in ((16, 1), (32, 2), (64, 2)):
        y = _conv(x, filters, 3, strides)
        y = layers.Conv2D(filters, 3, padding="same", use_bias=False)(y)
        y = layers.BatchNormalization(momentum=0.9)(y)
        if x.shape != y.shape:
            x = layers.Conv2D(filters, 1, strides, use_bias=False)(x)
            x = layers.BatchNormalization(momentum=0.9)(x)
        x = layers.ReLU()(layers.Add()([x, y]))
    return _classifier(inputs, x)


def _classifier(inputs: Any, x: Any) -> Any:
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(10, dtype="float32", name="logits")(x))


NETWORKS: dict[str, Callable[[], Any]] = {
    "demo": lambda: demo.build((28, 28, 1)),
    "MobileNetV2-like": mobilenet_v2,
    "ResNet-like": resnet,
}


def with_sums_in_float32(convolution: Callable[..., Any]) -> Callable[..., Any]:
    """A convolution of TensorFlow's that computes float16 as GPUs do."""

    @functools.wraps(convolution)
    def computed(x: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if x.dtype != tf.float16:
            return convolution(x, kernel, *args, **kwargs)
        x, kernel = tf.cast(x, tf.float32), tf.cast(kernel, tf.float32)
        return tf.cast(convolution(x, kernel, *args, **kwargs), tf.float16)

    return computed


def fit(
    model: Any, data: Data, epochs: int, rate: float, batch: int = BATCH, *callbacks: Any
) -> None:
    """Trains with a learning rate that falls to zero along a cosine."""
    steps = epochs * (len(data.x_train) // batch)
    model.compile(
        keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(rate, steps)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(data.x_train, data.y_train, batch, epochs, verbose=0, callbacks=list(callbacks))


def simulated(qat: Any, x: np.ndarray) -> np.ndarray:
    """What training computes, with the moving statistics."""
    call = super(QuantizedModel, qat).call
    compute = tf.function(lambda x: call(x, training=False))
    return np.concatenate([compute(item).numpy() for item in np.split(x, len(x) // 100)])


def measure(make: Callable[[], Any], weights: Any, data: Data, policy: str, seed: int) -> Any:
    """Accuracy of the file; its share of classes and of codes that training has, their distance."""
    keras.mixed_precision.set_global_policy(policy)
    try:
        model = make()
        model.set_weights(weights)
        qat = keras_qat.quantize_model(model)
        keras.utils.set_random_seed(seed)
        fit(qat, data, QAT_EPOCHS, 1e-3)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    file = FileInterpreter(keras_qat.export_tflite(qat))
    (codes,) = file.run({"image": data.x_test}).values()
    logits = file.outputs["logits"]
    first = codes[:SIMULATED].astype(np.int32)
    trained = np.rint(simulated(qat, data.x_test[:SIMULATED]) / logits.scale) + logits.zero_point
    return (
        100 * np.mean(codes.argmax(-1) == data.y_test),
        100 * np.mean(trained.argmax(-1) == first.argmax(-1)),
        100 * np.mean(trained == first),
        np.mean(np.abs(trained - first)),
    )


def rounding() -> str:
    """Returns how far half precision moves quantized values, of 1000 scales, as Markdown."""
    scales = np.exp2(np.random.default_rng(0).uniform(-6, -5, (1000, 1)))
    lines = ["| type | codes | largest, LSB | mean, LSB | moved by one |", "|" + " --- |" * 5]
    for dtype in (tf.float16, tf.bfloat16):
        for first, last in ((0, 255), (-127, 127)):
            codes = np.arange(first, last + 1)
            stored = tf.cast(tf.constant(scales * codes, tf.float32), dtype)
            distance = np.abs(tf.cast(stored, tf.float64).numpy() / scales - codes)
            moved = np.mean(np.rint(distance) > 0)
            name = f"| {dtype.name} | {first} to {last} |"
            lines.append(f"{name} {distance.max():.2f} | {distance.mean():.2f} | {moved:.1%} |")
    return "\n".join(lines)


def main() -> None:
    """Trains, exports and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS))
    parser.add_argument("--rounding", action="store_true", help="print that table alone")
    options = parser.parse_args()
    if options.rounding:
        print(rounding())
        return
    tf.compat.v2.nn.convolution = with_sums_in_float32(tf.nn.convolution)
    tf.compat.v2.nn.depthwise_conv2d = with_sums_in_float32(tf.nn.depthwise_conv2d)
    data = DATA["fashion-mnist"]().subset(TRAIN, 10_000)
    print(f"{'':<36}{'accuracy':>10}{'same class':>12}{'same codes':>12}{'mean LSB':>10}")
    for name in options.networks:
        result: dict[str, list[Any]] = {policy: [] for policy in POLICIES}
        for seed in range(options.seeds):
            keras.utils.set_random_seed(seed)
            model = NETWORKS[name]()
            fit(model, data, EPOCHS, 3e-3)
            for policy in POLICIES:
                row = measure(NETWORKS[name], model.get_weights(), data, policy, seed)
                result[policy].append(row)
                _print(f"{name} {policy} {seed}", row)
        for policy, rows in result.items():
            _print(f"{name} {policy} mean", np.mean(rows, 0))


def _print(label: str, row: Any) -> None:
    accuracy, classes, codes, distance = row
    print(
        f"{label:<36}{accuracy:>10.2f}{classes:>12.2f}{codes:>12.2f}{distance:>10.3f}", flush=True
    )


if __name__ == "__main__":
    main()
