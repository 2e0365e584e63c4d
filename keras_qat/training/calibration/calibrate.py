"""The function `calibrate`, which computes ranges from data for post-training quantization."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.quant_params import WIDER, find_share_off_ties
from keras_qat.config import specs
from keras_qat.graph.calls import Call, Graph
from keras_qat.graph.precision import compute_in_float32
from keras_qat.graph.read_model import read_model
from keras_qat.graph.rebuild_model import evaluate_graph
from keras_qat.io.counts import check_counts
from keras_qat.io.data import BATCH_SIZE, is_read_once, read_batches
from keras_qat.keras2.backend import keras, make_tf_function, one_at_a_time, swap_attributes
from keras_qat.messages import warn_caller
from keras_qat.training.calibration.data_checks import InputData, explain_doubt, list_float_inputs
from keras_qat.training.calibration.histogram import (
    METHODS,
    Method,
    Range,
    Tally,
    count_bins,
    find_extremes,
    sort_bins,
)
from keras_qat.training.calibration.lost_values import find_input_quantizers, replace_nonfinite
from keras_qat.training.calibration.watch import Observed, infer, share_tallies, show_batches
from keras_qat.training.distribution import gather_workers
from keras_qat.training.fake_quantization.observers import LastValue, Observer
from keras_qat.training.fake_quantization.phase import NEVER
from keras_qat.training.readiness import EXAMPLES_PER_BATCH
from keras_qat.training.recurrent import kept_batch, list_states, restore_states
from keras_qat.training.schedule import check_process, check_quantized, list_quantizers, schedule
from keras_qat.training.scheduled_layer import ScheduledLayer
from keras_qat.training.weight_limits import clip_weights

_QUICK, _LARGEST = 1 << 17, 128
"""Batches have about `_QUICK` values by default, and between 32 and `_LARGEST` examples."""


@one_at_a_time
def calibrate(
    model: keras.Model,
    dataset: object,
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

    The model can then be exported (post-training quantization). The ranges are observed in the
    float model at inference, without quantization, dropout and noise. They do not depend on the
    batch size or the order of the examples. BatchNormalization statistics and the training step do
    not change. Weights only change with `weights="mse"`. The function warns if data seem to be
    preprocessed differently than in training. It also warns if data are too similar for 8 bits.

    In a cluster (`MultiWorkerMirroredStrategy`), all workers must call the function. Each worker
    passes a share of the data. The ranges are the same as in one process with all data.

    Args:
        model: the model.
        dataset: inputs, as for `model.predict` or TFLite's converter: an array, a list or dict of
            arrays, a list of images, a `tf.data.Dataset` (batched or not), a generator of batches,
            a function that returns a generator, or a `keras.utils.Sequence`. Labels are ignored.
        steps: number of batches to read. By default all. Required for an infinite dataset.
        batch_size: examples per batch, for arrays and unbatched data. The default is 32. If `steps`
            is None and the examples are small, the default is up to 128.
        method: how to choose a range. "minmax" uses the extremes. "percentile" excludes a share of
            the values at both ends. "mse" minimizes the mean squared error. Values beyond the range
            are clipped. "percentile" first clips the inputs, and then computes the ranges of all
            other tensors. This reads the data twice. A generator can only be read once, and its
            inputs are not clipped first. Some tensors have a fixed range, for example the output of
            a softmax. Fixed ranges do not change.
        percentile: for `method="percentile"`. 99.99 excludes 0.01 % of the values at each end.
        weights: how to choose the ranges of weights with one range per channel. "minmax" uses the
            extremes and changes nothing. "mse" minimizes the mean squared error and clips weights,
            which helps with 4 bits and fewer. Do not use "mse" before `learn_rounding`, which needs
            unclipped weights and chooses ranges itself.
        reset: True to discard ranges from training or from an earlier call. False to average old
            and new ranges, weighted by the number of examples.
        verbose: 1 shows progress.

    Raises:
        ValueError: if the model is not quantized, the method is unknown, the data is empty or does
            not fit the model, or a tensor contains NaN or infinity.

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
        raise ValueError(f"percentile={percentile}: pass more than 50 and at most 100.")
    check_counts(steps=steps, batch_size=batch_size)
    check_quantized(model)
    check_process(model)
    kept = kept_batch(list_states(model))
    batch_size = kept or batch_size or (_quick_batch(model) if steps is None else None)
    observed = Observed(model, counts=method != "minmax")
    options = {"percent": percentile} if method == "percentile" else {}
    range_of = functools.partial(METHODS[method], **options)

    limits: dict[int, tuple[Observer, Range]] = {}
    if method == "percentile" and not is_read_once(dataset):
        read = read_batches(model, dataset, batch_size, steps, finite=True)
        limits = _find_input_limits(model, observed.watch.graph, read, range_of)
    graph = observed.watch.graph
    first: list[np.ndarray] = []
    seen: list[InputData] = []
    for batch in show_batches(model, dataset, steps, batch_size, "Calibration", verbose):
        for index, (_, ends) in limits.items():
            batch[index] = np.clip(batch[index], *ends)
        observed.add(batch)
        seen = seen or list_float_inputs(graph, batch)
        for data in seen:
            data.add(replace_nonfinite(batch[data.index]))
        first = first or [x[: kept or model.inputs[0].shape[0] or 1] for x in batch]
    observed.share(model)
    ranges = observed.ranges(range_of) | dict(limits.values())
    _observe_weights(model, observed.watch.layers, first, reset)
    off_ties = {
        index: quantizer.observers[0]
        for index, quantizer in find_input_quantizers(graph).items()
        if isinstance(quantizer.spec, specs.QuantSpec) and quantizer.spec.off_ties
    }
    values = {off_ties[data.index]: data.values for data in seen if data.index in off_ties}
    count = observed.examples / EXAMPLES_PER_BATCH
    for observer, ends in ranges.items():
        assert isinstance(observer, LastValue)
        _set_range(model, observer, ends, count, reset, values.get(observer))
    if weights == "mse":
        clip_weights(model)
    examples = observed.examples if reset else None
    reason = explain_doubt(graph, seen, examples, clips=method != "minmax")
    if reason := reason or next(observed.doubts(ranges), ""):
        warn_caller(reason)


def _quick_batch(model: keras.Model) -> int | None:
    """Return a batch size from 32 to 128. Return None for fixed batch sizes or unknown shapes."""
    sizes = [math.prod(x.shape[1:]) for x in model.inputs if x.shape[1:].is_fully_defined()]
    if len(sizes) < len(model.inputs) or model.inputs[0].shape[0]:
        return None
    return min(max(BATCH_SIZE, _QUICK // sum(sizes)), _LARGEST)


def _find_input_limits(
    model: keras.Model,
    graph: Graph,
    read: Iterator[list[np.ndarray]],
    range_of: Callable[..., Range],
) -> dict[int, tuple[Any, Range]]:
    """Read all data. Return {input index: (observer, range)} for each input with a `Quantize`."""
    quantizers = find_input_quantizers(graph)
    tallies: dict[int, Tally] = defaultdict(Tally)
    for batch in read:
        for index in quantizers:
            x = tf.constant(batch[index], tf.float32)
            tallies[index].add(find_extremes(x).numpy(), sort_bins(count_bins(x).numpy()))
    share_tallies(model, list(tallies.values()))
    return {
        index: (quantizer.observers[0], range_of(tallies[index].histogram(), quantizer.spec))
        for index, quantizer in quantizers.items()
    }


def _set_range(
    model: keras.Model,
    observer: LastValue,
    ends: Range,
    count: float,
    reset: bool,
    values: np.ndarray | None,
) -> None:
    """Set the range of an observer. Without `reset`, average the current range and `ends`.

    In this average, `ends` count as `count` batches. `values` may be a sample of an input. The
    range is then widened slightly, to keep these values away from rounding ties.
    """
    before = 0.0 if reset or observer.counter is None else float(observer.counter.numpy())
    low, high = ends
    if before:
        old_low, old_high = observer.extremes()
        share = count / (before + count)
        low, high = old_low + (low - old_low) * share, old_high + (high - old_high) * share
    wider = WIDER
    if values is not None:
        wider = find_share_off_ties(min(low, 0.0), max(high, 0.0), values, observer.spec.bits)
        wider = float(gather_workers(model, wider)[0])
    observer.set(low, high, before + count, wider)


def _observe_weights(
    model: keras.Model, layers: list[ScheduledLayer], example: list[np.ndarray], reset: bool
) -> None:
    """Set the ranges of weights by calling all layers as in training, with quantization off."""
    observers = [
        quantizer.observer
        for layer in layers
        for quantizer in layer.weight_quantizers.values()
        if isinstance(quantizer.observer, LastValue)
    ]
    if not observers:
        return
    restored = [weight for layer in layers for weight in layer.switches]
    for observer in (item for x in list_quantizers(model) for item in x.observers):
        restored += observer.variables
    if reset:
        for observer in observers:
            observer.set(0.0, 0.0, 0.0)
    graph, strategy = read_model(model), model.distribute_strategy
    dtypes = [x.dtype for x in model.inputs]

    def train(*inputs: Any) -> None:
        strategy.run(lambda *xs: evaluate_graph(graph, list(xs), _train), inputs)

    with restore_states(restored):
        schedule(model, quantize_from=NEVER, freeze_from=0)
        make_tf_function(train)(*map(tf.constant, example, dtypes))


def _train(call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
    if not isinstance(call.layer, ScheduledLayer):
        return infer(call, args, kwargs)
    with compute_in_float32(call.layer), swap_attributes(call.layer, mixed=False):
        return call.layer(*args, **{**kwargs, "training": True})
