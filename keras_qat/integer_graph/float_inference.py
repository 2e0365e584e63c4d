"""Inference of a quantization-aware model in float, its weights unquantized too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Graph, Value, flatten_values
from keras_qat.graph.rebuild_model import evaluate_graph
from keras_qat.keras2.backend import make_tf_function
from keras_qat.training.calibration.watch import infer
from keras_qat.training.fake_quantization.phase import (
    IN_FLOAT,
    Phase,
)
from keras_qat.training.scheduled_layer import (
    ScheduledLayer,
    assuming,
)

FEW_RUNS = 4
"""Runs of a model that take no longer than tracing it does."""

MANY_NUMBERS = 1 << 21
"""Input elements up to which one run takes all examples, as small runs cost a start each."""

Evaluator = Callable[[Sequence[np.ndarray]], list[Any]]


def evaluator(
    graph: Graph,
    outputs: list[Value],
    phase: Phase | None = IN_FLOAT,
    untraced_runs: int = FEW_RUNS,
) -> Evaluator:
    """Returns a function from a model's inputs to values of its graph, layer by layer.

    Args:
        graph: the model's graph.
        outputs: the values to compute.
        phase: of its layers; None for the one that they are in.
        untraced_runs: how many runs are made before the function is traced.
    """
    graph = dataclasses.replace(graph, outputs=outputs)
    specs = [tf.TensorSpec(value.shape, value.dtype) for value in flatten_values(graph.inputs)]
    layers = {call.layer: None for call in graph.calls if isinstance(call.layer, ScheduledLayer)}

    def compute(*inputs: Any) -> list[Any]:
        with assuming(phase, layers):
            return evaluate_graph(graph, list(inputs), infer)

    traced_compute, runs = make_tf_function(compute, input_signature=specs), 0

    def evaluate(arrays: Sequence[np.ndarray]) -> list[Any]:
        nonlocal runs
        runs += 1
        inputs = (tf.constant(x, spec.dtype) for x, spec in zip(arrays, specs, strict=True))
        return (compute if runs <= untraced_runs else traced_compute)(*inputs)

    return evaluate


def float_outputs(
    evaluate: Evaluator, inputs: list[np.ndarray], batch_size: int | None
) -> list[np.ndarray]:
    """Computes the outputs for all examples: an array for each.

    Args:
        evaluate: the evaluator of the outputs.
        inputs: an array for each input.
        batch_size: how many examples a run takes; None for as many as are quick.
    """
    size = batch_size or max(32, MANY_NUMBERS * len(inputs[0]) // sum(x.size for x in inputs))
    runs = range(0, len(inputs[0]), size)
    parts = [evaluate([x[start : start + size] for x in inputs]) for start in runs]
    return [np.concatenate(output) for output in zip(*parts, strict=True)]
