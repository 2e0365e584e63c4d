"""Signal to quantization noise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MOST = 150.0
"""The highest ratio, in dB, that float32 can tell."""

ROUNDING = 1e-12
"""Share of a tensor's power that float32 gives to the variance of what is constant."""

ALIKE = 0.01
"""Share of the variance of all numbers that inputs vary by over examples which hardly differ."""

FEW_STEPS = 2.0
"""Steps of its range that an output varies by over examples which hardly differ."""


def decibels(exact: np.ndarray, values: np.ndarray) -> float | None:
    """Returns the signal to noise ratio of a tensor in dB; None without a signal."""
    ratio = SignalToNoise()
    ratio.add(exact, values)
    return ratio.decibels()


def are_alike(inputs: Sequence[np.ndarray]) -> bool:
    """Whether several examples hardly differ, as what a camera sees that nobody moves."""
    return len(inputs[0]) > 1 and all(
        np.var(x, 0).mean() <= ALIKE * np.var(x, dtype=np.float64) for x in inputs
    )


def hardly_differs(output: np.ndarray, step: float) -> bool:
    """Whether no entry of an output differs over the examples by more than steps of its range."""
    return len(output) > 1 and bool(np.var(output, 0).max() ** 0.5 <= FEW_STEPS * step)


class SignalToNoise:
    """The ratio of a tensor's signal to its quantization noise, over batches.

    The signal is the variance over the examples: what is the same for all of them, such as the
    mean of an output, says nothing about an example. Of a single example it is the variance over
    the tensor's entries.
    """

    def __init__(self) -> None:
        self._examples = self._size = 0
        self._sums: np.ndarray | float = 0.0
        self._power = self._noise = 0.0

    def add(self, exact: np.ndarray, values: np.ndarray) -> None:
        """Takes in a batch: the tensor in float, and the same with quantization.

        A smaller batch of a tensor whose first axis is not the batch has other entries, and is
        left out.
        """
        exact = np.atleast_1d(exact).astype(np.float64)
        if self._examples and np.shape(self._sums) != exact.shape[1:]:
            return
        with np.errstate(all="ignore"):  # A model in float may reach infinity.
            self._examples += len(exact)
            self._size += exact.size
            self._sums = self._sums + exact.sum(0)
            self._power += float(np.sum(exact**2))
            self._noise += float(np.sum((values.reshape(exact.shape) - exact) ** 2))

    @property
    def _signal(self) -> float:
        with np.errstate(all="ignore"):
            mean_power = float(np.sum(np.square(self._sums))) / self._examples
            if self._examples == 1:
                mean_power = float(np.sum(self._sums)) ** 2 / self._size
            signal = self._power - mean_power
        return 0.0 if signal <= ROUNDING * self._power else signal

    @property
    def spread(self) -> float:
        """The standard deviation of an entry over the examples, the root mean square of all."""
        return float((self._signal / self._size) ** 0.5)

    def decibels(self) -> float | None:
        """Returns the ratio, up to 150 dB; None without a signal, or if it is not finite."""
        signal = self._signal
        if not signal or not np.isfinite([signal, self._noise]).all():
            return None
        noise = max(self._noise, signal * 10 ** (-MOST / 10))
        return float(10 * np.log10(signal / noise))
