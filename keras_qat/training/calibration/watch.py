"""Observes the tensors that quantizers read, while a model computes in float.

`calibrate` then chooses ranges for these tensors. Several tensors may share the range of one
quantizer. Such tensors are numbered: slot 0, slot 1, and so on.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.config import specs
from keras_qat.graph.calls import Call
from keras_qat.graph.precision import cast_constants, compute_in_float32
from keras_qat.graph.read_model import read_model
from keras_qat.graph.rebuild_model import evaluate_graph
from keras_qat.io.data import count_batches, read_batches, show_progress
from keras_qat.io.inputs import explain_batch_size
from keras_qat.keras2.backend import AUTOGRAPH_AS_USUAL, keras, swap_attributes, trace_for_any_batch
from keras_qat.keras2.layers_and_models import accepts_training
from keras_qat.messages import pluralize
from keras_qat.training.calibration.histogram import (
    Range,
    Tally,
    count_bins,
    extremes_and_sample,
    sort_bins,
)
from keras_qat.training.calibration.lost_values import (
    describe_lost_tensors,
    describe_outliers,
    find_masked_scores,
    find_outliers,
    find_varying_slots,
    name_slots,
)
from keras_qat.training.distribution import gather_workers, is_cluster
from keras_qat.training.fake_quantization.activation_quantizer import ActivationQuantizer
from keras_qat.training.fake_quantization.observers import Observer
from keras_qat.training.fake_quantization.phase import IN_FLOAT
from keras_qat.training.quantizers import PREFIX
from keras_qat.training.schedule import list_scheduled_layers
from keras_qat.training.scheduled_layer import assuming

_SAMPLE, _SAMPLED = 16, 256
"""From each tensor, 16 values per example are kept, for about the first 256 examples."""

Slot = tuple[ActivationQuantizer, int | None]
"""A quantizer, and the number of a tensor that it quantizes. None means all of its tensors."""


class Watch:
    """Computes a model in float, and returns statistics of the tensors that quantizers read.

    If `counts` is True, the statistics include the number of values in each histogram bin.
    """

    def __init__(self, model: keras.Model, counts: bool) -> None:
        self.layers = list(list_scheduled_layers(model))
        self.graph = read_model(model)
        self.quantizers = [
            quantizer
            for layer in self.layers
            for quantizer in layer.quantizers
            if isinstance(quantizer.spec, specs.QuantSpec)
        ]
        self.tensors: list[tuple[ActivationQuantizer, int]] = []
        """The quantizer and slot of each watched tensor, in the order of computation."""
        self.specs = [tf.TensorSpec(x.shape, x.dtype) for x in model.inputs]
        self.specs.append(tf.TensorSpec([], tf.int32))

        def watch(*arguments: tf.Tensor) -> tuple[list[tf.Tensor], ...]:
            *inputs, sampled = arguments
            seen, outputs = self._compute(inputs)
            known = [extremes_and_sample(tf.cast(x, tf.float32), sampled) for x in seen]
            return known, [count_bins(x) for x in seen if counts], tf.nest.flatten(outputs)

        self._trace = functools.cache(lambda: trace_for_any_batch(watch, self.specs))

    def _compute(self, inputs: list[tf.Tensor]) -> tuple[list[tf.Tensor], Any]:
        """Return the tensors that the quantizers read, and the model's outputs."""
        seen: list[tf.Tensor] = []
        self.tensors.clear()

        def note(quantizer: ActivationQuantizer, slot: int, x: tf.Tensor) -> None:
            self.tensors.append((quantizer, slot))
            seen.append(x)

        with contextlib.ExitStack() as stack:
            for quantizer in self.quantizers:
                watched = functools.partial(note, quantizer)
                stack.enter_context(swap_attributes(quantizer, watched=watched))
            stack.enter_context(assuming(IN_FLOAT, self.layers))
            outputs = evaluate_graph(self.graph, inputs, infer)
        return seen, outputs

    def _run(self, batch: Sequence[np.ndarray], sampled: int) -> tuple[list[tf.Tensor], ...]:
        inputs = map(tf.constant, [*batch, sampled], [spec.dtype for spec in self.specs])
        with explain_batch_size(self.graph.name, self.specs[0].shape[0], len(batch[0])):
            return self._trace()(*inputs)

    def outputs(self, batch: Sequence[np.ndarray]) -> list[tf.Tensor]:
        return list(self._run(batch, sampled=0)[2])

    def __call__(
        self, batch: list[np.ndarray], sampled: int
    ) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
        """Returns the extremes, at most `sampled` values, and the bin counts of each tensor."""
        known, counts, _ = self._run(batch, sampled)
        vectors = [vector.numpy() for vector in known]
        extremes = np.array([vector[:2] for vector in vectors]).reshape(-1, 2)
        samples = [vector[2:] for vector in vectors]
        return extremes, samples, [sort_bins(bins.numpy()) for bins in counts]


def get_watch(model: keras.Model) -> Watch | None:
    """Returns the `Watch` without histograms if `calibrate` already created one, or None."""
    return getattr(model, "_watches", {}).get(False)


