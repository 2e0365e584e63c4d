"""Checks on random inputs that a trace computes the same outputs as its layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from keras_qat.graph.calls import Call, map_values
from keras_qat.keras2.backend import keras, set_keras_mask
from keras_qat.keras2.layers_and_models import accepts_training
from keras_qat.tracing.replaced_functions import deny_eager_execution

if TYPE_CHECKING:
    from keras_qat.tracing.trace_layer import Trace

SIZE = 8
"""Size of unknown axes in the random inputs. The batch size is 2."""


def draw_like(symbols: Iterable[tf.Tensor]) -> list[tf.Tensor]:
    generator = np.random.default_rng(0)
    tensors = []
    for symbol in symbols:
        unknown = [SIZE if axis else 2 for axis in range(len(symbol.shape))]
        sizes = [n if size is None else size for n, size in zip(unknown, symbol.shape, strict=True)]
        is_float = symbol.dtype.is_floating
        values = generator.normal(size=sizes) if is_float else generator.integers(0, 2, sizes)
        tensors.append(tf.cast(values, symbol.dtype))
    return tensors


def draw_inputs(trace: Trace) -> list[tf.Tensor]:
    """Draws random values for all inputs of a trace, followed by random Keras masks."""
    return draw_like((*trace.inputs.values(), *trace.masks.values()))


def find_deviation(call: Call, trace: Trace) -> str:
    """Runs a layer and its trace on random inputs. Returns why they differ, or ""."""
    inputs = draw_inputs(trace)
    tensors = dict(zip(trace.inputs, inputs, strict=False))
    for value, mask in zip(trace.masks, inputs[len(tensors) :], strict=True):
        set_keras_mask(tensors[value], mask)
    args, kwargs = map_values(tensors.__getitem__, (call.args, dict(call.kwargs)))
    if accepts_training(call.layer) and kwargs.get("training") is None:
        kwargs["training"] = False
    assigned = [weight for weight in trace.weights if id(weight) in trace.assigned]
    before, after, expected = _read_values(assigned), [], []
    try:
        for _ in range(2):
            with deny_eager_execution(), _restore_states(call.layer):  # As during tracing.
                outputs = drop_none(call.layer(*args, **kwargs))
            expected.append(list(map(tf.convert_to_tensor, outputs)))
            after.append(_read_values(assigned))
    except Exception:  # The layer does not support the assumed sizes.
        return ""
    finally:
        for weight, held in zip(assigned, before, strict=True):
            weight.assign(held)
    if not all(map(np.allclose, *after)):
        return "it assigns another value to a weight in each call"
    with _restore_states(call.layer):
        computed = list(map(tf.convert_to_tensor, trace(inputs)))
    if len(computed) != len(expected[0]):
        return "its outputs differ from call to call"
    for first, second, traced in zip(*expected, computed, strict=True):
        magnitudes = np.abs(np.asarray(tf.cast(first, tf.float32)))
        largest = np.max(magnitudes, initial=0.0, where=np.isfinite(magnitudes))
        for values in (second, traced):
            if first.shape != values.shape or not np.allclose(
                first, values, rtol=1e-4, atol=1e-5 * largest + 1e-12, equal_nan=True
            ):
                return "its outputs differ from call to call"
    return ""


@contextlib.contextmanager
def _restore_states(layer: keras.layers.Layer) -> Iterator[None]:
    keepers = [inner for inner in layer._flatten_layers() if getattr(inner, "stateful", False)]
    states = [state for inner in keepers for state in tf.nest.flatten(getattr(inner, "states", []))]
    before = [None if state is None else tf.identity(state) for state in states]
    try:
        yield
    finally:
        for state, value in zip(states, before, strict=True):
            if value is not None:
                state.assign(value)


def drop_none(outputs: object) -> list[Any]:
    return [output for output in tf.nest.flatten(outputs) if output is not None]


def _read_values(weights: list[tf.Variable]) -> list[NDArray[Any]]:
    return [tf.convert_to_tensor(weight).numpy() for weight in weights]
