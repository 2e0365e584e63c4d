"""Ranges from data, without training: what post-training quantization needs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from keras_qat.config import specs
from keras_qat.frontend import graph as graph_lib
from keras_qat.frontend.graph import Call, Graph, values_in
from keras_qat.frontend.keras2.backend import one_at_a_time, swapped, traced
from keras_qat.frontend.keras2.precision import computing_in_float32
from keras_qat.io.data import batch_count, batches
from keras_qat.io.progress import shown
from keras_qat.training.calibration.histogram import Histogram, counts_of, extremes_of, folded
from keras_qat.training.calibration.methods import METHODS, Method, Range
from keras_qat.training.calibration.watch import Observed, infer
from keras_qat.training.layers import Quantize, ScheduledLayer
from keras_qat.training.layers.recurrent.states import kept_batch, states_of
from keras_qat.training.layers.scheduled_layer import NEVER
from keras_qat.training.ranges.weight_limits import clip_weights
from keras_qat.training.schedule import check_quantized, schedule, scheduled_layers
from keras_qat.training.untrained_warnings import EXAMPLES_PER_BATCH

__all__ = ["calibrate"]


@one_at_a_time
def calibrate(
    model: Any,
    dataset: Any,
    steps: int | None = None,
    batch_size: int | None = None,
    *,
    method: Method = "minmax",
    percentile: float = 99.99,
    weights: Literal["minmax", "mse"] = "minmax",
    reset: bool = True,
    verbose: int = 0,
) -> None:
    """Sets the ranges of a quantization-aware model from data, without training it.

    After this the model can be exported: post-training quantization. Ranges are those of the
    float model at inference: quantization, dropout and noise are off. They depend neither on the
    batch size nor on the order of the examples. No other weight changes, unless `weights` says so:
    not those that train, not BatchNormalization's statistics, not the training step.

    Args:
        model: the model.
        dataset: inputs, as `model.predict` or TFLite's converter take them: an array, a list or
            dict of arrays, a `tf.data.Dataset`, batched or not, a `keras.utils.Sequence`, a
            generator of batches or the function that makes one, a list of images. Labels that come
            along are ignored.
        steps: how many batches to look at; all by default. A dataset that never ends needs it.
        batch_size: examples per batch of arrays and single examples, 32 by default.
        method: what a range is made of. "minmax" takes the extremes, "percentile" all but a
            share of the numbers at either end, "mse" the range with the smallest mean squared
            error, "entropy" that with the smallest Kullback-Leibler divergence. What lies
            beyond a range is cut off. "percentile" does so with the inputs before anything is
            computed from them, for which it reads the data twice, if it is no generator. Ranges
            that a kernel fixes stay as they are.
        percentile: share of the numbers, in percent, below the upper end, and above the lower one.
        weights: ranges of weights per channel: their extremes, which change nothing, or with "mse"
            those with the smallest mean squared error, which weights are clipped to. Pays with 4
            bits and fewer; `learn_rounding` does more, and this as well.
        reset: whether what was observed before, by training or in an earlier call, is forgotten.
            If not, ranges are averaged with it, each part counting by its number of examples.
        verbose: 1 shows progress.

    Raises:
        ValueError: if the model is not quantized, there is no such method, the data is not what
            the model takes or none, or a tensor holds NaN or infinity.

    Example:
        >>> qat = keras_qat.quantize_model(model)
        >>> keras_qat.calibrate(qat, x_train[:512], method="mse")
        >>> keras_qat.export_tflite(qat, "model.tflite")
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r}: use one of {', '.join(map(repr, METHODS))}.")
    if weights not in ("minmax", "mse"):
        raise ValueError(f"weights={weights!r}: use 'minmax' or 'mse'.")
    if not 50 < percentile <= 100:
        raise ValueError(f"percentile={percentile}: give more than 50 and at most 100, as 99.99.")
    check_quantized(model, ": call keras_qat.quantize_model(model) first.")
    kept = kept_batch(states_of(model))
    batch_size = kept or batch_size
    found = Observed(model, counts=method != "minmax")
    options = {"percent": percentile} if method == "percentile" else {}
    range_of = functools.partial(METHODS[method], **options)

    def read() -> Iterator[list[np.ndarray]]:
        return batches(model, dataset, batch_size, steps, finite=True)

    limits: dict[int, tuple[Any, Range]] = {}
    if method == "percentile" and not hasattr(dataset, "__next__"):
        limits = _input_limits(found.watch.graph, read(), range_of)
    first: list[np.ndarray] = []
    total = batch_count(model, dataset, batch_size, steps)
    for batch in shown(read(), "Calibration", verbose, total):
        for place, (_, ends) in limits.items():
            batch[place] = np.clip(batch[place], *ends)
        found.add(batch)
        first = first or [each[: kept or 1] for each in batch]
    ranges = found.ranges(range_of) | dict(limits.values())
    _observe_weights(model, first, reset)
    for observer, ends in ranges.items():
        _set(observer, ends, found.examples / EXAMPLES_PER_BATCH, reset)
    if weights == "mse":
        clip_weights(model)


