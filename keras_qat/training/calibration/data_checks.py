"""Checks of calibration data: are they prepared as in training, and do 8 bits resolve them?"""

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
from keras_qat.training.calibration.preparation import Sample, draw_rows, wrong_preparation

_FIRST = 64
"""Examples that show how the data are prepared."""
FEW = 4
"""Calibration with fewer examples is warned about."""
_LOOKED_AT = 32
"""Examples of those for training that are looked at, evenly spread."""
_SAMPLE = 4096
"""Most numbers of an example whose deviation is computed."""
_VALUES, _PER_BATCH = 2**17, 2**14
"""Most numbers of an input that are kept, in all and of a batch."""


@dataclasses.dataclass
class InputData:
    """What calibration has seen of one input.

    Args:
        index: its place among the model's inputs.
        name: the input's name.
        bits: bits of the input's own quantizer; None without one.
        first: the first examples.
        low, high: extremes of each feature, or of all numbers of an image.
        deviations: standard deviation within each example.
        samples: some numbers of each batch.
    """

    index: int
    name: str
    bits: int | None
    first: np.ndarray
    low: Any = np.inf
    high: Any = -np.inf
    deviations: list[np.ndarray] = dataclasses.field(default_factory=list)
    samples: list[np.ndarray] = dataclasses.field(default_factory=list)

    def add(self, x: np.ndarray) -> None:
        """Takes in a batch of numbers."""
        axes = tuple(range(x.ndim - has_features(x)))
        self.low, self.high = np.minimum(self.low, x.min(axes)), np.maximum(self.high, x.max(axes))
        if x.ndim > 2 and x[0].size > 1:
            flat = x.reshape(len(x), -1)
            self.deviations.append(flat[:, :: -(-flat.shape[1] // _SAMPLE)].std(1, dtype=float))
        if sum(map(len, self.samples)) < _VALUES:
            numbers = x.reshape(-1)
            self.samples.append(draw_rows(numbers, _PER_BATCH))

    @property
    def values(self) -> np.ndarray:
        """Some of the numbers, in float32."""
        return np.concatenate(self.samples).astype(np.float32)

    @property
    def has_far_numbers(self) -> bool:
        """Whether one number in a hundred at most is more than half as large as the largest."""
        return bool(np.quantile(np.abs(self.values), 0.99) < max(map(abs, self.ends)) / 2)

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and the largest number."""
        return float(np.min(self.low)), float(np.max(self.high))


def float_inputs(graph: Graph, batch: list[np.ndarray]) -> list[InputData]:
    """Returns what is to be watched of the inputs that hold floating-point numbers."""
    bits = {index: quantizer.spec.bits for index, quantizer in find_input_quantizers(graph).items()}
    return [
        InputData(index, value.name, bits.get(index), replace_nonfinite(x[:_FIRST]))
        for index, (value, x) in enumerate(zip(flatten_values(graph.inputs), batch, strict=True))
        if value.is_float and x.size
    ]


def explain_doubt(graph: Graph, inputs: list[InputData], examples: int | None, clips: bool) -> str:
    """Returns why calibration data may be the wrong ones, and what helps; "" if they seem right.

    Args:
        graph: the quantization-aware model.
        inputs: what was seen of its inputs that hold floating-point numbers.
        examples: how many examples the ranges come from; None if earlier calls count too.
        clips: whether ranges leave out some values.
    """
    ends = {end for data in inputs for end in data.ends}
    if len(ends) == 1:
        return (
            f"All values of the calibration data are {ends.pop():g}, so that the ranges fit no "
            f"other data. Call calibrate again, with examples as the model was trained on."
        )
    samples = {data.name: Sample(data.first, *data.ends) for data in inputs}
    wrong = wrong_preparation(graph, samples)
    reasons = [_unresolved(graph, data) for data in inputs if not clips]
    # A few far numbers make all data seem to be prepared otherwise.
    at = len(reasons) if any(data.has_far_numbers for data in inputs) else 0
    reasons.insert(at, wrong and f"{wrong} Then call calibrate again.")
    if examples is not None and examples < FEW:
        reasons.append(
            f"The ranges come from {pluralize(examples, 'example')}: values beyond them are "
            f"clipped. Calibrate on some hundred."
        )
    return next(filter(None, reasons), "")


def explain_array_doubt(model: keras.Model, data: Any) -> str:
    """Returns why data that `fit` gets seem not to fit the model; "" for other data than arrays."""
    some = _evenly_spread(model, data)
    if not some:
        return ""
    graph = read_model(model)
    samples = {
        value.name: Sample(x, float(x.min()), float(x.max()))
        for value, x in zip(flatten_values(graph.inputs), some, strict=True)
        if value.is_float and x.size
    }
    return wrong_preparation(graph, samples) or next(explain_lost_features(graph, some), "")


def explain_range_doubt(model: keras.Model, data: Any) -> str:
    """Returns why the ranges after `fit` do not hold the data; "" for other data than arrays."""
    some = _evenly_spread(model, data)
    if not some:
        return ""
    graph = read_model(model)
    for index, quantizer in find_input_quantizers(graph).items():
        name = flatten_values(graph.inputs)[index].name
        if excess := describe_excess(name, some[index], *quantizer.current_range()):
            sentence, _, _ = excess.partition(" Scale them")
            return (
                f"{sentence} Ranges are averages over batches, so shuffle the data, or call "
                f"keras_qat.calibrate before fit and freeze the ranges."
            )
    return ""


def _evenly_spread(model: keras.Model, data: Any) -> list[np.ndarray]:
    """Returns some examples for each input; none if the data are not arrays that fit the model."""
    arrays = tf.nest.flatten(data)
    if not all(isinstance(x, np.ndarray) and x.ndim and len(x) for x in arrays):
        return []
    if not arrays or model.distribute_strategy.num_replicas_in_sync > 1:
        return []
    rows = np.unique(np.linspace(0, len(arrays[0]) - 1, _LOOKED_AT).astype(int))
    try:
        some = read_arrays(model, tf.nest.map_structure(lambda x: x[rows], data))
        return [replace_nonfinite(x) if x.dtype.kind == "f" else x for x in some]
    except (ValueError, IndexError):  # Keras says what is wrong.
        return []


def _unresolved(graph: Graph, data: InputData) -> str:
    """Returns why the quantized values of an input show little of the data."""
    if data.bits is None:
        return ""
    low, high = min(0.0, data.ends[0]), max(0.0, data.ends[1])
    step = (high - low) / (2**data.bits - 1)
    if lost := _lost_features(graph, data):
        return lost
    if data.deviations and np.median(np.concatenate(data.deviations)) < step:
        return (
            f"Input '{data.name}': half of the examples vary by less than one quantized value, "
            f"{step:.3g}, as few numbers set the range, {low:.4g} to {high:.4g}. Leave these out, "
            f"or call calibrate with method='percentile'."
        )
    return ""


def _lost_features(graph: Graph, data: InputData) -> str:
    """Says which features of an input span too little of its range."""
    if data.bits is None or not np.ndim(data.low):
        return ""
    ends = min(0.0, data.ends[0]), max(0.0, data.ends[1])
    lost = find_lost_features(data.low, data.high, data.first, ends, data.bits)
    norm = find_norm(graph, data.name)
    return describe_lost_features(data.name, lost, data.low.size, ends, norm) if lost else ""
