"""Determines the meaning of outputs and labels, for example classes or regression values.

An application turns an output into a decision, such as the argmax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.keras2.losses import CompiledLoss
from keras_qat.ops.node import Tensor
from keras_qat.ops.op import FixedRange, SharedRange

Use = Literal["classes", "decisions", "signals", "values", "embeddings", "classes or values"]

EXACT = 1e-3
"""Tolerance when checking whether probabilities sum to 1, and whether vectors have length 1."""

MOST_NEIGHBOURS = 512
"""Nearest neighbours are searched among at most this many examples."""

NEARER = 0.2
"""Vectors are embeddings, not class scores, if the label of the nearest vector is usually right.
Its accuracy must exceed the accuracy of the argmax by more than this."""

RARER_KEPT = 0.75
"""Most pixels may have the class "background". `compare_decisions` leaves these pixels out if less
than this share of the other pixels keeps its class after quantization."""

FEW_RARER = 8
"""Minimum number of pixels that are not background, to compare only these (see `RARER_KEPT`)."""


def find_use(
    exact: NDArray, loss: CompiledLoss | None, has_sigmoid: bool, inputs: Sequence[NDArray]
) -> Use:
    """Guesses the meaning of an output, such as "classes", from its loss, values and shape."""
    is_like_input = exact.shape[1:] in {x.shape[1:] for x in inputs if x.ndim > 2}
    has_entries = exact.ndim > 1 and exact.shape[-1] > 1
    is_finite = has_entries and bool(np.isfinite(exact).all())
    if exact.dtype.kind in "iub" or are_probabilities(exact):
        return "classes"
    kind = "custom" if loss is None else loss.kind
    if kind == "values" and is_like_input:
        return "signals"
    if kind in ("classes", "decisions", "values"):
        return kind
    if kind == "directions" or (is_finite and _are_ones(np.linalg.norm(exact, axis=-1))):
        return "embeddings"
    if has_sigmoid:
        return "decisions"
    if is_like_input:
        return "signals"
    return "classes or values" if has_entries else "values"


def are_probabilities(exact: NDArray) -> bool:
    """Returns True if the last axis holds probabilities with a sum of 1, as after a softmax."""
    has_entries = exact.ndim > 1 and exact.shape[-1] > 1
    is_valid = has_entries and bool(np.isfinite(exact).all()) and exact.min() >= -EXACT
    return is_valid and _are_ones(exact.sum(-1))


def _are_ones(values: NDArray) -> bool:
    return bool(np.abs(values - 1).max() < EXACT)


def is_sigmoid(graph: ResolvedGraph, tensor: Tensor) -> bool:
    """Returns True if a tensor comes from a sigmoid or another function with values from 0 to 1."""
    producers = {output: node for node in graph.nodes for output in node.outputs}
    while (node := producers.get(tensor)) is not None and node.op is not None:
        if isinstance(node.op.output, FixedRange):
            return node.op.output.minimum == 0
        if not isinstance(node.op.output, SharedRange) or not isinstance(node.inputs[0], Tensor):
            return False
        tensor = node.inputs[0]
    return False


def compare_decisions(use: Use, exact: NDArray, values: NDArray, has_sigmoid: bool) -> float | None:
    """Returns the share of decisions, 0 to 1, that float model and quantized model have in common.

    For classes, the decision is the argmax. For embeddings, it is the nearest example. For
    yes-or-no outputs, it is whether a probability exceeds 0.5, or a logit exceeds 0. Returns None
    for regression values, or if there are too few different decisions.
    """
    if use in ("signals", "values") or not exact.size:
        return None
    if use == "embeddings":
        in_float, in_file = (y.reshape(-1, y.shape[-1])[:MOST_NEIGHBOURS] for y in (exact, values))
        if len(in_float) < 2:
            return None
        nearest = _compute_distances(in_file, in_float).argmin(-1)
        return float(np.mean(nearest == np.arange(len(in_float))))
    if use == "decisions":
        middle = 0.5 if has_sigmoid else 0.0
        before, after = exact > middle, values > middle
    elif exact.dtype.kind in "iub":
        before, after = exact, values.astype(exact.dtype)
    elif exact.ndim > 1 and exact.shape[-1] > 1:
        before, after = exact.argmax(-1), values.argmax(-1)
    else:
        return None
    same = float(np.mean(before == after))
    rarer = before.size - count_most_frequent(before)
    kept = max(1 - (1 - same) * before.size / rarer, 0.0) if rarer else same
    if rarer and kept >= RARER_KEPT:
        return same
    return kept if rarer >= FEW_RARER or (not rarer and same < 1) else None


def count_most_frequent(answers: NDArray) -> int:
    """Counts the answers that are equal to the most frequent answer in their column."""
    positions = answers[0].size if len(answers) > 1 else 1
    _, kinds = np.unique(answers, return_inverse=True)
    kinds = kinds.reshape(-1, positions)
    count = int(kinds.max(initial=0)) + 1
    places = np.arange(positions) * count + kinds
    counts = np.bincount(places.ravel(), minlength=positions * count)
    return int(counts.reshape(positions, count).max(-1).sum())


def _compute_distances(vectors: NDArray, others: NDArray) -> NDArray:
    """Return `|vector - other|^2 - |vector|^2`, to find the nearest of `others` with argmin.

    The subtracted term is the same for all `others`.
    """
    return np.square(others).sum(-1) - 2 * vectors @ others.T


def find_nearest_labels(vectors: NDArray, labels: NDArray) -> NDArray:
    """Returns, for each example, the label of the other example with the nearest vector."""
    distances = _compute_distances(vectors, vectors)
    np.fill_diagonal(distances, np.inf)
    return labels[distances.argmin(-1)]


@dataclasses.dataclass(frozen=True)
class Labels:
    """The labels of one output.

    Args:
        kind: the meaning of the labels. "classes": a class index for each row. "decisions": 0 or 1
            for each entry. "neighbours": a class index for each embedding. "values": a regression
            target for each entry. "custom": anything that a custom loss accepts.
        values: the labels. Class indices have the output's shape without the last axis.
        loss: the loss of the output.
        is_counted: mask of the rows with a valid class index. None if all rows have one.
    """

    kind: str
    values: NDArray
    loss: CompiledLoss | None = None
    is_counted: NDArray | None = None


def match_labels(
    graph: ResolvedGraph,
    y: ArrayLike | Mapping[str, ArrayLike] | None,
    examples: int,
    losses: list[CompiledLoss | None],
) -> list[NDArray | None]:
    """Checks the labels that a user passed to `verify`. Returns them in the order of outputs."""
    names = list(graph.outputs)
    if isinstance(y, Mapping):
        by_name = dict(y)
    elif isinstance(y, (list, tuple)) and len(names) > 1:
        by_name = dict(zip(names, y, strict=True))
    else:
        by_name = {} if y is None else {names[0]: y}
    if unknown := [name for name in by_name if name not in names]:
        raise ValueError(
            f"There are labels for '{unknown[0]}', which is not an output. The outputs are {names}."
        )
    result: list[NDArray | None] = []
    for (name, tensor), loss in zip(graph.outputs.items(), losses, strict=True):
        labels = by_name.get(name)
        if labels is not None:
            labels = np.asarray(labels)
            if labels.ndim and len(labels) != examples:
                raise ValueError(
                    f"There are {len(labels)} labels of '{name}' for {examples} examples. Pass one "
                    f"label per example."
                )
            _check_labels(name, labels, tensor.shape, loss)
        result.append(labels)
    return result


def _check_labels(
    name: str, labels: NDArray, shape: tuple[int | None, ...], loss: CompiledLoss | None
) -> None:
    if loss is not None and loss.kind == "custom":
        return
    sizes = tuple(size or 0 for size in shape)
    is_target = len(labels.shape) == len(sizes) and all(
        a == b or not b for a, b in zip(labels.shape[1:], sizes[1:], strict=True)
    )
    is_one_entry = sizes[-1] == 1 and labels.ndim == len(sizes) - 1
    without_last = labels.ndim == len(sizes) and labels.shape[-1] == 1
    is_class = _has_integers(labels) and (labels.ndim == len(sizes) - 1 or without_last)
    if labels.dtype.kind not in "biuf" or not (is_target or is_one_entry or is_class):
        raise ValueError(
            f"The labels of '{name}' are neither classes of the output nor targets of its shape "
            f"{shape}. Pass class indices, one-hot vectors or targets of that shape. Without "
            f"labels, verify compares with the float model."
        )


def _has_integers(labels: NDArray) -> bool:
    return labels.dtype.kind in "biuf" and bool(np.all(labels == np.rint(labels)))


def interpret_labels(
    labels: NDArray, exact: NDArray, use: Use, loss: CompiledLoss | None
) -> Labels:
    """Decides whether labels from `match_labels` are class indices, yes-or-no labels or targets."""
    entries = exact.shape[-1] if exact.ndim > 1 else 1
    if labels.shape != exact.shape and entries == 1 and labels.size == exact.size:
        labels = labels.reshape(exact.shape)
    if labels.shape == exact.shape:
        return _interpret_same_shape(labels, exact, use, loss)
    if labels.ndim == exact.ndim and labels.shape[-1] == 1:
        labels = labels[..., 0]
    if not _has_integers(labels) or labels.shape != exact.shape[:-1]:
        return Labels("custom", labels, loss)
    # Values such as -1 and 255 mark pixels and time steps without a label.
    is_class = (labels >= 0) & ((labels < entries) | (labels.ndim < 2))
    may_be_vectors = exact.ndim == 2 and use in ("embeddings", "classes or values")
    if may_be_vectors and (
        use == "embeddings" or labels.max() > entries or _are_vectors(exact, labels)
    ):
        return Labels("neighbours", labels)
    return Labels("classes", labels, loss, None if is_class.all() else is_class)


def _are_vectors(exact: NDArray, labels: NDArray) -> bool:
    """Return True if an output holds embeddings instead of one score per class. See `NEARER`."""
    if labels.max(initial=0) + 1 >= exact.shape[-1] or len(labels) < 2:
        return False
    vectors, classes = exact[:MOST_NEIGHBOURS].astype(np.float64), labels[:MOST_NEIGHBOURS]
    by_neighbour = np.mean(find_nearest_labels(vectors, classes) == classes)
    return bool(by_neighbour > np.mean(vectors.argmax(-1) == classes) + NEARER)


def _interpret_same_shape(
    labels: NDArray, exact: NDArray, use: Use, loss: CompiledLoss | None
) -> Labels:
    is_integer = _has_integers(labels)
    is_binary = is_integer and bool(np.isin(labels, (0, 1)).all())
    if exact.dtype.kind in "iub":
        return Labels("classes", labels)
    has_entries = exact.ndim > 1 and exact.shape[-1] > 1
    if has_entries and is_binary and bool((labels.sum(-1) == 1).all()) and use != "decisions":
        return Labels("classes", labels.argmax(-1), loss)
    is_signed = is_integer and bool(np.isin(labels, (-1, 1)).all()) and use == "decisions"
    is_undetermined = loss is None or loss.kind == "custom"
    if is_signed or (is_binary and (use == "decisions" or is_undetermined)):
        return Labels("decisions", (labels > 0).astype(np.int64), loss)
    return Labels("values", labels.astype(np.float64), loss)
