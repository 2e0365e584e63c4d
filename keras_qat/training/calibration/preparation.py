"""Checks whether data are preprocessed in the same way as the training data of a model.

The first BatchNormalization or Normalization after an input stores the mean and the standard
deviation of the training data. The check computes both for the given data. For each channel, it
compares the means (their difference, in standard deviations) and the standard deviations (log2 of
their ratio). The larger absolute value is the distance of the channel. The distance of the data is
the average over all channels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, flatten_values, split_loss_only
from keras_qat.graph.rebuild_model import evaluate_graph
from keras_qat.helper_layers.keras_variants import find_statistics
from keras_qat.keras2.backend import keras
from keras_qat.ops.op import SharedRange
from keras_qat.ops.registry import find_op
from keras_qat.training.calibration.lost_values import get_first_layer
from keras_qat.training.calibration.watch import infer
from keras_qat.training.fake_quantization.phase import Phase
from keras_qat.training.layers import Quantize, QuantizeWrapper
from keras_qat.training.quantizers import PREFIX
from keras_qat.training.scheduled_layer import ScheduledLayer, assuming

FAR = 3.0
"""From this distance on, a warning is shown. Correct data, if sorted by class, can reach 1."""
FAR_IF_OTHER = 0.5
"""From this distance on, a warning is shown if preprocessing such as `x / 255` fits much better."""
_MOST = 8.0
"""Upper limit for the distance of a channel. A channel of zeros would have an infinite distance."""
_ROWS = 4096
"""Maximum number of rows (such as pixels) for computing the statistics of the channels."""
_FEWEST = 4
"""Minimum number of examples for a check."""
_RESCALED_TWICE = 0.02
"""If the outputs of a Rescaling layer span less than this, its inputs were already rescaled."""

Prepare = Callable[[np.ndarray], Any]
_IMAGENET = "keras.applications.imagenet_utils.preprocess_input(x, mode="


def _imagenet(mode: str) -> Prepare:
    preprocess = keras.applications.imagenet_utils.preprocess_input
    return lambda x: preprocess(np.array(x, np.float32), "channels_last", mode)


_OF_PIXELS: dict[str, Prepare] = {
    "x / 255": lambda x: x / 255,
    "x / 127.5 - 1": lambda x: x / 127.5 - 1,
    f"{_IMAGENET}'caffe')": _imagenet("caffe"),
    f"{_IMAGENET}'torch')": _imagenet("torch"),
}
_OF_UNIT: dict[str, Prepare] = {"255 * x": lambda x: 255 * x, "2 * x - 1": lambda x: 2 * x - 1}
_OF_SYMMETRIC: dict[str, Prepare] = {
    "127.5 * (x + 1)": lambda x: 127.5 * (x + 1),
    "(x + 1) / 2": lambda x: (x + 1) / 2,
}


class Sample(NamedTuple):
    """Some of the data for an input, and the smallest and the largest value of all data."""

    x: np.ndarray
    low: float
    high: float

    @property
    def is_pixels(self) -> bool:
        """True if the data look like pixels from 0 to 255."""
        return self.low >= 0 and 32 < self.high <= 255

    @property
    def is_scaled_twice(self) -> bool:
        """True if the data look like pixels that were divided by 255 twice."""
        return self.low >= 0 and 0.25 < 255 * self.high < 1.001  # 1 / 255 is rounded.

    def describe(self, name: str) -> str:
        return f"input '{name}' ({self.x.dtype}, {self.low:.4g} to {self.high:.4g})"

    def preparations(self) -> dict[str, Prepare]:
        """Returns functions that the user may have forgotten. Keys are code, such as "x / 255"."""
        if self.is_pixels:
            count = 4 if self.x.ndim == 4 and self.x.shape[-1] == 3 else 2
            return dict(list(_OF_PIXELS.items())[:count])
        if self.is_scaled_twice:
            return dict(list(_OF_UNIT.items())[:1])
        if self.low < -1 or not 0.5 < self.high <= 1:
            return {}
        return _OF_UNIT if self.low >= 0 else _OF_SYMMETRIC


def find_wrong_preparation(graph: Graph, samples: dict[str, Sample]) -> str:
    """Returns a warning if data seem to be preprocessed differently than in training, or ""."""
    layers = [call.layer for call in graph.calls]
    is_little = any(len(sample.x) < _FEWEST for sample in samples.values())
    if is_little or any(getattr(layer, "stateful", False) for layer in layers):
        return ""
    phase = Phase(training=False, quantizing=False, frozen=True, calibrated=True)
    with assuming(phase, [layer for layer in layers if isinstance(layer, ScheduledLayer)]):
        reasons = list(_check_statistics(graph, samples))
        if not reasons and len(samples) == len(flatten_values(graph.inputs)) == 1:
            ((name, sample),) = samples.items()
            reasons = [_check_rescaling(graph, name, sample)]
    return next(filter(None, reasons), "")


def _check_statistics(graph: Graph, samples: dict[str, Sample]) -> Iterator[str]:
    """Yield a warning or "" for each input that reaches a normalization layer."""
    sources = {value: {value.name} for value in flatten_values(graph.inputs)}
    remaining = dict(samples)
    for call in graph.calls:
        if not remaining:
            return
        reached = set().union(*(sources[value] for value in call.inputs))
        sources |= dict.fromkeys(flatten_values(call.outputs), reached)
        layers = call.layer.sublayers if isinstance(call.layer, QuantizeWrapper) else [call.layer]
        norm = next((layer for layer in layers if find_statistics(layer) is not None), None)
        if norm is None or len(reached) > 1 or not reached <= remaining.keys():
            continue
        (name,) = reached
        before = layers[: layers.index(norm)]
        yield _compare(graph, call.inputs[0], before, norm, name, remaining.pop(name))


def _compare(
    graph: Graph,
    value: Value,
    before: list[Any],
    norm: keras.layers.Layer,
    name: str,
    sample: Sample,
) -> str:
    """Return a warning if the data that reach `norm` differ from the training data, or ""."""

    def measure(x: tf.Tensor) -> tuple[np.ndarray, np.ndarray]:
        (y,) = _compute(graph, [value], name, x)
        for layer in before:
            y = infer(Call(layer, (), {}, (), layer.name), (y,), {})
        return _find_distances(y.numpy(), norm)

    wider, shift = measure(sample.x)
    distance = _mean(wider, shift)
    if distance < FAR_IF_OTHER:
        return ""
    alternatives = {
        code: _mean(*measure(prepare(sample.x))) for code, prepare in sample.preparations().items()
    }
    best = min(alternatives, key=alternatives.__getitem__, default="")
    is_better = bool(best) and alternatives[best] < min(distance / 4, FAR_IF_OTHER)
    # After few training steps the variance still depends on its initial value of 1.
    if not is_better and _mean(np.maximum(wider, 0), shift) < FAR:
        return ""
    ratio = float(2 ** np.median(wider))
    how = f"varies {'at least ' * (ratio >= 2**_MOST)}{ratio:.3g} times as much as in training"
    if 0.67 < ratio < 1.5:
        how = f"is shifted by {np.median(np.abs(shift)):.2g} standard deviations"
    fit = f"They fit as {best}." if is_better else "Prepare them as in training."
    return (
        f"The data for {sample.describe(name)} are not prepared as in training: the input "
        f"of layer '{norm.name.removeprefix(PREFIX)}' {how}. {fit}"
    )


def _find_distances(x: np.ndarray, norm: keras.layers.Layer) -> tuple[np.ndarray, np.ndarray]:
    """Return `(wider, shift)` for each channel of `x`, the input of the layer `norm`.

    `wider` is log2(standard deviation / standard deviation in training). `shift` is the difference
    of the means, in standard deviations.
    """
    statistics = find_statistics(norm)
    assert statistics is not None
    mean, deviation = statistics
    x = x * np.float32(getattr(norm, "input_scale", 1))
    if mean.size == 1:
        x = x.reshape(-1, 1)
    else:  # In contrib's BatchNormalization `axis` refers to images.
        norm_axes = [norm.axis] if isinstance(norm.axis, int) else list(norm.axis)
        axes = [axis if axis < x.ndim else -1 for axis in norm_axes]
        x = np.moveaxis(x, axes, range(-len(axes), 0)).reshape(-1, mean.size)
    x = draw_rows(x, _ROWS)
    with np.errstate(divide="ignore"):
        wider = np.log2(x.std(0, dtype=float) / deviation)
    return np.clip(wider, -_MOST, _MOST), np.clip((x.mean(0) - mean) / deviation, -_MOST, _MOST)


def draw_rows(rows: np.ndarray, count: int) -> np.ndarray:
    """Returns at most `count` random rows. Every n-th value might be from one color channel."""
    if len(rows) <= count:
        return rows
    return rows[np.unique(np.random.default_rng(0).integers(0, len(rows), count))]


def _mean(wider: np.ndarray, shift: np.ndarray) -> float:
    return float(np.mean(np.maximum(np.abs(wider), np.abs(shift))))


def _check_rescaling(graph: Graph, name: str, sample: Sample) -> str:
    """Return a warning if data for a Rescaling layer seem to be rescaled already, or ""."""
    # The inputs, and the outputs of operators that keep the range of their input.
    unchanged = set(flatten_values(graph.inputs))
    for call in graph.calls:
        layer = get_first_layer(call)
        if not unchanged.issuperset(call.inputs):
            continue
        if isinstance(layer, keras.layers.Rescaling):
            scale = float(np.max(np.abs(layer.scale)))
            if 0 < scale * (sample.high - sample.low) < _RESCALED_TWICE:
                return (
                    f"The data for {sample.describe(name)} seem to be rescaled already, but layer "
                    f"'{layer.name.removeprefix(PREFIX)}' multiplies them by {scale:.3g} again. "
                    f"Pass them without rescaling."
                )
        op = find_op(call)
        if isinstance(layer, Quantize) or (op and isinstance(op.output, SharedRange)):
            unchanged.update(flatten_values(call.outputs))
    return ""


def _compute(graph: Graph, values: list[Value], name: str, x: Any) -> list[Any]:
    """Compute `values` in float from `x`, the data of the input `name`."""
    calls = split_loss_only(graph.calls, values)[0]
    inputs = [
        tf.constant(x, value.dtype) if value.name == name else None
        for value in flatten_values(graph.inputs)
    ]
    part = dataclasses.replace(graph, calls=calls, outputs=values)
    return evaluate_graph(part, inputs, infer)
