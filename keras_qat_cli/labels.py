"""Reads labels and measures the accuracy of predictions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_qat_cli.data import Source, open_array

__all__ = ["Labels", "find_classes", "match_outputs", "measure_accuracy", "read_labels"]


class Labels(NamedTuple):
    """Labels of one output.

    Args:
        output: the output's name, or "" for the only output of a model.
        values: a label for each example.
        source: location of the labels, for messages.
    """

    output: str
    values: np.ndarray
    source: str


def read_labels(data: Source, labels: Sequence[str]) -> tuple[list[Labels], Source]:
    """Splits data into labels and inputs. Does not import TensorFlow.

    Args:
        data: the data.
        labels: locations of labels, as for `_read`, or `OUTPUT=SOURCE` for several outputs. It is
            empty for images. Their subfolders are the classes.

    Raises:
        ValueError: if labels are missing, or if an output has two sources.
    """
    sources = []
    for text in labels or ("",):
        output, is_named, source = text.partition("=")
        sources.append((output, source) if is_named and not Path(text).exists() else ("", text))
    if len(dict(sources)) < len(sources):
        raise ValueError(
            f"--labels was passed {len(sources)} times. Name a different output each time, as in "
            f"--labels OUTPUT={sources[-1][1]}."
        )
    found = []
    for output, source in sources:
        values, data = _read(data, source or None)
        found.append(Labels(output, values, source or data.path))
    return found, data


def match_outputs(model: Any, labels: Sequence[Labels]) -> dict[str, Labels]:
    """Returns labels by the name of their output.

    Raises:
        ValueError: if labels name an unknown output, or no output of a model with several outputs.
    """
    names = list(model.output_names)
    listed = ", ".join(names)
    if len(names) == 1:
        labels = [one._replace(output=one.output or names[0]) for one in labels]
    for one in labels:
        if not one.output:
            raise ValueError(
                f"'{model.name}' has the outputs {listed}. Name the output that the labels belong "
                f"to, as in --labels {names[0]}={one.source}."
            )
        if one.output not in names:
            raise ValueError(
                f"There are labels for '{one.output}', but '{model.name}' has the outputs {listed}."
            )
    return {one.output: one for one in labels}


def _read(data: Source, labels: str | None) -> tuple[np.ndarray, Source]:
    """Return the labels of one output, and the data without the labels.

    Args:
        data: the data.
        labels: an `.npy` file, the name of an array beside the data in an `.npz` file, or a column
            of a table. None for images: their subfolders are the classes. Names that are numbers
            are class indices. Other names are sorted and counted from 0.

    Raises:
        ValueError: if labels are missing.
    """
    path = Path(data.path)
    if labels is not None and Path(labels).suffix == ".npy":
        if not Path(labels).exists():
            raise ValueError(f"There is no file {labels}.")
        values = open_array(labels)
    elif labels is not None and path.suffix == ".npz":
        values = data.arrays_named([labels])[labels]
    elif labels is not None and path.suffix in (".csv", ".tsv"):
        data = data._replace(drop=(*data.drop, labels))
        names, has_names = data.columns()
        column = names.index(labels)
        values = np.loadtxt(
            path, str, delimiter=data.separator, skiprows=int(has_names), usecols=column, ndmin=1
        )
    elif labels is None and path.is_dir():
        values = np.array([file.relative_to(path).parts[0] for file in _find_labelled(data)])
    else:
        raise ValueError(
            f"{labels or path} contains no labels. Pass --labels with an .npy file, an array of "
            f"the .npz file or a column of the table. Images are labelled by their subfolders."
        )
    return _convert_to_numbers(values)[: data.limit], data


def _find_labelled(data: Source) -> list[Path]:
    """Return the images of a directory. Raise a `ValueError` if one is in no subfolder."""
    files = data.images()
    loose = [file for file in files if file.parent == Path(data.path)]
    if loose:
        reason = (
            f"{loose[0]} is in no subfolder, so it has no label"
            if data.list_subfolders()
            else f"{data.path} has no subfolders, so its images have no labels"
        )
        raise ValueError(
            f"{reason}. Move the images of each class to a subfolder, whose name is the class."
        )
    return files


def _convert_to_numbers(values: np.ndarray) -> np.ndarray:
    """Convert text to numbers. Names of classes become indices in the sorted list of names."""
    if values.dtype.kind != "U":
        return values
    try:
        return values.astype(np.float64)
    except ValueError:
        return np.unique(values, return_inverse=True)[1]


def find_classes(shape: tuple[int, ...], labels: np.ndarray) -> np.ndarray | None:
    """Returns the class indices of integers or one-hot vectors. Returns None for other labels.

    `shape` is the shape of the predictions.
    """
    classes = shape[-1]
    if labels.ndim == len(shape) and labels.shape[-1] == 1:
        labels = labels[..., 0]
    if not np.all(labels == np.rint(labels)):
        return None
    if classes > 1 and labels.shape == shape and np.all(labels.sum(-1) == 1):
        labels = labels.argmax(-1)
    is_class = classes > 1 or (labels.min() >= 0 and labels.max() <= 1)
    return labels if is_class and labels.shape == shape[:-1] else None


def measure_accuracy(predictions: np.ndarray, labels: np.ndarray, source: str) -> tuple[str, float]:
    """Returns the name of a metric and its value.

    Classes are integers or one-hot vectors. Their metric is accuracy. For outputs with a single
    entry, the threshold is 0.5 if all entries are between 0 and 1, otherwise 0. For other labels,
    the metric is the mean absolute error.

    Raises:
        ValueError: if the number or the shape of the labels does not match the predictions, or if
            the output has no such class.
    """
    if len(labels) != len(predictions):
        raise ValueError(
            f"{source} has {len(labels)} labels for {len(predictions)} examples. One label per "
            f"example is needed."
        )
    classes = find_classes(predictions.shape, labels)
    if classes is not None and predictions.shape[-1] > 1:
        last = predictions.shape[-1] - 1
        unknown = classes[(classes < 0) | (classes > last)]
        if len(unknown) and classes.ndim == 1:  # Masked pixels may have the label 255.
            raise ValueError(
                f"{source} has the class {unknown[0]:g}, but the output has only the classes 0 to "
                f"{last}."
            )
        return "accuracy", float(np.mean(predictions.argmax(-1) == classes))
    if classes is not None:
        is_probability = predictions.min() >= 0 and predictions.max() <= 1
        answers = predictions[..., 0] > (0.5 if is_probability else 0)
        return "accuracy", float(np.mean(answers == classes))
    if labels.size != predictions.size:
        raise ValueError(
            f"{source}: labels of shape {labels.shape} do not match outputs of shape "
            f"{predictions.shape}."
        )
    return "mean absolute error", float(np.mean(np.abs(predictions.reshape(labels.shape) - labels)))
