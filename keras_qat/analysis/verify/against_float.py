"""Compares outputs with the model in float: on some of the examples, or where need be on all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from keras_qat.analysis.verify.compare_outputs import Rows, compare_outputs
from keras_qat.analysis.verify.preconditions import faults
from keras_qat.analysis.verify.report import OutputReport
from keras_qat.analysis.verify.signal_to_noise import are_alike, hardly_differs
from keras_qat.analysis.verify.small_channels import small_channels
from keras_qat.analysis.verify.uses import uses_of
from keras_qat.analysis.verify.verdict import is_clearly_good
from keras_qat.integer_graph.float_inference import evaluate_all
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.keras2.losses import CompiledLoss
from keras_qat.ops.op import FixedRange
from keras_qat.tflite.interpreter import FileInterpreter
from keras_qat.training.recurrent import Stream

FEW = 32
"""Examples that tell whether a model is good, or which layer of a poor one is the weakest."""

MORE = 4
"""How many times as many examples are computed in float where those leave a doubt."""

QUICK = 1 << 19
"""Input elements of the examples that are computed in float where `FEW` have fewer."""

DROWNING = ("signals", "values", "classes or values")
"""Uses of an output in which small parts of it count as much as large ones."""


class AgainstFloat(NamedTuple):
    """The outputs' figures, and what is wrong with the model: see `faults`, `small_channels`."""

    outputs: tuple[OutputReport, ...]
    faults: list[str]
    drowned: list[str]


def against_float(
    evaluate: Callable[..., Any],
    graph: ResolvedGraph,
    file: FileInterpreter,
    inputs: list[np.ndarray],
    codes: dict[str, np.ndarray],
    expected: list[np.ndarray],
    examples: int,
    labels: list[np.ndarray | None],
    losses: list[CompiledLoss | None],
    count: int | None,
) -> AgainstFloat:
    """Compares a file's outputs with the model's, and with what the model computes in float.

    Args:
        evaluate: computes the model in float, from a batch of inputs.
        graph: its resolved graph.
        file: the file.
        inputs: an array for each input; the last batch is filled up.
        codes: what the file returned for each output, by name.
        expected: what the model predicted, in the order of its outputs.
        examples: how many examples to compare; the rest fills up the last batch.
        labels: what `labels_of` returned.
        losses: what each output was compiled with.
        count: how many examples to compute in float; None for `FEW`, or for as many as are quick.
            Where these leave a doubt, `MORE` times as many are.
    """

    def in_float(rows: Rows) -> list[np.ndarray]:
        with Stream(graph.origin.states):
            return evaluate_all(evaluate, [x[rows] for x in inputs], graph.origin.fixed_batch)

    def compared(exact: list[np.ndarray], rows: Rows) -> AgainstFloat:
        some = [x[rows] for x in inputs]
        uses = uses_of(graph, some, exact, losses)
        outputs = compare_outputs(
            graph, file, codes, expected, exact, rows, examples, labels, uses, losses, inputs
        )
        tell = _telling(graph, some, exact)
        outputs = [
            output if tells else dataclasses.replace(output, float_sqnr=None)
            for output, tells in zip(outputs, tell, strict=True)
        ]
        drowned = small_channels(
            [
                (name, in_float, y[rows])
                for name, in_float, y, output in zip(
                    graph.outputs, exact, expected, outputs, strict=True
                )
                if output.score is None and output.use in DROWNING
            ]
        )
        return AgainstFloat(tuple(outputs), faults(graph.origin.calls, some, exact), drowned)

    quick = QUICK * len(inputs[0]) // sum(x.size for x in inputs)
    count = min(count or max(FEW, quick), examples)
    has_labels = any(classes is not None for classes in labels)
    needs_all = has_labels or bool(graph.origin.fixed_batch)
    if needs_all or count == examples or any(len(y) != len(inputs[0]) for y in expected):
        return compared(in_float(slice(None)), slice(None))
    some = _spread(count, examples)
    exact = in_float(some)
    result = compared(exact, some)
    if not result.faults and not result.drowned and all(map(is_clearly_good, result.outputs)):
        return result
    others = np.setdiff1d(np.arange(examples), some)
    rest = others[_spread(min((MORE - 1) * count, len(others)), len(others))]
    rows = np.concatenate([some, rest])
    parts = zip(exact, in_float(rest), strict=True)
    return compared([np.concatenate(both) for both in parts], rows)


def _telling(graph: ResolvedGraph, inputs: list[np.ndarray], exact: list[np.ndarray]) -> list[bool]:
    """Returns whether the examples tell what quantization costs, for each output.

    Examples that are alike do not, nor do those of which all probabilities are nearly the same, as
    where an event is rare. That outputs hardly differ may else be the fault of their range.
    """
    fixed = {
        tensor
        for node in graph.nodes
        for tensor in node.outputs
        if node.op is not None and isinstance(node.op.output, FixedRange)
    }
    # The inputs, which may be many, are only looked at for outputs that hardly differ.
    return [
        tensor.params is None
        or not hardly_differs(y, float(tensor.params.scale))
        or not (tensor in fixed or are_alike(inputs))
        for tensor, y in zip(graph.outputs.values(), exact, strict=True)
    ]


def _spread(count: int, examples: int) -> np.ndarray:
    """Returns the indices of so many examples, evenly spread."""
    return np.linspace(0, examples - 1, count).astype(int)
