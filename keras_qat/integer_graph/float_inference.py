"""Inference of a quantization-aware model in float, without any quantization."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from keras_qat.graph.calls import Graph, Value, flatten_values
from keras_qat.graph.rebuild_model import evaluate_graph
from keras_qat.io.inputs import explain_batch_size
from keras_qat.keras2.backend import trace_for_any_batch
from keras_qat.training.calibration.watch import infer
from keras_qat.training.fake_quantization.phase import IN_FLOAT, Phase
from keras_qat.training.scheduled_layer import ScheduledLayer, assuming

FEW_RUNS = 4
"""Number of eager runs before a function is traced. Tracing takes longer than a few eager runs."""

MANY_VALUES, MANY_EXAMPLES = 1 << 19, 16
"""Without a `batch_size`, `evaluate_all` limits the largest tensor of a batch to `MANY_VALUES`
elements. But a batch has at least `MANY_EXAMPLES` examples."""

EXAMPLES, SIZE = 2, 8
"""Shapes of random inputs: the number of examples, and the size of each unknown axis."""

Evaluator = Callable[[Sequence[NDArray]], list[tf.Tensor]]


def make_evaluator(
    graph: Graph,
    outputs: list[Value],
    phase: Phase | None = IN_FLOAT,
    untraced_runs: int = FEW_RUNS,
) -> Evaluator:
    """Returns a function that computes `outputs` from a model's inputs.

    `outputs` may be inner tensors. The layers compute in `phase`, by default in float. If `phase`
    is None, they compute in their current phase. The first `untraced_runs` runs are eager.
    """
    graph = dataclasses.replace(graph, outputs=outputs)
    specs = [tf.TensorSpec(value.shape, value.dtype) for value in flatten_values(graph.inputs)]
    layers = {call.layer: None for call in graph.calls if isinstance(call.layer, ScheduledLayer)}

    def compute(*inputs: tf.Tensor) -> list[tf.Tensor]:
        with assuming(phase, layers):
            return evaluate_graph(graph, list(inputs), infer)

    trace, runs = functools.cache(lambda: trace_for_any_batch(compute, specs)), 0

    def evaluate(arrays: Sequence[NDArray]) -> list[tf.Tensor]:
        nonlocal runs
        runs += 1
        inputs = (tf.constant(x, spec.dtype) for x, spec in zip(arrays, specs, strict=True))
        with explain_batch_size(graph.name, specs[0].shape[0], len(arrays[0])):
            return list((compute if runs <= untraced_runs else trace())(*inputs))

    return evaluate


def evaluate_all(
    evaluate: Evaluator, graph: Graph, inputs: list[NDArray], batch_size: int | None
) -> list[NDArray]:
    """Runs `evaluate` in batches, and returns one array for each output."""
    values = [value for call in graph.calls for value in flatten_values(call.outputs)]
    largest = max((count_elements(value.shape, inputs) for value in values), default=1)
    size = batch_size or max(MANY_EXAMPLES, MANY_VALUES // largest)
    runs = range(0, len(inputs[0]), size)
    batches = [evaluate([x[start : start + size] for x in inputs]) for start in runs]
    return [
        np.concatenate(output) if len(output) > 1 and output[0].shape else np.asarray(output[0])
        for output in zip(*batches, strict=True)
    ]


def count_elements(shape: Sequence[int | None], inputs: Sequence[NDArray]) -> int:
    """Estimates the number of elements of a tensor per example.

    Each unknown size is replaced by the largest size of the inputs, such as a sequence length.
    """
    longest = max((size for x in inputs for size in x.shape[1:]), default=1)
    return math.prod(longest if size is None else size for size in shape[1:])


def mixes_rows(graph: Graph, rows: int, size: int) -> bool:
    """Returns whether an example's outputs depend on the other examples of a batch.

    For example, the first axis of a graph neural network may contain the nodes of a single graph.
    Compares the outputs for `rows` examples and for `size` examples. Also returns True if `size`
    examples cannot be computed.
    """
    outputs, inputs = flatten_values(graph.outputs), draw_inputs(graph)
    inside = [value for call in graph.calls for value in flatten_values(call.outputs)]
    resized = [np.resize(x, (size, *x.shape[1:])) for x in inputs]
    try:
        expected = make_evaluator(graph, outputs)(inputs)
        others = make_evaluator(graph, [*outputs, *inside])(resized)
    except (TypeError, ValueError, tf.errors.OpError):
        return True
    has_equal_rows = functools.partial(_has_equal_rows, size / rows)
    return any(0 in y.shape for y in others) or not all(map(has_equal_rows, expected, others))


def _has_equal_rows(share: float, first: tf.Tensor, second: tf.Tensor) -> bool:
    """Return True if the first rows are equal, and the numbers of rows have the ratio `share`."""
    if not first.shape or second.shape[0] != first.shape[0] * share:
        return False
    count = min(first.shape[0], second.shape[0])
    tolerance = 1e-5 * float(tf.reduce_max(tf.abs(tf.cast(first, tf.float32))))
    return np.allclose(first[:count], second[:count], 1e-4, tolerance, equal_nan=True)


def draw_inputs(graph: Graph, flags: Collection[Value] = ()) -> list[np.ndarray]:
    """Returns random inputs for a model. Inputs in `flags`, such as masks, only contain 0 and 1."""
    inputs = flatten_values(graph.inputs)
    return [_draw_input(value, value in flags, i) for i, value in enumerate(inputs)]


def _draw_input(value: Value, is_flag: bool, seed: int) -> np.ndarray:
    draw = np.random.default_rng(seed)
    sizes = [SIZE if size is None else size for size in value.shape]
    sizes[:1] = [value.shape[0] or EXAMPLES] if sizes else []
    if value.is_float and not is_flag:
        return draw.normal(size=sizes)
    flags = draw.integers(0, 2, sizes)
    if is_flag and len(sizes) > 1:  # A typical mask has all its padding at one end.
        flags = np.sort(flags, axis=-1)
        flags[..., 0] = 0
        flags[::2] = 1 - flags[::2]
    return flags