class Observed:
    """Statistics of the tensors that a model's quantizers read, over all batches."""

    def __init__(self, model: keras.Model, counts: bool) -> None:
        watches = vars(model).setdefault("_watches", {})  # Keras does not track entries of `vars`.
        if counts not in watches:
            watches[counts] = Watch(model, counts)
        self.watch: Watch = watches[counts]
        self.examples = 0
        self.tallies: dict[Slot, Tally] = defaultdict(Tally)
        """The statistics of each quantizer if `counts` is True. Otherwise, of each tensor."""
        self.samples: dict[ActivationQuantizer, dict[int, list[np.ndarray]]] = {}
        """Samples of tensors from the first batches, by quantizer and slot."""

    def add(self, batch: list[np.ndarray]) -> None:
        sampled = _SAMPLE * len(batch[0]) if self.examples < _SAMPLED else 0
        extremes, samples, counts = self.watch(batch, sampled)
        self._check_finite(extremes)
        if sampled:
            for (quantizer, slot), sample in zip(self.watch.tensors, samples, strict=True):
                by_slot = self.samples.setdefault(quantizer, {})
                by_slot.setdefault(slot, []).append(sample)
        self.examples += len(batch[0])
        for index, (quantizer, slot) in enumerate(self.watch.tensors):
            tally = self.tallies[quantizer, None if counts else slot]
            tally.add(extremes[index], counts[index] if counts else 0)

    def share(self, model: keras.Model) -> None:
        """In training on several machines, adds the statistics of the other machines."""
        self.examples = int(gather_workers(model, self.examples).sum())
        share_tallies(model, list(self.tallies.values()))

    def doubts(self, ranges: dict[Observer, Range]) -> Iterator[str]:
        """Yields warnings about outliers, and tensors much smaller than their shared range."""
        graph = self.watch.graph
        masked, varying = find_masked_scores(graph), find_varying_slots(graph)
        for quantizer, by_slot in self.samples.items():
            ends = [ranges[observer] for observer in quantizer.observers if observer in ranges]
            if not ends or quantizer in masked:
                continue
            low, high = min(low for low, _ in ends), max(high for _, high in ends)
            samples = {slot: np.concatenate(batches) for slot, batches in by_slot.items()}
            layer, bits = self._find_layer(quantizer), quantizer.spec.bits
            slot = max(samples, key=lambda slot: np.max(np.abs(samples[slot]), initial=0))
            far = find_outliers(np.concatenate([*samples.values()]), (low, high), (low, high), bits)
            # The median shows whether this tensor has outliers, or is larger than other tensors.
            if far and (len(samples) == 1 or far.low <= np.median(samples[slot]) <= far.high):
                name = self._find_name(quantizer, slot)
                yield f"The output of '{name}': {describe_outliers(far, low, high, bits)}"
            elif len(samples) > 1:
                extremes = {}
                for slot, x in samples.items():
                    if x.size and (layer, slot) in varying:
                        tally = self.tallies.get((quantizer, slot), Tally(x.min(), x.max()))
                        name = self._find_name(quantizer, slot)
                        extremes[name] = float(tally.low), float(tally.high)
                if reason := describe_lost_tensors(extremes, (low, high), bits):
                    yield reason

    def _find_name(self, quantizer: ActivationQuantizer, slot: int) -> str:
        layer = self._find_layer(quantizer)
        own = {0: str(layer.name).removeprefix(PREFIX)}
        return name_slots(self.watch.graph).get(layer, own)[slot]

    def _find_layer(self, quantizer: ActivationQuantizer) -> Any:
        return next(layer for layer in self.watch.layers if quantizer in layer.quantizers)

    def _check_finite(self, extremes: np.ndarray) -> None:
        broken = [
            self._find_name(quantizer, slot)
            for (quantizer, slot), ends in zip(self.watch.tensors, extremes, strict=True)
            if not np.isfinite(ends).all()
        ]
        if broken:
            raise ValueError(
                f"The model computes NaN or infinity from this data, first in the output of "
                f"'{broken[0]}'. Therefore "
                f"{pluralize(len(broken), 'tensor has', 'tensors have')} no range. The data itself "
                f"is finite. Usual causes are a logarithm or a root of negative values, a division "
                f"by zero, and weights with NaN or infinity."
            )

    def ranges(self, method: Callable[..., Range]) -> dict[Observer, Range]:
        ranges: dict[Observer, Range] = {}
        for (quantizer, slot), tally in self.tallies.items():
            if slot is None:
                low, high = method(tally.histogram(), quantizer.spec)
                ranges |= dict.fromkeys(quantizer.observers, (float(low), float(high)))
            else:
                ranges[quantizer.observers[slot]] = float(tally.low), float(tally.high)
        return ranges


def share_tallies(model: keras.Model, tallies: list[Tally]) -> None:
    """In a cluster, adds the extremes and bin counts of the other workers to `tallies`."""
    if not is_cluster(model.distribute_strategy):
        return
    ends = gather_workers(model, [[tally.low, tally.high] for tally in tallies])
    for index, tally in enumerate(tallies):
        tally.low, tally.high = ends[:, index, 0].min(), ends[:, index, 1].max()
        tally.counts = gather_workers(model, tally.counts).sum(0).astype(np.int64)


def infer(call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls a layer with `training=False`, in float32."""
    if accepts_training(call.layer):
        kwargs = {**kwargs, "training": False}
    args, kwargs = cast_constants((args, kwargs))
    with compute_in_float32(call.layer), AUTOGRAPH_AS_USUAL:
        return call.layer(*args, **kwargs)


def show_batches(
    model: keras.Model,
    data: object,
    steps: int | None,
    batch_size: int | None,
    title: str,
    verbose: int,
) -> Iterator[list[np.ndarray]]:
    """Yields batches of data, and shows progress. Raises an error for NaN and infinity."""
    total = count_batches(model, data, batch_size, steps)
    batches = read_batches(model, data, batch_size, steps, finite=True)
    return show_progress(batches, title, verbose, total)
