"""One model of `keras.applications`, or of `benchmarks.wild`, taken through all the steps.

Runs in a process of its own, so that a crash is a result too. After every step the result so far
is printed as a line of JSON; the last line counts.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import inspect
import json
import resource
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.archives import whole_weights
from benchmarks.wild import builders as wild_builders

CLASSES = 10
BATCH = 4
SIZES = {"Xception": 71, "InceptionV3": 75, "InceptionResNetV2": 75}
"""Smallest input, where it is not 64."""
SCALES = {"per channel": True, "per tensor": False}
"""What one scale is for, and whether a recipe has one for each channel."""
NORMALIZING = ("LayerNormalization", "GroupNormalization")
"""Layers that are computed in integers if an override asks for it."""


def constructors() -> dict[str, Any]:
    """Every function of `keras.applications` that builds a model, by name."""
    from keras_qat.keras2.backend import keras

    return dict(sorted(inspect.getmembers(keras.applications, inspect.isfunction)))


def build(name: str, classes: int = CLASSES) -> Any:
    """The model with random weights, without its last softmax, BatchNormalization offsets 1.5.

    Random deep networks amplify a flip of one step. With this offset most units are in the linear
    range of their activation, and the differences at the output stay meaningful. Without softmax,
    which would hide them.
    """
    from keras_qat.keras2.backend import keras

    keras.utils.set_random_seed(1)
    size = SIZES.get(name, 64)
    model = constructors()[name](
        weights=None,
        input_shape=(size, size, 3),
        classes=classes,
        classifier_activation=None,
    )
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization) and layer.center:
            layer.beta.assign(np.full(layer.beta.shape, 1.5, np.float32))
    return model


def images(model: Any, count: int) -> np.ndarray:
    """Random inputs: bytes if the model has its preprocessing inside, else from -1 to 1."""
    preprocesses = any(
        type(layer).__name__ in ("Rescaling", "Normalization") for layer in model._flatten_layers()
    )
    low, high = (0, 255) if preprocesses else (-1, 1)
    numbers = np.random.default_rng(1).uniform(low, high, (count, *model.input_shape[1:]))
    return numbers.astype(np.float32)


class Result(dict):
    """What is known of a model so far; every step adds to it."""

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Measures a step and prints the result, with the error if it failed."""
        start = time.perf_counter()
        self["step"] = name
        try:
            yield
        except Exception as error:
            self["error"] = f"{type(error).__name__}: {error}"[:500]
            raise SystemExit(1) from error
        finally:
            self.setdefault("seconds", {})[name] = round(time.perf_counter() - start, 2)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            self.setdefault("peak_mb", {})[name] = peak
            print(json.dumps(self), flush=True)


def normalizing_in_integers(float_layers: dict[str, str]) -> Any:
    """The recipe that computes what a plan says to normalize in float in integers."""
    import keras_qat

    recipe = keras_qat.recipes.int8()
    for layer in NORMALIZING:
        if any(f"override('{layer}'" in reason for reason in float_layers.values()):
            recipe = recipe.override(layer, quantize=True)
    return recipe


