"""Results of `verify`: signal-to-noise ratios (SQNR), and reports of outputs and tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from keras_qat.analysis.verify.labels import Use
from keras_qat.analysis.verify.scores import Score
from keras_qat.io.inputs import split_rows
from keras_qat.training.calibration.lost_values import Outliers

SAME = 0.999
"""A layer is right if at least this share of its values is identical in file and model. Other
values may differ by one step, because kernels round halves differently."""

MOVING = {"RESHAPE", "SQUEEZE", "EXPAND_DIMS", "SHAPE", "STRIDED_SLICE", "PACK"}
"""Operators that only move values. "CONV_2D+RESHAPE" becomes "CONV_2D" in tables."""

MOST = 150.0
"""Maximum SQNR in dB that is reported. Beyond it, the noise is only float32 rounding."""

ROUNDING = 1e-12
"""A tensor is constant if its variance, divided by its mean square, is at most this."""

ALIKE = 0.01
"""Examples are alike if the mean of `np.var(x, 0)` is at most this share of `np.var(x)`."""

FEW_STEPS = 2.0
"""An output hardly differs if its standard deviation over examples is at most this many steps."""

Dequantize = Callable[[NDArray], NDArray]


def compute_sqnr(exact: NDArray, values: NDArray) -> float | None:
    """Returns the signal-to-noise ratio in dB. Returns None if `exact` is constant."""
    ratio = SignalToNoise()
    ratio.add(exact, values)
    return ratio.in_decibels


def are_alike(inputs: Sequence[NDArray]) -> bool:
    """Returns True if all examples are alike, such as images from a camera that does not move."""
    return len(inputs[0]) > 1 and all(_vary(x, 0).mean() <= ALIKE * _vary(x, None) for x in inputs)


def _vary(x: NDArray, axis: int | None) -> NDArray:
    """Compute `np.var(x, axis)` for axis 0 or None, in blocks that need little memory."""
    kept = x.shape[1:] if axis == 0 else ()
    sums, squares, mean = np.zeros(kept), np.zeros(kept), x[0].mean(dtype=np.float64)
    for rows in split_rows(x):
        block = x[rows] - mean
        sums, squares = sums + block.sum(axis), squares + np.square(block).sum(axis)
    count = len(x) if axis == 0 else x.size
    return squares / count - np.square(sums / count)


def hardly_differs(output: NDArray, step: float) -> bool:
    """Returns True if an output is nearly the same for all examples. See `FEW_STEPS`."""
    return len(output) > 1 and bool(np.var(output, 0).max() ** 0.5 <= FEW_STEPS * step)


class SignalToNoise:
    """Measures the signal-to-quantization-noise ratio of a tensor over several batches.

    The signal is the variance over the examples: a tensor that is always the same has no signal.
    For a single example, the signal is the variance over the entries.
    """

    def __init__(self) -> None:
        self._examples = self._size = 0
        self._sums: NDArray = np.zeros(0)
        self._power = self._noise = 0.0

    def add(self, exact: NDArray, values: NDArray, dequantize: Dequantize = np.asarray) -> None:
        """Adds a batch: the tensor in the float model, and in the quantized model or file.

        A batch is ignored if its examples have another shape than in the first batch.
        """
        exact = np.atleast_1d(exact)
        if self._examples and np.shape(self._sums) != exact.shape[1:]:
            return
        self._examples += len(exact)
        self._size += exact.size
        if self._examples == len(exact):
            self._sums = np.zeros(exact.shape[1:])
        values = values.reshape(exact.shape)
        with np.errstate(all="ignore"):  # A float model may compute infinity.
            for rows in split_rows(exact):
                block = exact[rows].astype(np.float64)
                self._sums += block.sum(0)
                self._power += float(np.sum(np.square(block)))
                self._noise += float(np.sum(np.square(dequantize(values[rows]) - block)))

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
        """Standard deviation over the examples: `np.sqrt(np.var(exact, 0).mean())`."""
        return float((self._signal / self._size) ** 0.5)

    @property
    def in_decibels(self) -> float | None:
        """The ratio in dB, at most 150. None if the tensor is constant, or has infinity or NaN."""
        signal = self._signal
        if not signal or not np.isfinite([signal, self._noise]).all():
            return None
        noise = max(self._noise, signal * 10 ** (-MOST / 10))
        return float(10 * np.log10(signal / noise))


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How well the values of one tensor agree in file and model.

    Args:
        identical: share of identical values, 0 to 1.
        max_difference: the largest difference, in steps (LSB) of the tensor.
        mean_difference: the mean absolute difference, in LSB.
    """

    identical: float
    max_difference: float
    mean_difference: float


