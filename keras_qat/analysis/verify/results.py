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
"""Minimum share of identical values in a layer that agrees with the model. The remaining values may
lie halfway between two steps."""

MOVING = {"RESHAPE", "SQUEEZE", "EXPAND_DIMS", "SHAPE", "STRIDED_SLICE", "PACK"}
"""Operators that move values. Tables omit them if another operator computes the tensor."""

MOST = 150.0
"""The highest signal-to-noise ratio, in dB, that float32 can represent."""

ROUNDING = 1e-12
"""Variance of a constant tensor due to float32 rounding, relative to its power."""

ALIKE = 0.01
"""If inputs are alike, at most this share of their variance is between examples."""

FEW_STEPS = 2.0
"""An output hardly differs if examples differ by at most this many steps of its range."""

Dequantize = Callable[[NDArray], NDArray]


def compute_sqnr(exact: NDArray, values: NDArray) -> float | None:
    """Returns the signal-to-noise ratio of a tensor in dB. Returns None without a signal."""
    ratio = SignalToNoise()
    ratio.add(exact, values)
    return ratio.in_decibels


def are_alike(inputs: Sequence[NDArray]) -> bool:
    """Returns True if all examples are alike, such as images from a camera that does not move."""
    return len(inputs[0]) > 1 and all(_vary(x, 0).mean() <= ALIKE * _vary(x, None) for x in inputs)


def _vary(x: NDArray, axis: int | None) -> NDArray:
    """Return the variance over the first axis (0) or all axes (None). Uses little memory."""
    kept = x.shape[1:] if axis == 0 else ()
    sums, squares, mean = np.zeros(kept), np.zeros(kept), x[0].mean(dtype=np.float64)
    for rows in split_rows(x):
        block = x[rows] - mean
        sums, squares = sums + block.sum(axis), squares + np.square(block).sum(axis)
    count = len(x) if axis == 0 else x.size
    return squares / count - np.square(sums / count)


def hardly_differs(output: NDArray, step: float) -> bool:
    """Returns True if an output varies by at most `FEW_STEPS` steps between examples."""
    return len(output) > 1 and bool(np.var(output, 0).max() ** 0.5 <= FEW_STEPS * step)


class SignalToNoise:
    """Measures the ratio of a tensor's signal to its quantization noise over several batches.

    The signal is the variance over the examples, because a constant carries no information. For a
    single example, the signal is the variance over the entries.
    """

    def __init__(self) -> None:
        self._examples = self._size = 0
        self._sums: NDArray = np.zeros(0)
        self._power = self._noise = 0.0

    def add(self, exact: NDArray, values: NDArray, dequantize: Dequantize = np.asarray) -> None:
        """Adds a batch of float values, and the same values with quantization.

        A smaller last batch is ignored if the first axis of the tensor is not the batch.
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
        """The standard deviation over the examples: the root mean square of all entries."""
        return float((self._signal / self._size) ** 0.5)

    @property
    def in_decibels(self) -> float | None:
        """The ratio in dB, at most 150. None without a signal, or if the ratio is not finite."""
        signal = self._signal
        if not signal or not np.isfinite([signal, self._noise]).all():
            return None
        noise = max(self._noise, signal * 10 ** (-MOST / 10))
        return float(10 * np.log10(signal / noise))


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Comparison of the quantized values of one tensor.

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
            is the variance of the float model's output over the examples. None if the examples
            hardly differ, or if all probabilities are nearly the same.
        float_argmax_agreement: `argmax_agreement` of the file and the float model.
        accuracy: share of examples that the file classifies correctly. None without labels, and for
            targets that are not classes.
        float_accuracy: share of examples that the float model classifies correctly.
        float_examples: number of examples for `float_sqnr` and `float_argmax_agreement`. None means
            all examples.
        use: the purpose of the output: "classes", "decisions" (yes or no), "signals" (like the
            input), "values", "embeddings", or "classes or values" if unknown.
        same_decisions: share of classes, decisions or nearest neighbours that agree with the float
            model. If many rare decisions change, it is the share of the rare decisions. None
            without decisions, or if all decisions are the same.
        decisions: number of decisions for `same_decisions`.
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
        """Returns a sentence about the cost of quantization, or "" if nothing was measured."""
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
        layers: all layers between the previous tensors of the report and this tensor.
        kernels: the file's operators that compute the tensor. An input has none.
        fed: agreement if the operators read the model's values. Earlier operators then have no
            influence. None for an input.
        run: agreement in a free run of the file.
        simulated: share of the free run's values that equal the result of `keras_qat.simulate` for
            these kernels. Only the first examples count. If the share is 1, only rounding differs
            from the model. None with the optimized kernels, and for float tensors.
        scale: float value of one step in the model. None if only the file quantizes the tensor.
        zero_point: the quantized value of 0 in the model, as int8 or int16.
        file_scale, file_zero_point: the scale and zero point in the file.
        scale_ulps: distance of the scales in units in the last place of float32.
        same_range: whether the zero points are equal, and the scales are equal up to rounding.
        at_lowest, at_highest: share of the file's values at either end of the range. After a ReLU,
            the lowest value is zero and does not indicate clipping.
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
        """Whether at most 0.1 % of the values differ, and by at most 1 LSB."""
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
        """Share of values that may be clipped: values at the range's ends except a ReLU's 0."""
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
    """Joins up to eight names, and counts further names."""
    names = list(names)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
