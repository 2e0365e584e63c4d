"""What the quantizers of a model see when it computes in float: extremes, histograms."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.config import specs
from keras_qat.frontend import graph as graph_lib
from keras_qat.frontend.graph import Call, takes_training
from keras_qat.frontend.keras2.backend import traced
from keras_qat.frontend.keras2.precision import computing_in_float32
from keras_qat.training.calibration.histogram import Histogram, counts_of, extremes_of, folded
from keras_qat.training.calibration.methods import Range
from keras_qat.training.layers.scheduled_layer import Phase, assuming
from keras_qat.training.schedule import scheduled_layers

__all__ = ["Observed", "infer"]


class _Watch:
    """A function that computes a model in float and tells what its quantizers see: traced once.

    Args:
        model: the model.
        counts: whether histograms are wanted, and not the extremes alone.
        fixed: whether quantizers whose ranges are fixed are watched too.
    """

    def __init__(self, model: Any, counts: bool, fixed: bool) -> None:
        self.fixed = fixed
        self.layers = list(scheduled_layers(model))
        self.graph = graph_lib.read(model)
        self.tensors: list[tuple[Any, int]] = []
        """A quantizer and a slot of it, as often as it is called."""
        signature = [tf.TensorSpec([None, *each.shape[1:]], each.dtype) for each in model.inputs]

        def watch(*inputs: Any) -> Any:
            seen = self._seen(inputs)
            extremes = [extremes_of(x) for x in seen]
            return extremes and tf.stack(extremes), [counts_of(x) for x in seen if counts]

        self.watch = traced(watch, input_signature=signature)

    def _seen(self, inputs: Any) -> list[Any]:
        seen: list[Any] = []
        self.tensors.clear()

        def note(quantizer: Any, slot: int, x: Any) -> None:
            self.tensors.append((quantizer, slot))
            seen.append(x)

        with contextlib.ExitStack() as stack:
            for layer in self.layers:
                for each in layer.quantizers:
                    if self.fixed or isinstance(each.spec, specs.QuantSpec):
                        stack.enter_context(_watched(each, functools.partial(note, each)))
            phase = Phase(training=False, quantizing=False, frozen=True, calibrated=True)
            stack.enter_context(assuming(phase, self.layers))
            graph_lib.evaluate(self.graph, list(inputs), infer)
        return seen

    def __call__(self, batch: list[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
        """The extremes of each tensor, and the counts of each if they are wanted."""
        dtypes = [each.dtype for each in self.watch.input_signature]
        arrays = [
            np.asarray(each, dtype.as_numpy_dtype)
            for each, dtype in zip(batch, dtypes, strict=True)
        ]
        extremes, counts = self.watch(*map(tf.constant, arrays))
        return np.asarray(extremes).reshape(-1, 2), [folded(each.numpy()) for each in counts]


class Observed:
    """What the quantizers of a model see, over all batches."""

    def __init__(self, model: Any, counts: bool, fixed: bool = False) -> None:
        watches = getattr(model, "_watches", None)
        if watches is None:  # Past Keras, which would track them.
            watches = {}
            object.__setattr__(model, "_watches", watches)
        if (counts, fixed) not in watches:
            watches[counts, fixed] = _Watch(model, counts, fixed)
        self.watch = watches[counts, fixed]
        self.examples = 0
        self.extremes: np.ndarray | None = None
        self.counts: list[np.ndarray] = []

    def add(self, batch: list[np.ndarray]) -> None:
        """Takes in a batch of the model's inputs."""
        extremes, counts = self.watch(batch)
        self._check_finite(extremes)
        self.examples += len(batch[0])
        if self.extremes is None:
            self.extremes, self.counts = extremes, counts
            return
        lowest, highest = (end(self.extremes, extremes) for end in (np.minimum, np.maximum))
        self.extremes = np.stack([lowest[:, 0], highest[:, 1]], 1)
        for sums, each in zip(self.counts, counts, strict=True):
            sums += each

    def _check_finite(self, found: np.ndarray) -> None:
        there = {each: layer.name for layer in self.watch.layers for each in layer.quantizers}
        broken = [
            there[quantizer]
            for (quantizer, _), ends in zip(self.watch.tensors, found, strict=True)
            if not np.isfinite(ends).all()
        ]
        if broken:
            raise ValueError(
                f"The data gives {len(broken)} quantizers a range with NaN or infinity, first "
                f"{broken[0]}/output. It holds none itself: look for them in the weights, and for "
                f"numbers in the data that are too large."
            )

    def ranges(self, method: Callable[..., Range]) -> dict[Any, Range]:
        """The range of each observer: by the method of all that its quantizer has seen."""
        places: dict[Any, list[int]] = {}
        for place, (quantizer, slot) in enumerate(self.watch.tensors):
            key = (quantizer, None if self.counts else slot)
            places.setdefault(key, []).append(place)
        found: dict[Any, Range] = {}
        for (quantizer, slot), each in places.items():
            ends = (
                method(self._histogram(each), quantizer.spec) if self.counts else self._ends(each)
            )
            observers = quantizer.observers if slot is None else [quantizer.observers[slot]]
            found |= dict.fromkeys(observers, (float(ends[0]), float(ends[1])))
        return found

    def histograms(self) -> dict[Any, Histogram]:
        """Quantizer -> the histogram of all that it has seen. Needs `counts`."""
        places: dict[Any, list[int]] = {}
        for place, (quantizer, _) in enumerate(self.watch.tensors):
            places.setdefault(quantizer, []).append(place)
        return {quantizer: self._histogram(each) for quantizer, each in places.items()}

    def _histogram(self, places: list[int]) -> Histogram:
        counts = np.sum([self.counts[place] for place in places], 0)
        return Histogram.of(counts, *self._ends(places))

    def _ends(self, places: list[int]) -> Range:
        assert self.extremes is not None
        return self.extremes[places, 0].min(), self.extremes[places, 1].max()


@contextlib.contextmanager
def _watched(quantizer: Any, note: Callable[[int, Any], None]) -> Iterator[None]:
    """Runs a block in which a quantizer shows what it sees."""
    quantizer.watched = note
    try:
        yield
    finally:
        quantizer.watched = None


def infer(call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls a layer as at inference, in float32."""
    if takes_training(call.layer):
        kwargs = {**kwargs, "training": False}
    with computing_in_float32(call.layer):
        return call.layer(*args, **kwargs)
