"""Compares the trace of a layer with the layer, on random numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, map_values
from keras_qat.keras2.backend import set_keras_mask
from keras_qat.keras2.layers_and_models import accepts_training
from keras_qat.tracing.replaced_functions import deny_eager_execution

SIZE = 8
"""Size of open axes in the random inputs."""


def random_inputs(trace: Any) -> list[Any]:
    """Draws random inputs for a trace, and then their masks."""
    draw = np.random.default_rng(0)
    tensors = []
    for symbol in (*trace.inputs.values(), *trace.masks.values()):
        sizes = [SIZE if size is None else size for size in symbol.shape]
        sizes[:1] = [2 if symbol.shape[0] is None else symbol.shape[0]] if sizes else []
        is_float = symbol.dtype.is_floating
        drawn = draw.normal(size=sizes) if is_float else draw.integers(0, 2, sizes)
        tensors.append(tf.cast(drawn, symbol.dtype))
    return tensors


def find_deviation(call: Call, trace: Any) -> str:
    """Returns why a trace does not compute what its layer computes, "" if it does."""
    drawn = random_inputs(trace)
    numbers = dict(zip(trace.inputs, drawn, strict=False))
    for value, mask in zip(trace.masks, drawn[len(numbers) :], strict=True):
        set_keras_mask(numbers[value], mask)
    args, kwargs = map_values(numbers.__getitem__, (call.args, dict(call.kwargs)))
    if accepts_training(call.layer) and kwargs.get("training") is None:
        kwargs["training"] = False
    assigned = [weight for weight in trace.weights if id(weight) in trace.assigned]
    before, after = _values_of(assigned), []
    try:
        expected = []
        for _ in range(2):
            with deny_eager_execution():  # As in the trace.
                outputs = without_none(call.layer(*args, **kwargs))
            expected.append(list(map(tf.convert_to_tensor, outputs)))
            after.append(_values_of(assigned))
    except Exception:  # Sizes that do not fit: nothing to compare with.
        return ""
    finally:
        for weight, held in zip(assigned, before, strict=True):
            weight.assign(held)
    if not all(map(np.allclose, *after)):
        return "it assigns another value to a weight each time"
    computed = list(map(tf.convert_to_tensor, trace(drawn)))
    if len(computed) != len(expected[0]):
        return "it does not return the same each time"
    for first, second, traced in zip(*expected, computed, strict=True):
        magnitudes = np.abs(np.asarray(tf.cast(first, tf.float32)))
        largest = np.max(magnitudes, initial=0.0, where=np.isfinite(magnitudes))
        for values in (second, traced):
            if first.shape != values.shape or not np.allclose(
                first, values, rtol=1e-4, atol=1e-5 * largest + 1e-12, equal_nan=True
            ):
                return "it does not compute the same each time"
    return ""


def without_none(outputs: Any) -> list[Any]:
    """Returns what a layer returns as a list, without the None that some return beside it."""
    return [output for output in tf.nest.flatten(outputs) if output is not None]


def _values_of(weights: list[Any]) -> list[np.ndarray]:
    """Returns copies of what variables hold."""
    return [tf.convert_to_tensor(weight).numpy() for weight in weights]
