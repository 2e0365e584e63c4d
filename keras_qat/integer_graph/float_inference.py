"""Inference of a quantization-aware model in float, without any quantization."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from keras_qat.graph.calls import Graph, Value, flatten_values
from keras_qat.graph.rebuild_model import evaluate_graph
from keras_qat.keras2.backend import make_tf_function
from keras_qat.training.calibration.watch import infer
from keras_qat.training.fake_quantization.phase import IN_FLOAT, Phase
from keras_qat.training.scheduled_layer import ScheduledLayer, assuming

FEW_RUNS = 4
"""Number of runs of a model that take less time than tracing it."""

MANY_VALUES = 1 << 21
"""Most input elements in one run. Small runs cost overhead."""

Evaluator = Callable[[Sequence[NDArray]], list[tf.Tensor]]


def make_evaluator(
    graph: Graph,
    outputs: list[Value],
    phase: Phase | None = IN_FLOAT,
    untraced_runs: int = FEW_RUNS,
) -> Evaluator:
    """Returns a function from a model's inputs to values of its graph, layer by layer.

    `phase` is the phase of its layers, or None for the current one. The function is traced after
    `untraced_runs` runs.
    """
    graph = dataclasses.replace(graph, outputs=outputs)
    specs = [tf.TensorSpec(value.shape, value.dtype) for value in flatten_values(graph.inputs)]
    layers = {call.layer: None for call in graph.calls if isinstance(call.layer, ScheduledLayer)}

    def compute(*inputs: tf.Tensor) -> list[tf.Tensor]:
        with assuming(phase, layers):
            return evaluate_graph(graph, list(inputs), infer)

    traced_compute, runs = make_tf_function(compute, input_signature=specs), 0

    def evaluate(arrays: Sequence[NDArray]) -> list[tf.Tensor]:
        nonlocal runs
        runs += 1
        inputs = (tf.constant(x, spec.dtype) for x, spec in zip(arrays, specs, strict=True))
        return (compute if runs <= untraced_runs else traced_compute)(*inputs)

    return evaluate


def evaluate_all(
    evaluate: Evaluator, inputs: list[NDArray], batch_size: int | None
) -> list[NDArray]:
    """Computes an array for each output. Without a batch size, a fast one is used."""
    size = batch_size or max(32, MANY_VALUES * len(inputs[0]) // sum(x.size for x in inputs))
    runs = range(0, len(inputs[0]), size)
    batches = [evaluate([x[start : start + size] for x in inputs]) for start in runs]
    return [np.concatenate(output) for output in zip(*batches, strict=True)]
