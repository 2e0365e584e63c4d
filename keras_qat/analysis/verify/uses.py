"""What an output is used for, and how many of the decisions that it leads to stay the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.keras2.losses import CompiledLoss
from keras_qat.ops.node import Tensor
from keras_qat.ops.op import FixedRange, SharedRange

Use = Literal["classes", "decisions", "signals", "values", "embeddings", "classes or values"]

EXACT = 1e-3
"""Deviation from 1 of sums of probabilities, and of lengths of vectors, computed in float."""

MOST_NEIGHBOURS = 512
"""Examples of an output among which the nearest is searched."""

RARER_KEPT = 0.75
"""Share of the rarer decisions, all but the most frequent, that have to stay the same. If fewer do,
that share counts: where an event is rare, "never" is right for nearly all examples."""

FEW_RARER = 8
"""Rarer decisions that are too few to tell how many of them stay the same."""


def uses_of(
    graph: ResolvedGraph,
    inputs: Sequence[np.ndarray],
    exact: Sequence[np.ndarray],
    losses: Sequence[CompiledLoss | None],
) -> list[Use]:
    """Returns what each output is used for, by its last operator, its values and its loss.

    Args:
        graph: the model's resolved graph.
        inputs: examples.
        exact: the outputs that the model computes of them in float.
        losses: what each output was compiled with.
    """
    of_images = {x.shape[1:] for x in inputs if x.ndim > 2}
    return [
        _use(y, loss, is_gate(graph, tensor), y.shape[1:] in of_images)
        for tensor, y, loss in zip(graph.outputs.values(), exact, losses, strict=True)
    ]


def _use(exact: np.ndarray, loss: CompiledLoss | None, gates: bool, is_like_input: bool) -> Use:
    if exact.dtype.kind in "iub" or _are_probabilities(exact):
        return "classes"
    kind = "custom" if loss is None else loss.kind
    if kind == "values" and is_like_input:
        return "signals"
    if kind in ("classes", "decisions", "values"):
        return kind
    if kind == "directions" or _are_unit_vectors(exact):
        return "embeddings"
    if gates:
        return "decisions"
    if is_like_input:
        return "signals"
    has_one_entry = exact.ndim < 2 or exact.shape[-1] == 1
    return "values" if has_one_entry else "classes or values"


def is_gate(graph: ResolvedGraph, tensor: Tensor) -> bool:
    """Returns whether a sigmoid or a similar function from 0 to 1 computes a tensor."""
    producers = {output: node for node in graph.nodes for output in node.outputs}
    while (node := producers.get(tensor)) is not None and node.op is not None:
        if isinstance(node.op.output, FixedRange):
            return node.op.output.minimum == 0
        if not isinstance(node.op.output, SharedRange) or not isinstance(node.inputs[0], Tensor):
            return False
        tensor = node.inputs[0]
    return False


def _are_probabilities(exact: np.ndarray) -> bool:
    """Returns whether the entries along the last axis are shares of one."""
    if exact.ndim < 2 or exact.shape[-1] < 2 or not np.isfinite(exact).all():
        return False
    return bool(exact.min() >= -EXACT and np.abs(exact.sum(-1) - 1).max() < EXACT)


def _are_unit_vectors(exact: np.ndarray) -> bool:
    if exact.ndim < 2 or exact.shape[-1] < 2 or not np.isfinite(exact).all():
        return False
    return bool(np.abs(np.linalg.norm(exact, axis=-1) - 1).max() < EXACT)


def same_decisions(use: Use, exact: np.ndarray, values: np.ndarray, gates: bool) -> float | None:
    """Returns the share of decisions that stay the same, 0 to 1; None if there are none.

    A class is the largest entry along the last axis, a decision a value above the middle, and an
    embedding decides which example is the nearest. Where decisions are rare, see `RARER_KEPT`.

    Args:
        use: what the output is used for.
        exact: the output that the model computes in float.
        values: the output of the file.
        gates: whether a sigmoid computes it.
    """
    if use in ("signals", "values") or not exact.size:
        return None
    if use == "embeddings":
        return _found_again(exact, values)
    if use == "decisions":
        middle = 0.5 if gates else 0.0
        before, after = exact > middle, values > middle
    elif exact.dtype.kind in "iub":
        before, after = exact, values.astype(exact.dtype)
    elif exact.ndim > 1 and exact.shape[-1] > 1:
        before, after = exact.argmax(-1), values.argmax(-1)
    else:
        return None
    same = float(np.mean(before == after))
    rarer = before.size - most_frequent(before)
    kept = max(1 - (1 - same) * before.size / rarer, 0.0) if rarer else same
    if rarer and kept >= RARER_KEPT:
        return same
    return kept if rarer >= FEW_RARER or (not rarer and same < 1) else None


def most_frequent(answers: np.ndarray) -> int:
    """Returns how many answers are right if each position gets its most frequent answer.

    Args:
        answers: integers or truth values, one row for each example.
    """
    positions = answers[0].size if len(answers) > 1 else 1
    _, kinds = np.unique(answers, return_inverse=True)
    kinds = kinds.reshape(-1, positions)
    count = int(kinds.max(initial=0)) + 1
    places = np.arange(positions) * count + kinds
    counts = np.bincount(places.ravel(), minlength=positions * count)
    return int(counts.reshape(positions, count).max(-1).sum())


def _found_again(exact: np.ndarray, values: np.ndarray) -> float | None:
    """Returns the share of vectors whose nearest vector in float is that of the same example."""
    there, here = (y.reshape(-1, y.shape[-1])[:MOST_NEIGHBOURS] for y in (exact, values))
    if len(there) < 2:
        return None
    return float(np.mean(_distances(here, there).argmin(-1) == np.arange(len(there))))


def _distances(vectors: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Returns the squared distances of each vector to each other one, less what is constant."""
    return np.square(others).sum(-1) - 2 * vectors @ others.T


def nearest_labels(vectors: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Returns the label of each example's nearest other example."""
    distances = _distances(vectors, vectors)
    np.fill_diagonal(distances, np.inf)
    return labels[distances.argmin(-1)]