@dataclasses.dataclass(frozen=True)
class OutputReport(Agreement):
    """Comparison of an output of the file with the same output of the model.

    Args:
        name: the output's name in the model.
        argmax_agreement: share of examples with the same largest entry along the last axis. None if
            the last axis has one entry.
        float_sqnr: signal-to-quantization-noise ratio of the file, in dB, at most 150. The signal
            is the variance of the float model's output over the examples. None if this variance is
            so small that the ratio would be meaningless.
        float_argmax_agreement: `argmax_agreement` of the file and the float model.
        accuracy: share of examples that the file classifies correctly. None without labels, and for
            targets that are not classes.
        float_accuracy: share of examples that the float model classifies correctly.
        float_examples: number of examples for `float_sqnr` and `float_argmax_agreement`. None means
            all examples.
        use: the purpose of the output: "classes", "decisions" (yes or no), "signals" (like the
            input), "values", "embeddings", or "classes or values" if unknown.
        same_decisions: share of classes, yes-or-no decisions or nearest neighbours that are the
            same in file and float model. If less frequent classes change often, only these count.
            None for other uses, or if there is only one class.
        decisions: number of classes, decisions or neighbours that were compared.
        score: how well the file and the float model match the labels. None without labels.
    """

    name: str
    argmax_agreement: float | None
    float_sqnr: float | None = None
    float_argmax_agreement: float | None = None
    accuracy: float | None = None
    float_accuracy: float | None = None
    float_examples: int | None = None
    use: Use = "values"
    same_decisions: float | None = None
    decisions: int = 0
    score: Score | None = None

    def against_float(self) -> str:
        """Compares file and float model in a sentence. Returns "" if nothing was compared."""
        classes, sqnr = self.float_argmax_agreement, self.float_sqnr
        figures = [] if classes is None else [f"same argmax in {classes:.2%} of rows"]
        figures += [] if sqnr is None else [f"SQNR {sqnr:.1f} dB"]
        if self.accuracy is not None and self.float_accuracy is not None:
            figures.append(f"accuracy {self.accuracy:.2%}, in float {self.float_accuracy:.2%}")
        if self.score is not None and self.score.measure != "accuracy":
            figures.append(str(self.score))
        count = self.float_examples
        sample = "" if count is None else f" on {count} examples (set float_examples for more)"
        sentence = f"{self.name} against the float model{sample}: {', '.join(figures)}."
        return sentence * bool(figures)


@dataclasses.dataclass(frozen=True)
class TensorReport:
    """Comparison of one tensor in the file and in the model.

    Args:
        name: the layer of the float model that computes the tensor. Later calls of a layer have a
            number. If layers are fused, it is the layer with weights.
        layers: names of the layers that compute this tensor from other tensors in the report.
        kernels: the file's operators that compute the tensor. An input has none.
        fed: agreement with the model if these operators run alone, with inputs from the model.
            Errors of earlier operators then have no effect. None for an input.
        run: agreement with the model if the file runs from its inputs (free run).
        simulated: share of values in the first examples that are identical in the file's free run
            and in `keras_qat.simulate`. If it is 1, file and model differ only by the rounding of
            kernels. None with the optimized kernels, and for float tensors.
        scale: float value of one step in the model. None if only the file quantizes the tensor.
        zero_point: the quantized value of 0 in the model, as int8 or int16.
        file_scale, file_zero_point: the scale and zero point in the file.
        scale_ulps: difference of the scales in units in the last place (ULP) of float32.
        same_range: whether the zero points are equal, and the scales are equal up to rounding.
        at_lowest, at_highest: share of the file's values that are the lowest or highest quantized
            value. A large share means clipping, except at the lowest value after a ReLU.
        sqnr: signal-to-quantization-noise ratio of the file's free run against the float model, in
            dB. None for a tensor that is the same for all examples.
        tensor: the tensor's name in the file.
        bits: the bits of the quantized values.
        reads: names of the tensors that the operator of this tensor reads.
        range: the smallest and the largest float value that the tensor can represent.
        float_range: the smallest and the largest value in the float model.
        spread: standard deviation of an entry over the examples, in the float model.
        clipped: share of the float values outside the range.
        far: the outliers that occupy most of the range, or None.
    """

    name: str
    layers: tuple[str, ...]
    kernels: tuple[str, ...]
    fed: Agreement | None
    run: Agreement
    simulated: float | None
    scale: float | None
    zero_point: int | None
    file_scale: float
    file_zero_point: int
    scale_ulps: int | None
    same_range: bool
    at_lowest: float
    at_highest: float
    sqnr: float | None
    tensor: str
    bits: int
    reads: tuple[str, ...]
    range: tuple[float, float]
    float_range: tuple[float, float]
    spread: float
    clipped: float
    far: Outliers | None = None

    @property
    def agrees(self) -> bool:
        """Whether at most 0.1 % of the values differ, by at most 1 LSB. Inputs must be equal."""
        if self.fed is None:
            return self.run.identical == 1
        return self.fed.identical >= SAME and self.fed.max_difference <= 1

    @property
    def is_faulty(self) -> bool:
        """Whether the file's values differ from the model's by more than kernel rounding."""
        return not self.agrees and self.simulated not in (1, None)

    @property
    def range_used(self) -> float:
        """The share of the range that the float values use, 0 to 1."""
        (low, high), (lowest, highest) = self.range, self.float_range
        return max(min(high, highest) - max(low, lowest), 0.0) / (high - low)

    @property
    def at_ends(self) -> float:
        """Share of values at the range's ends, perhaps clipped. Zeros of a ReLU do not count."""
        return self.at_highest + (self.at_lowest if self.file_zero_point > -128 else 0.0)

    @property
    def kernel_names(self) -> str:
        """The file's operators that compute the tensor, such as "CONV_2D+RELU", or "input"."""
        computing = [name for name in self.kernels if name not in MOVING]
        return "+".join(dict.fromkeys(computing or self.kernels)) or "input"


def format_share(share: float) -> str:
    """Formats a share in percent, rounded down. Only exactly 1 becomes "100.000%"."""
    return f"{int(share * 100_000) / 1000:.3f}%"


def join_names(names: Iterable[str]) -> str:
    """Formats names as "a, b, c". After eight names, continues with "and 3 more"."""
    names = list(names)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