def train_step(model: Any, x: Any, eagerly: bool = False) -> bool:
    """One step of gradient descent on random labels, or zeros; whether the loss is finite."""
    from keras_qat.keras2.backend import keras

    if isinstance(model.output, (list, tuple)) or model.output.shape[1:] != (CLASSES,):
        outputs = [np.asarray(tensor) for tensor in tf.nest.flatten(model(x))]
        targets = [np.zeros_like(output) for output in outputs]
        model.compile(keras.optimizers.SGD(1e-4), "mse", run_eagerly=eagerly)
        loss = model.train_on_batch(x, targets if len(targets) > 1 else targets[0])
        return bool(np.all(np.isfinite(loss)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(1e-4), loss, run_eagerly=eagerly)
    loss = model.train_on_batch(x, np.arange(len(x)) % CLASSES)
    return bool(np.isfinite(loss))


def arrays(model: Any, count: int) -> list[np.ndarray]:
    """Random inputs for any model: small indices, normally distributed numbers."""
    numbers, result = np.random.default_rng(1), []
    for tensor in model.inputs:
        sizes = (count, *(64 if size is None else size for size in tensor.shape[1:]))
        drawn = (
            numbers.normal(size=sizes)
            if tensor.dtype.is_floating
            else numbers.integers(0, 9, sizes)
        )
        result.append(drawn.astype(tensor.dtype.name))
    return result


def run(name: str, wild: bool = False) -> None:
    """Quantizes, trains, saves, reloads, exports and verifies a model with keras_qat."""
    import keras_qat
    from keras_qat.keras2.backend import keras

    result, count = Result(name=name), 2 * BATCH if wild else 4 * BATCH
    with result.step("build"):
        model = wild_builders()[name]() if wild else build(name)
        result["parameters"] = model.count_params()
        x: Any = None if wild else images(model, count)
    with result.step("quantize"):
        result["float_layers"] = before = keras_qat.plan(model).float_layers
        recipe = normalizing_in_integers(before) if wild else "int8"
        if wild:
            result["float_layers"] = keras_qat.plan(model, recipe).float_layers
            result["normalizing"] = len(before) - len(result["float_layers"])
        qat = keras_qat.quantize_model(model, recipe)
        x = arrays(qat, count) if wild else [x]

    def part(start: int, end: int) -> Any:
        parts = [row[start:end] for row in x]
        return parts if len(parts) > 1 else parts[0]

    customs = (
        {type(layer).__name__: type(layer) for layer in model._flatten_layers()} if wild else {}
    )
    del model
    with result.step("train"):
        result["trains"] = train_step(qat, part(0, BATCH), eagerly=wild)
    with result.step("calibrate"):
        keras_qat.freeze_batch_norm(qat)
        for start in range(0, count, BATCH):
            qat(part(start, start + BATCH), training=True)
    with result.step("reload"), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        qat.save(path)
        with whole_weights(), keras.utils.custom_object_scope(customs):
            reloaded = keras.models.load_model(path)
        result["reloads"] = compute_alike(qat, reloaded, None if wild else part(0, BATCH))
        del reloaded
    with result.step("export"):
        contents = keras_qat.export_tflite(qat)
        result["file_mb"] = round(len(contents) / 1e6, 2)
        result.update(operations(contents))
    with result.step("simulate"):
        result["simulated"] = simulated(qat, contents, [row[:BATCH] for row in x])
    with result.step("verify"):
        inputs = part(0, count)
        report = keras_qat.verify(qat, contents, inputs, per_layer=not wild, batch_size=BATCH)
        result["identical"] = report.identical
        if not wild:
            result["layers"] = layers(report)


def compute_alike(qat: Any, reloaded: Any, x: Any) -> bool:
    """Whether a model that was loaded computes what the saved one does, or has the same file.

    The latter where there is no data: it takes less time than to compute.
    """
    import keras_qat

    if x is None:
        return bool(keras_qat.export_tflite(reloaded) == keras_qat.export_tflite(qat))
    expected, outputs = (tf.nest.flatten(item(x, training=False)) for item in (qat, reloaded))
    return all(map(np.array_equal, expected, outputs))


def settle(model: Any, x: np.ndarray) -> None:
    """Gives BatchNormalization statistics as after training, and scales that vary by channel.

    One scale for all weights then has folded kernels of unlike channels to hold.
    """
    from keras_qat.keras2.backend import keras

    numbers = np.random.default_rng(2)
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = 0.0
            if layer.scale:
                layer.gamma.assign(numbers.uniform(0.5, 1.5, layer.gamma.shape))
            if layer.center:
                layer.beta.assign(numbers.normal(0.5, 0.5, layer.beta.shape))
    model(x, training=True)


def run_codes(name: str) -> None:
    """Compares codes only: one file with scales for each channel, one with one scale for all."""
    import keras_qat
    from keras_qat.tflite.interpreter import FileInterpreter

    result = Result(name=name, recipes={})
    with result.step("build"):
        model = build(name, classes=1000)
        x = images(model, 2 * BATCH)
        settle(model, x)
        result["parameters"] = model.count_params()
    for recipe, per_channel in SCALES.items():
        with result.step(recipe):
            qat = keras_qat.quantize_model(model, keras_qat.recipes.int8(per_channel=per_channel))
            keras_qat.freeze_batch_norm(qat)
            qat(x, training=True)
            contents = keras_qat.export_tflite(qat)
            computed = {
                **operations(contents),
                "predict": keras_qat.verify(qat, contents, x).identical,
            }
            for kernels in ("xnnpack", "reference"):
                (codes,) = FileInterpreter(contents, kernels).run({qat.input_names[0]: x}).values()
                (output,) = keras_qat.simulate(qat, x, kernels).outputs.values()
                computed[kernels] = float(np.mean(output.codes == codes))
                computed["distinct"] = len(np.unique(codes))
            result["recipes"][recipe] = computed
            del qat, contents


def simulated(qat: Any, contents: bytes, x: list[np.ndarray], kernels: Any = None) -> float:
    """Share of the file's output codes that the integer simulation gives as well.

    With the model's rounding by default; the interpreter's kernels are XNNPACK's.
    """
    import keras_qat
    from keras_qat.tflite.interpreter import FileInterpreter

    result = FileInterpreter(contents).run(dict(zip(qat.input_names, x, strict=True)))
    outputs = keras_qat.simulate(qat, x if len(x) > 1 else x[0], kernels).outputs
    shares = [
        np.mean(getattr(outputs[name], "codes", outputs[name]) == codes)
        for name, codes in result.items()
    ]
    return float(np.mean(shares))


def layers(report: Any) -> dict[str, Any]:
    """How the layers agree, each fed what the model computed before it."""
    fed = [(tensor.fed, tensor) for tensor in report.tensors if tensor.fed is not None]
    return {
        "compared": len(fed),
        "agree": sum(value.agrees for _, value in fed),
        "identical": float(np.mean([fed.identical for fed, _ in fed])),
        "largest": max(fed.max_difference for fed, _ in fed),
        "lowest": min((fed.identical, value.name, "+".join(value.kernels)) for fed, value in fed),
        "other_ranges": len(report.other_ranges),
    }


def operations(contents: bytes) -> dict[str, Any]:
    """How many operations compute in float, and how many only convert between types or ranges."""
    from keras_qat.tflite.interpreter import FileInterpreter

    floating: Any = collections.Counter()
    conversions: Any = collections.Counter()
    total = 0
    for name, reads, writes in FileInterpreter(contents).operations():
        total += 1
        if name in ("QUANTIZE", "DEQUANTIZE"):
            conversions["requantize" if reads == writes else name.lower()] += 1
        elif any(dtype.kind == "f" for dtype in reads + writes):
            floating[name] += 1
    return {
        "operations": total,
        "float_operations": dict(floating),
        "conversions": dict(conversions),
    }


def run_tfmot(name: str, wild: bool = False) -> None:
    """Quantizes, trains and converts a model with tensorflow_model_optimization."""
    import tensorflow_model_optimization as tfmot

    result = Result(name=name)
    with result.step("build"):
        model = wild_builders()[name]() if wild else build(name)
        x = images(model, BATCH)
    with result.step("quantize"):
        qat = tfmot.quantization.keras.quantize_model(model)
    with result.step("train"):
        result["trains"] = train_step(qat, x)
    with result.step("export"):
        converter = tf.lite.TFLiteConverter.from_keras_model(qat)
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
        converter.inference_input_type = converter.inference_output_type = tf.int8
        result.update(operations(converter.convert()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--tfmot", action="store_true")
    parser.add_argument("--wild", action="store_true")
    parser.add_argument("--codes", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.tfmot:
        run_tfmot(arguments.name, arguments.wild)
    elif arguments.codes:
        run_codes(arguments.name)
    else:
        run(arguments.name, arguments.wild)
