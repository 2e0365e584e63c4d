"""Compares a new quantization-aware model, with quantization off, with its float model."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Graph, Value, flatten_values
from keras_qat.graph.facts import reach
from keras_qat.graph.operations import is_operation, name_in_tensorflow
from keras_qat.graph.read_model import read_model
from keras_qat.helper_layers.operations import MaskScores
from keras_qat.integer_graph.float_inference import draw_inputs, make_evaluator
from keras_qat.keras2.backend import keras, layers
from keras_qat.messages import warn_caller

FAR, ROUNDED, MANY = 0.05, 1e-3, 0.1
"""An output element is wrong if its error exceeds `FAR` times the standard deviation of the output,
plus `ROUNDED` times the expected value. An output is reported if more than the share `MANY` of its
elements is wrong."""


def find_differing_outputs(graph: Graph, lowered: Graph, qat: keras.Model) -> str:
    """Returns the names of outputs that differ from the float model. Warns about these outputs."""
    traced = {call.within[0].name: None for call in lowered.calls if call.within}
    has_states = any(getattr(call.layer, "stateful", False) for call in graph.calls)
    operations = {
        name_in_tensorflow(call.layer): None for call in graph.calls if is_operation(call.layer)
    }
    cannot_run = has_states or not tf.executing_eagerly() or tf.distribute.has_strategy()
    if cannot_run or not (traced or operations):
        return ""
    different = _list_differing(graph, _find_flags(lowered), qat)
    differing = ", ".join(different)
    if different:
        names = ", ".join(list(traced or operations)[:5])
        warn_caller(
            f"'{qat.name}' differs from the float model even without rounding: {differing} "
            f"differ{'s' * (len(different) == 1)} on random inputs. keras_qat misreads one of its "
            f"layers or operations ({names}). recipe.override(layer, open=False) keeps a layer "
            f"unchanged, in float. Please report this, with the code."
        )
    return differing


def _list_differing(graph: Graph, flags: set[Value], qat: keras.Model) -> list[str]:
    """Return the names of outputs that differ. Return [] if the models reject random inputs.

    `flags` are token ids and masks. They begin with 1 in even examples, and with 0 in odd examples.
    In some examples, an attention mask may hide all values. Their outputs are then arbitrary.
    """
    ours, inputs = read_model(qat), draw_inputs(graph, flags)
    variables = {id(w): w for call in graph.calls for w in call.layer.non_trainable_weights}
    before = [tf.convert_to_tensor(variable).numpy() for variable in variables.values()]
    try:
        runs = [
            [np.asarray(y) for y in make_evaluator(each, flatten_values(each.outputs))(inputs)]
            for each in (graph, ours, graph)
        ]
    except Exception:  # The model may not accept random values.
        return []
    finally:
        for variable, held in zip(variables.values(), before, strict=True):
            variable.assign(held)
    return [
        name
        for name, expected, computed, again in zip(graph.output_names, *runs, strict=False)
        if np.array_equal(expected, again, equal_nan=True) and _both_differ(expected, computed)
    ]


def _find_flags(lowered: Graph) -> set[Value]:
    """Return token ids, attention masks, and all values that are needed to compute them."""
    flags = [v for call in lowered.calls if type(call.layer) is MaskScores for v in call.inputs[1:]]
    flags += [
        v for call in lowered.calls if type(call.layer) is layers.Embedding for v in call.inputs
    ]
    return set(reach(flags, lambda value: value.producer.inputs if value.producer else ()))


def _both_differ(expected: np.ndarray, computed: np.ndarray) -> bool:
    """Return True if many results are wrong in the even examples, and many in the odd examples.

    Masks can cause differences only in even examples or only in odd ones. See `_list_differing`.
    """
    if expected.shape != computed.shape:
        return True
    differs, count = np.atleast_1d(_find_differences(expected, computed), np.isfinite(expected))
    kinds = range(min(len(differs), 2) or 1)
    return all(np.sum(differs[kind::2]) > MANY * np.sum(count[kind::2]) for kind in kinds)


def _find_differences(expected: np.ndarray, computed: np.ndarray) -> np.ndarray:
    """Return an array with True for wrong values. Expected NaN and infinity are ignored."""
    if expected.dtype.kind != "f":
        return expected != computed
    finite = np.isfinite(expected)
    deviation = np.std(expected[finite]) if finite.any() else 0.0
    with np.errstate(invalid="ignore"):
        near = np.abs(computed - expected) <= FAR * deviation + ROUNDED * np.abs(expected) + 1e-6
    return finite & ~near
