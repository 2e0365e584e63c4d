"""Checks whether data seem to be preprocessed as in training, and whether 8 bits represent them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Graph, flatten_values
from keras_qat.graph.read_model import read_model
from keras_qat.io.data import read_arrays
from keras_qat.io.inputs import describe_excess
from keras_qat.keras2.backend import keras
from keras_qat.messages import pluralize
from keras_qat.placement.lost_features import describe_lost_features
from keras_qat.training.calibration.lost_values import (
    explain_lost_features,
    find_input_quantizers,
    find_lost_features,
    find_norm,
    has_features,
    replace_nonfinite,
)
from keras_qat.training.calibration.preparation import Sample, draw_rows, find_wrong_preparation

_FIRST = 64
"""Number of calibration examples for the check of the preprocessing."""
FEW = 4
"""Fewer calibration examples than this cause a warning."""
_CHECKED = 32
"""Number of examples that are checked before and after `fit`, evenly spread over the data."""
_SAMPLE = 4096
"""Standard deviations of examples are estimated from at most this many values."""
_VALUES, _PER_BATCH = 2**17, 2**14
"""About `_VALUES` values of an input are stored at most, and at most `_PER_BATCH` of a batch."""


@dataclasses.dataclass
class InputData:
    """Statistics and samples of the calibration data for one input.

    Args:
        index: the position of the input in `model.inputs`.
        name: the input's name.
        bits: bits of the input's `Quantize` layer. None without such a layer.
        first: the first examples.
        low, high: extremes of each feature, or of all values of an image.
        deviations: for each batch, the standard deviation of each example.
        samples: some values of each batch.
    """

    index: int
    name: str
    bits: int | None
    first: np.ndarray
    low: np.ndarray | float = np.inf
    high: np.ndarray | float = -np.inf
    deviations: list[np.ndarray] = dataclasses.field(default_factory=list)
    samples: list[np.ndarray] = dataclasses.field(default_factory=list)

    def add(self, x: np.ndarray) -> None:
        axes = tuple(range(x.ndim - has_features(x)))
        self.low, self.high = np.minimum(self.low, x.min(axes)), np.maximum(self.high, x.max(axes))
        if x.ndim > 2 and x[0].size > 1:
            flat = x.reshape(len(x), -1)
            self.deviations.append(flat[:, :: -(-flat.shape[1] // _SAMPLE)].std(1, dtype=float))
        if sum(map(len, self.samples)) < _VALUES:
            self.samples.append(draw_rows(x.reshape(-1), _PER_BATCH))

    @property
    def values(self) -> np.ndarray:
        """A sample of all values, in float32."""
        return np.concatenate(self.samples).astype(np.float32)

    @property
    def has_outliers(self) -> bool:
        """True if 99 % of the magnitudes are below half of the largest magnitude."""
        return bool(np.quantile(np.abs(self.values), 0.99) < max(map(abs, self.ends)) / 2)

    @property
    def ends(self) -> tuple[float, float]:
        return float(np.min(self.low)), float(np.max(self.high))


def list_float_inputs(graph: Graph, batch: list[np.ndarray]) -> list[InputData]:
    """Returns an `InputData` without statistics for each float input."""
    bits = {index: quantizer.spec.bits for index, quantizer in find_input_quantizers(graph).items()}
    return [
        InputData(index, value.name, bits.get(index), replace_nonfinite(x[:_FIRST]))
        for index, (value, x) in enumerate(zip(flatten_values(graph.inputs), batch, strict=True))
        if value.is_float and x.size
    ]


def explain_doubt(graph: Graph, inputs: list[InputData], examples: int | None, clips: bool) -> str:
    """Returns a warning about the calibration data with a remedy, or "" if the data seem good.

    Args:
        graph: the quantization-aware model.
        inputs: the data for the float inputs.
        examples: number of calibration examples. None if earlier calls of `calibrate` count too.
        clips: True if the calibration method may clip values.
    """
    ends = {end for data in inputs for end in data.ends}
    if len(ends) == 1:
        return (
            f"All values of the calibration data are {ends.pop():g}, so the ranges fit no other "
            f"data. Call calibrate again, with examples like the training data."
        )
    samples = {data.name: Sample(data.first, *data.ends) for data in inputs}
    wrong = find_wrong_preparation(graph, samples)
    reasons = [_explain_unresolved(graph, data) for data in inputs if not clips]
    # Outliers are reported first, because they distort the check of the preprocessing.
    at = len(reasons) if any(data.has_outliers for data in inputs) else 0
    reasons.insert(at, wrong and f"{wrong} Then call calibrate again.")
    if examples is not None and examples < FEW:
        reasons.append(
            f"The ranges come from {pluralize(examples, 'example')}: values beyond them are "
            f"clipped. Calibrate with a few hundred examples."
        )
    return next(filter(None, reasons), "")


def explain_array_doubt(model: keras.Model, data: object) -> str:
    """Returns a warning if arrays for `fit` seem wrongly scaled, or too similar for 8 bits.

    Returns "" if no array seems wrong.
    """
    some = _select_examples(model, data)
    if not some:
        return ""
    graph = read_model(model)
    samples = {
        value.name: Sample(x, float(x.min()), float(x.max()))
        for value, x in zip(flatten_values(graph.inputs), some, strict=True)
        if value.is_float and x.size
    }
    return find_wrong_preparation(graph, samples) or next(explain_lost_features(graph, some), "")


def explain_range_doubt(model: keras.Model, data: object) -> str:
    """Returns a warning if arrays for `fit` exceed the ranges that `fit` observed, or ""."""
    some = _select_examples(model, data)
    if not some:
        return ""
    graph = read_model(model)
    for index, quantizer in find_input_quantizers(graph).items():
        name = flatten_values(graph.inputs)[index].name
        if excess := describe_excess(name, some[index], *quantizer.current_range()):
            sentence, _, _ = excess.partition(" Scale it")
            return (
                f"{sentence} Ranges are averages over batches, so shuffle the data, or call "
                f"keras_qat.calibrate before fit and freeze the ranges."
            )
    return ""


def _select_examples(model: keras.Model, data: Any) -> list[np.ndarray]:
    """Return some examples of each input. Return [] unless `data` are arrays that fit the model."""
    arrays = tf.nest.flatten(data)
    if not all(isinstance(x, np.ndarray) and x.ndim and len(x) for x in arrays):
        return []
    if not arrays or model.distribute_strategy.num_replicas_in_sync > 1:
        return []
    rows = np.unique(np.linspace(0, len(arrays[0]) - 1, _CHECKED).astype(int))
    try:
        some = read_arrays(model, tf.nest.map_structure(lambda x: x[rows], data))
        return [replace_nonfinite(x) if x.dtype.kind == "f" else x for x in some]
    except (ValueError, IndexError):  # Keras raises the error.
        return []


def _explain_unresolved(graph: Graph, data: InputData) -> str:
    """Return a warning if features or examples differ by less than a quantization step, or ""."""
    if data.bits is None:
        return ""
    ends = low, high = min(0.0, data.ends[0]), max(0.0, data.ends[1])
    extremes = np.asarray(data.low), np.asarray(data.high)
    if extremes[0].ndim and (lost := find_lost_features(*extremes, data.first, ends, data.bits)):
        norm = find_norm(graph, data.name)
        return describe_lost_features(data.name, lost, extremes[0].size, ends, norm)
    step = (high - low) / (2**data.bits - 1)
    if not data.deviations or np.median(np.concatenate(data.deviations)) >= step:
        return ""
    vary = f"Input '{data.name}': half of the examples vary by less than one quantized value, "
    vary += f"{step:.3g}"
    if high - low > 2 * (data.ends[1] - data.ends[0]):
        return (
            f"{vary}, because the range includes 0: it is {low:.4g} to {high:.4g}. Subtract the "
            f"mean of the data."
        )
    if data.bits < 8 and not data.has_outliers:
        return ""  # The recipe asks for large steps.
    return (
        f"{vary}, because a few values widen the range to {low:.4g} to {high:.4g}. Remove these "
        f"values, or call calibrate with method='percentile'."
    )
