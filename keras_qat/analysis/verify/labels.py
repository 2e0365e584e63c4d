"""The labels of an output: classes, decisions of yes and no, or targets."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from keras_qat.analysis.verify.uses import MOST_NEIGHBOURS, Use, nearest_labels
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.keras2.losses import CompiledLoss

NEARER = 0.2
"""How much more often the nearest neighbour than the argmax has an example's class, of vectors
that are no scores."""


@dataclasses.dataclass(frozen=True)
class Labels:
    """The labels of one output.

    Args:
        kind: "classes" (one number for each row), "decisions" (0 or 1 for each entry),
            "neighbours" (a class for each vector), "values" (targets for each entry), or "custom"
            (what the user's own loss takes).
        values: the labels; of `classes` without the last axis of the output, else of its shape.
        loss: what the output was compiled with.
        is_counted: of classes, which rows have a label; None for all.
    """

    kind: str
    values: np.ndarray
    loss: CompiledLoss | None = None
    is_counted: np.ndarray | None = None


def labels_of(
    graph: ResolvedGraph, y: Any, examples: int, losses: list[CompiledLoss | None]
) -> list[np.ndarray | None]:
    """Returns the labels for each output of the graph as an array; None without labels.

    Args:
        graph: the model's resolved graph.
        y: labels of one output, or a dict or a list of the labels of each; None for no labels.
        examples: how many examples there are.
        losses: what each output was compiled with.

    Raises:
        ValueError: if labels do not fit the outputs, or are not as many as there are examples.
    """
    names = list(graph.outputs)
    if isinstance(y, dict):
        by_name = dict(y)
    elif isinstance(y, (list, tuple)) and len(names) > 1:
        by_name = dict(zip(names, y, strict=True))
    else:
        by_name = {} if y is None else {names[0]: y}
    if unknown := [name for name in by_name if name not in names]:
        raise ValueError(
            f"There are labels for '{unknown[0]}', which is not an output. The outputs are {names}."
        )
    result: list[np.ndarray | None] = []
    for (name, tensor), loss in zip(graph.outputs.items(), losses, strict=True):
        labels = by_name.get(name)
        if labels is not None:
            labels = np.asarray(labels)
            if labels.ndim and len(labels) != examples:
                raise ValueError(
                    f"There are {len(labels)} labels of '{name}' for {examples} examples. Pass one "
                    f"label per example."
                )
            check_labels(name, labels, tensor.shape, loss)
        result.append(labels)
    return result


def check_labels(
    name: str, labels: np.ndarray, shape: tuple[Any, ...], loss: CompiledLoss | None
) -> None:
    """Raises a `ValueError` if labels are neither classes nor targets of an output."""
    if loss is not None and loss.kind == "custom":
        return  # What a user's loss takes is known to the user alone.
    sizes = tuple(size or 0 for size in shape)
    is_target = len(labels.shape) == len(sizes) and all(
        a == b or not b for a, b in zip(labels.shape[1:], sizes[1:], strict=True)
    )
    is_one_entry = sizes[-1] == 1 and labels.ndim == len(sizes) - 1
    is_whole = labels.dtype.kind in "biuf" and bool(np.all(labels == np.rint(labels)))
    without_last = labels.ndim == len(sizes) and labels.shape[-1] == 1
    is_class = is_whole and (labels.ndim == len(sizes) - 1 or without_last)
    if labels.dtype.kind not in "biuf" or not (is_target or is_one_entry or is_class):
        raise ValueError(
            f"The labels of '{name}' are neither classes of the output nor targets of its shape "
            f"{shape}. Pass class indices, one-hot vectors or targets of that shape. Without "
            f"labels, verify compares with the float model."
        )


def read_labels(
    labels: np.ndarray, exact: np.ndarray, use: Use, loss: CompiledLoss | None
) -> Labels:
    """Returns labels with what they are: classes, decisions or targets.

    Args:
        labels: an array that `check_labels` lets pass.
        exact: the output that the model computes in float.
        use: what the output is used for.
        loss: what it was compiled with.
    """
    entries = exact.shape[-1] if exact.ndim > 1 else 1
    is_whole = labels.dtype.kind in "biuf" and bool(np.all(labels == np.rint(labels)))
    if labels.shape != exact.shape and entries == 1 and labels.size == exact.size:
        labels = labels.reshape(exact.shape)
    if labels.shape == exact.shape:
        return _of_same_shape(labels, entries, is_whole, exact, use, loss)
    if labels.ndim == exact.ndim and labels.shape[-1] == 1:
        labels = labels[..., 0]
    if not is_whole or labels.shape != exact.shape[:-1]:
        return Labels("custom", labels, loss)
    # Pixels and steps may have no label, for which there are numbers such as -1 and 255.
    is_class = (labels >= 0) & ((labels < entries) | (labels.ndim < 2))
    may_be_vectors = exact.ndim == 2 and use in ("embeddings", "classes or values")
    if may_be_vectors and (
        use == "embeddings" or labels.max() > entries or _are_no_scores(exact, labels)
    ):
        return Labels("neighbours", labels)
    return Labels("classes", labels, loss, None if is_class.all() else is_class)


def _are_no_scores(exact: np.ndarray, labels: np.ndarray) -> bool:
    """Whether vectors with more entries than classes lie by class, but their argmax is none."""
    if labels.max(initial=0) + 1 >= exact.shape[-1] or len(labels) < 2:
        return False
    vectors, classes = exact[:MOST_NEIGHBOURS].astype(np.float64), labels[:MOST_NEIGHBOURS]
    by_neighbour = np.mean(nearest_labels(vectors, classes) == classes)
    return bool(by_neighbour > np.mean(vectors.argmax(-1) == classes) + NEARER)


def _of_same_shape(
    labels: np.ndarray,
    entries: int,
    is_whole: bool,
    exact: np.ndarray,
    use: Use,
    loss: CompiledLoss | None,
) -> Labels:
    is_binary = is_whole and bool(np.isin(labels, (0, 1)).all())
    if exact.dtype.kind in "iub":
        return Labels("classes", labels)
    if entries > 1 and is_binary and bool((labels.sum(-1) == 1).all()) and use != "decisions":
        return Labels("classes", labels.argmax(-1), loss)
    is_signed = is_whole and bool(np.isin(labels, (-1, 1)).all()) and use == "decisions"
    undetermined = loss is None or loss.kind == "custom"
    if is_signed or (is_binary and (use == "decisions" or undetermined)):
        return Labels("decisions", (labels > 0).astype(np.int64), loss)
    return Labels("values", labels.astype(np.float64), loss)