def _input_limits(
    graph: Graph, read: Iterator[list[np.ndarray]], range_of: Callable[..., Range]
) -> dict[int, tuple[Any, Range]]:
    """The ranges of inputs that have a quantizer for themselves: place -> observer, range."""
    readers = graph.consumers()
    found = {}
    for place, value in enumerate(values_in(graph.inputs)):
        layers = [call.layer for call in readers[value] if isinstance(call.layer, Quantize)]
        own = [each for each in layers if each.slots == 1]
        if value.is_float and own and isinstance(own[0].spec, specs.QuantSpec):
            found[place] = own[0].quantizer
    counts: dict[int, Any] = dict.fromkeys(found, 0)
    ends: dict[int, list[np.ndarray]] = {place: [] for place in found}
    for batch in read:
        for place in found:
            x = tf.constant(batch[place], tf.float32)
            counts[place] = counts[place] + folded(counts_of(x).numpy())
            ends[place].append(extremes_of(x).numpy())
    limits = {}
    for place, quantizer in found.items():
        low, high = np.min(ends[place], 0)[0], np.max(ends[place], 0)[1]
        limits[place] = range_of(Histogram.of(counts[place], low, high), quantizer.spec)
    return {place: (found[place].observers[0], limits[place]) for place in found}


def _set(observer: Any, ends: tuple[float, float], count: float, reset: bool) -> None:
    """Sets the range of an observer, or averages it with the one it has."""
    before = 0.0 if reset or observer.counter is None else float(observer.counter.numpy())
    if before:
        there = observer.extremes()
        share = count / (before + count)
        ends = tuple(old + (new - old) * share for old, new in zip(there, ends, strict=True))
    observer.set(*ends, before + count)


def _observe_weights(model: Any, example: list[np.ndarray], reset: bool) -> None:
    """Lets the weights' observers see them; folded ones exist in training alone."""
    layers = list(scheduled_layers(model))
    observers = [
        each.observer
        for layer in layers
        for each in getattr(layer, "weight_quantizers", {}).values()
        if getattr(each.observer, "minimum", None) is not None
    ]
    if not observers:
        return
    kept = [weight for layer in layers for weight in layer.switches]
    kept += [
        weight
        for layer in layers
        for quantizer in layer.quantizers
        for observer in quantizer.observers
        for weight in observer.variables
    ]
    before = [weight.numpy() for weight in kept]
    if reset:
        for observer in observers:
            observer.set(0.0, 0.0, 0.0)
    schedule(model, quantize_from=NEVER, freeze_from=0)
    graph, strategy = graph_lib.read(model), model.distribute_strategy
    dtypes = [each.dtype for each in model.inputs]

    def train(*inputs: Any) -> None:
        strategy.run(lambda *given: graph_lib.evaluate(graph, list(given), _train), inputs)

    try:
        traced(train)(*map(tf.constant, example, dtypes))
    finally:
        for weight, value in zip(kept, before, strict=True):
            weight.assign(value)


def _train(call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls a layer as at inference, but for what observes."""
    if not isinstance(call.layer, ScheduledLayer):
        return infer(call, args, kwargs)
    with computing_in_float32(call.layer), swapped(call.layer, mixed=False):
        return call.layer(*args, **{**kwargs, "training": True})
