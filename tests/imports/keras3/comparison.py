"""Compares models of Keras 3 with their conversions to Keras 2."""

from typing import Any

import numpy as np
import tensorflow as tf

import keras_qat
from tests.helpers import rng


def scrambled(model: Any, seed: int = 3) -> Any:
    """Gives a model of Keras 3 random weights, with non-negative variances and counts."""
    numbers = rng(seed)
    for weight in model.weights:
        value = numbers.normal(0.0, 0.5, weight.shape)
        if weight.path.endswith(("variance", "count")):
            value = np.abs(value)
        weight.assign(value.astype(weight.dtype))
    for layer in model._flatten_layers(include_self=False):
        if hasattr(layer, "finalize_state"):
            layer.finalize_state()
    return model


def inputs_of(model: Any, count: int = 2, seed: int = 4) -> Any:
    """Returns random inputs of a model of Keras 3, in the structure that it accepts."""
    numbers = rng(seed)

    def draw(tensor: Any) -> np.ndarray:
        shape = (count, *(size or 5 for size in tensor.shape[1:]))
        if "int" in tensor.dtype:
            return numbers.integers(0, 4, shape).astype(tensor.dtype)
        return numbers.normal(size=shape).astype(tensor.dtype)

    return tf.nest.map_structure(draw, model.input)


def assert_equal_outputs(model: Any, converted: Any, x: Any, rtol: float = 1e-5) -> None:
    expected, result = (variant(x, training=False) for variant in (model, converted))
    tf.nest.assert_same_structure(expected, result)
    names = sorted(expected) if isinstance(expected, dict) else [""]
    for i, (theirs, ours) in enumerate(zip(*map(tf.nest.flatten, (expected, result)), strict=True)):
        assert theirs.dtype == ours.dtype
        theirs, ours, name = np.asarray(theirs), np.asarray(ours), names[min(i, len(names) - 1)]
        atol = 0.0 if theirs.dtype.kind in "iub" else rtol * np.max(np.abs(theirs), initial=1e-30)
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol, err_msg=name)


def assert_converts(model: Any, x: Any = None) -> Any:
    """Asserts that a model is converted, computes the same, and returns its weights."""
    scrambled(model)
    x = inputs_of(model) if x is None else x
    converted = keras_qat.from_keras_3(model)
    assert_equal_outputs(model, converted, x)
    ours, theirs = (
        {layer.name: layer.trainable for layer in variant.layers if layer.weights}
        for variant in (converted, model)
    )
    assert ours == theirs
    if model.weights:
        for weight in converted.weights:
            weight.assign(tf.abs(weight) * 0.9 if weight.dtype.is_floating else weight)
        for layer in converted._flatten_layers():
            layer.finalize_state()
        assert keras_qat.to_keras_3(converted, model) is model
        assert_equal_outputs(model, converted, x)
    return converted
