"""Signal-to-quantization-noise ratio (SQNR)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MOST = 150.0
"""The highest ratio, in dB, that float32 can resolve."""

ROUNDING = 1e-12
"""Share of a constant tensor's power that float32 rounding turns into variance."""

ALIKE = 0.01
"""Inputs are alike if they vary over examples by at most this share of their total variance."""

FEW_STEPS = 2.0
"""An output hardly differs if it varies over examples by at most this many steps of its range."""


def compute_sqnr(exact: NDArray, values: NDArray) -> float | None:
    """Returns the signal-to-noise ratio of a tensor in dB; None without a signal."""
    ratio = SignalToNoise()
    ratio.add(exact, values)
    return ratio.in_decibels


def are_alike(inputs: Sequence[NDArray]) -> bool:
    """Returns whether examples hardly differ, such as images from a camera that does not move."""
    return len(inputs[0]) > 1 and all(
        np.var(x, 0).mean() <= ALIKE * np.var(x, dtype=np.float64) for x in inputs
    )


def hardly_differs(output: NDArray, step: float) -> bool:
    """Returns whether all entries of an output vary over the examples by few steps at most."""
    return len(output) > 1 and bool(np.var(output, 0).max() ** 0.5 <= FEW_STEPS * step)


class SignalToNoise:
    """Accumulates the ratio of a tensor's signal to its quantization noise over batches.

    The signal is the variance over the examples, because a constant part, such as the mean of an
    output, carries no information. For a single example it is the variance over the entries.
    """

    def __init__(self) -> None:
        self._examples = self._size = 0
        self._sums: NDArray | float = 0.0
        self._power = self._noise = 0.0

    def add(self, exact: NDArray, values: NDArray) -> None:
        """Adds a batch of float values and the same values with quantization.

        A smaller batch of a tensor whose first axis is not the batch is ignored, because its
        entries differ.
        """
        exact = np.atleast_1d(exact).astype(np.float64)
        if self._examples and np.shape(self._sums) != exact.shape[1:]:
            return
        with np.errstate(all="ignore"):  # A float model may compute infinity.
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
        """The standard deviation over the examples, as root mean square of all entries."""
        return float((self._signal / self._size) ** 0.5)

    @property
    def in_decibels(self) -> float | None:
        """The ratio, up to 150 dB; None without a signal, or if it is not finite."""
        signal = self._signal
        if not signal or not np.isfinite([signal, self._noise]).all():
            return None
        noise = max(self._noise, signal * 10 ** (-MOST / 10))
        return float(10 * np.log10(signal / noise))
