"""Asserts that models compute correctly: in float, files and simulation, and after training."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.targets import TFLM, problems
from tests.comparison import KERNELS, assert_identical
from tests.helpers import assert_all_equal, images, keras, observe, save_and_load


def assert_exact_everywhere(
    qat: Any, x: np.ndarray, kernels: Any, per_layer: bool = False
) -> keras_qat.Report:
    """Asserts exact results with a kernel family, all in integers. Returns the report.

    Args:
        qat: a model with ranges.
        x: its inputs.
        kernels: the family.
        per_layer: whether to compare each tensor separately, too.
    """
    if kernels == "tflm":
        pytest.importorskip("tflite_micro")
    target = "tflm" if kernels == "tflm" else None
    contents = keras_qat.export_tflite(qat, target=target)
    assert kernels != "tflm" or not problems(contents, TFLM)
    qat.kernels = kernels
    report = keras_qat.verify(qat, contents, x, kernels=kernels, per_layer=per_layer)
    assert {tensor.identical for tensor in report.outputs} == {1.0}
    assert {tensor.run.identical for tensor in report.tensors} <= {1.0}
    result = keras_qat.simulate(qat, x, kernels=kernels)
    assert result.float_layers == ()
    predicted = qat.predict(x, verbose=0)
    outputs = predicted if isinstance(predicted, list) else [predicted]
    for simulated, output in zip(result.outputs.values(), outputs, strict=True):
        np.testing.assert_allclose(simulated.values, output, atol=1e-6)
    return report


def assert_trains_and_is_kept(qat: Any, x: Any, directory: Path) -> None:
    """Asserts that all weights train, and that saved and loaded models compute the same.

    Args:
        qat: a model without ranges.
        x: its inputs: an array, or a list of them.
        directory: where to save it.
    """
    before = [variable.numpy() for variable in qat.trainable_variables]
    qat.compile(keras.optimizers.SGD(0.1), "mse")
    qat.fit(x, tf.nest.map_structure(np.ones_like, qat.predict(x, verbose=0)), 8, verbose=0)
    moved = [np.any(old != new) for old, new in zip(before, qat.trainable_variables, strict=True)]
    assert all(moved)
    again = save_and_load(qat, directory / "qat.keras")
    expected = tf.nest.flatten(qat.predict(x, verbose=0))
    assert_all_equal(tf.nest.flatten(again.predict(x, verbose=0)), expected)
    assert keras_qat.export_tflite(again) == keras_qat.export_tflite(qat)
    assert_exact_everywhere(again, x, "xnnpack")
    keras_qat.export_saved_model(qat, directory / "saved")
    serve = tf.saved_model.load(str(directory / "saved")).signatures["serving_default"]
    given = dict(zip(qat.input_names, tf.nest.flatten(x), strict=True))
    served = serve(**{key: tf.constant(value) for key, value in given.items()})
    for name, y in zip(qat.output_names, expected, strict=True):
        np.testing.assert_array_equal(served[name], y)


def model_of(build: Any, shape: tuple[int, ...] = (6, 6, 4), dtype: str = "float32") -> Any:
    """Returns a model with one input. `build` is a layer, or a function of the input's tensor."""
    keras.utils.set_random_seed(3)
    x = keras.Input(shape, dtype=dtype)
    return keras.Model(x, build(x))


def inputs_of(model: Any, count: int = 32) -> np.ndarray:
    """Returns normally distributed values, or small integers."""
    (value,) = model.inputs
    if value.dtype.is_floating:
        return images(count, tuple(value.shape[1:]))
    numbers = np.random.default_rng(0).integers(0, 9, (count, *value.shape[1:]))
    return numbers.astype(value.dtype.as_numpy_dtype)


def assert_agreement(model: Any, x: Any = None, recipe: Any = "int8", reloaded: Any = None) -> None:
    """Asserts that file, model and simulation agree on all values.

    Args:
        model: a float model with one input.
        x: its inputs; random values by default.
        recipe: the recipe.
        reloaded: a directory to save the model in and load it from before; None for neither.
    """
    x = inputs_of(model) if x is None else x
    qat = observe(keras_qat.quantize_model(model, recipe), x)
    if reloaded is not None:
        qat = save_and_load(qat, reloaded / "qat.keras")
    contents = keras_qat.export_tflite(qat)
    report = keras_qat.verify(qat, contents, x, per_layer=True)
    assert report.identical == 1
    assert report.differing == ()
    for kernels in KERNELS:
        if "elu" not in str(keras_qat.resolve(qat)) or kernels == "xnnpack":
            assert_identical(qat, x, kernels, contents)
