"""Compares a quantization-aware model, in float, with the model that it was made from."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Graph, Value, flatten_values
from keras_qat.graph.facts import reach
from keras_qat.graph.operations import is_operation, name_in_tensorflow
from keras_qat.graph.read_model import read_model
from keras_qat.helper_layers.operations import MaskScores
from keras_qat.integer_graph.float_inference import evaluator
from keras_qat.keras2.backend import keras, layers
from keras_qat.messages import warn_caller

EXAMPLES, SIZE = 2, 8
"""Number of random examples, and the size of their other open axes."""

FAR, ROUNDED, MANY = 0.05, 1e-3, 0.1
"""How far off another number is, of its tensor's deviation and of itself; so many are a fault."""


def find_differing_outputs(graph: Graph, lowered: Graph, qat: keras.Model) -> str:
    """Returns the names of outputs that the float model computes otherwise, and warns of them.

    Layers and operations may be misunderstood when they are expanded.

    Args:
        graph: the float model as it was read.
        lowered: the same with layers split and opened.
        qat: the quantization-aware model, with the weights of the float model.
    """
    opened = {call.within[0].name: None for call in lowered.calls if call.within}
    has_states = any(getattr(call.layer, "stateful", False) for call in graph.calls)
    operations = {
        name_in_tensorflow(call.layer): None for call in graph.calls if is_operation(call.layer)
    }
    cannot_run = has_states or not tf.executing_eagerly() or tf.distribute.has_strategy()
    if cannot_run or not (opened or operations):
        return ""
    different = _different_outputs(graph, _flags(lowered), qat)
    differing = ", ".join(different)
    if different:
        names = ", ".join(list(opened or operations)[:5])
        warn_caller(
            f"'{qat.name}' does not compute what the float model does, before anything is rounded: "
            f"{differing} differ{'s' * (len(different) == 1)} on random inputs. One of "
            f"its layers or operations ({names}) is not understood. recipe.override(layer, "
            f"open=False) keeps a layer as it is, in float. Please report this, with the code."
        )
    return differing


def _different_outputs(graph: Graph, flags: set[Value], qat: keras.Model) -> list[str]:
    """Returns the names of outputs whose numbers differ; none where models cannot be run.

    Inputs among `flags` are 0 or 1. Both examples have to differ: in one of them masks may hide
    all that a row attends to, and then any result is right.
    """
    ours, inputs = read_model(qat), random_inputs(graph, flags)
    variables = {id(w): w for call in graph.calls for w in call.layer.non_trainable_weights}
    before = [tf.convert_to_tensor(variable).numpy() for variable in variables.values()]
    try:
        runs = [
            [np.asarray(y) for y in evaluator(each, flatten_values(each.outputs))(inputs)]
            for each in (graph, ours, graph)
        ]
    except Exception:  # Random numbers may be nothing that the model takes.
        return []
    finally:
        for variable, held in zip(variables.values(), before, strict=True):
            variable.assign(held)
    return [
        name
        for name, expected, computed, again in zip(graph.output_names, *runs, strict=False)
        if np.array_equal(expected, again, equal_nan=True) and _both_differ(expected, computed)
    ]


def _flags(lowered: Graph) -> set[Value]:
    """Returns what masks are made of, which are understood as 0 or not, and tokens."""
    masks = [v for call in lowered.calls if type(call.layer) is MaskScores for v in call.inputs[1:]]
    masks += [
        v for call in lowered.calls if type(call.layer) is layers.Embedding for v in call.inputs
    ]
    return set(reach(masks, lambda value: value.producer.inputs if value.producer else ()))


def random_inputs(graph: Graph, flags: Collection[Value] = ()) -> list[np.ndarray]:
    """Returns random numbers for the inputs of a model, of those among `flags` 0 or 1."""
    return [
        _random(value, value in flags, i) for i, value in enumerate(flatten_values(graph.inputs))
    ]


def _random(value: Value, is_flag: bool, seed: int) -> np.ndarray:
    draw = np.random.default_rng(seed)
    sizes = [SIZE if size is None else size for size in value.shape]
    sizes[:1] = [value.shape[0] or EXAMPLES] if sizes else []
    if value.is_float and not is_flag:
        return draw.normal(size=sizes)
    numbers = draw.integers(0, 2, sizes)
    return _as_of_padding(numbers) if is_flag and len(sizes) > 1 else numbers


def _as_of_padding(flags: np.ndarray) -> np.ndarray:
    """Returns flags that end with padding: of every other example 1 means to see, else to hide."""
    flags = np.sort(flags, axis=-1)
    flags[..., 0] = 0
    flags[::2] = 1 - flags[::2]
    return flags


def _both_differ(expected: np.ndarray, computed: np.ndarray) -> bool:
    """Returns whether both kinds of examples differ: of flags that see, and of those that hide."""
    if expected.shape != computed.shape:
        return True
    others, count = np.atleast_1d(_others(expected, computed), np.isfinite(expected))
    kinds = range(min(len(others), 2) or 1)
    return all(np.sum(others[kind::2]) > MANY * np.sum(count[kind::2]) for kind in kinds)


def _others(expected: np.ndarray, computed: np.ndarray) -> np.ndarray:
    """Returns which numbers are others; those that are not finite in the float model are not."""
    if expected.dtype.kind != "f":
        return expected != computed
    finite = np.isfinite(expected)
    deviation = np.std(expected[finite]) if finite.any() else 0.0
    with np.errstate(invalid="ignore"):
        near = np.abs(computed - expected) <= FAR * deviation + ROUNDED * np.abs(expected) + 1e-6
    return finite & ~near
