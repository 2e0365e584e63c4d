"""Spectra in real numbers: a Fourier transform is a product with cosines and one with sines.

TFLite has complex numbers in float only. Here they are pairs of tensors, from the operations that
make them to one that makes real numbers of them: a magnitude, a part, an angle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Value, map_values, values_in
from keras_qat.graph.operations import is_operation, kind_of
from keras_qat.lowering.complex_numbers import ARITHMETIC, PARTWISE, Pair, matmul
from keras_qat.lowering.expand_call import require
from keras_qat.tracing.cannot_trace import TooLarge

LARGEST = 2**20
"""Matrices with more numbers are not written out."""


class Spectrum:
    """A call that makes real numbers of complex ones, with all complex operations in front of it.

    As a function of the real numbers that those read, `reals`, it computes with the operations.
    """

    def __init__(self, call: Call) -> None:
        self.end, self.name = call, call.layer.name
        behind: list[Any] = [call]
        for inner in behind:
            behind += [x.producer for x in inner.inputs if _is_inside(x)]
        self.inside = list(dict.fromkeys(reversed(behind)))
        reads = dict.fromkeys(x for inner in self.inside for x in inner.inputs)
        self.reals = [value for value in reads if not _is_inside(value)]

    def __call__(self, *numbers: Any) -> Any:
        known = dict(zip(self.reals, numbers, strict=True))
        for call in self.inside:
            args, kwargs = map_values(known.__getitem__, (call.args, call.kwargs))
            results = tf.nest.flatten(call.layer(*args, **kwargs))
            known.update(zip(values_in(call.outputs), results, strict=True))
        return known[self.end.output]

    def in_pairs(self, *numbers: Any) -> Any:
        """Computes the same in real numbers alone.

        Raises:
            NotImplementedError: if an operation is not among those that are known.
        """
        known: dict[Value, Any] = dict(zip(self.reals, numbers, strict=True))
        for call in self.inside:
            known.update(zip(values_in(call.outputs), _results(call, known), strict=True))
        return known[self.end.output]

    @property
    def has_kernels(self) -> bool:
        """Whether TFLite computes it in float, as it does transforms of real numbers alone."""
        kinds = {kind_of(call) for call in self.inside}
        return bool(kinds.intersection(OF_REAL)) and kinds <= HAVE_KERNELS


def spectrum(call: Call) -> Spectrum | None:
    """Returns what a call computes of complex numbers that operations make; None for others."""
    is_end = any(x.is_complex for x in call.inputs) and call.output.is_float
    if not is_end or not is_operation(call.layer):
        return None
    of_call = Spectrum(call)
    return of_call if all(kind_of(inner) in KNOWN for inner in of_call.inside) else None


def _is_inside(value: Value) -> bool:
    """Returns whether a value is complex, or zeros that stand for an imaginary part."""
    return value.producer is not None and (
        value.is_complex or kind_of(value.producer) == "zeros_like"
    )


def _results(call: Call, known: Mapping[Value, Any]) -> list[Any]:
    """Returns what a call gives: pairs in the place of complex numbers."""
    kind, values = kind_of(call), [x for x in call.inputs if x.is_complex]
    if kind == "zeros_like":
        return [(tf.zeros_like(known[values[0]][0]), None) if values else None]
    if kind not in PARTWISE:
        args, kwargs = map_values(known.__getitem__, (call.args, call.kwargs))
        return [RULES[kind](*args, **kwargs)]
    real = _moved(call, known, 0)
    has_imag = any(known[value][1] is not None for value in values)
    return list(zip(real, _moved(call, known, 1) if has_imag else [None] * len(real), strict=True))


def _moved(call: Call, known: Mapping[Value, Any], index: int) -> list[Any]:
    """Returns what a call gives for one part of its complex numbers."""

    def part(value: Value) -> Any:
        parts = known[value]
        if not value.is_complex:
            return parts
        return tf.zeros_like(parts[0]) if parts[index] is None else parts[index]

    args, kwargs = map_values(part, (call.args, call.kwargs))
    return tf.nest.flatten(call.layer(*args, **kwargs))


def _matrix(transform: Callable[..., np.ndarray], size: Any, *length: int) -> np.ndarray:
    """Returns the matrix of a transform along the last axis."""
    require(size is not None)
    if (count := size * max([size, *length])) > LARGEST:
        raise TooLarge(
            f"a Fourier transform of {size} values is a product with a matrix of {count:,} values, "
            f"of which at most {LARGEST:,} are written. Use shorter frames, such as tf.signal.stft "
            f"has, or compute the transform before the model"
        )
    return np.round(transform(np.eye(size), *length), 12) + 0.0  # Zeros have no sign.


def _transform(transform: Callable[..., np.ndarray]) -> Callable[..., Pair]:
    """Returns a Fourier transform along the last axis as a product with a matrix."""

    def along(input: Any, fft_length: Any = None, name: Any = None) -> Pair:
        x = input if isinstance(input, tuple) else (input, None)
        matrix = _matrix(transform, x[0].shape[-1], *_lengths(fft_length))
        if len(x[0].shape) > 1:
            return matmul(x, matrix)
        row = tuple(part if part is None else part[None] for part in x)  # As a weight may be.
        return tuple(part if part is None else part[0] for part in matmul(row, matrix))  # type: ignore[return-value]

    return along


def _to_real(input: Pair, fft_length: Any = None, name: Any = None) -> Any:
    """Computes `tf.signal.irfft`."""
    bins = input[0].shape[-1]
    lengths = _lengths(fft_length)
    units = (lambda x, *n: np.fft.irfft(x, *n), lambda x, *n: np.fft.irfft(1j * x, *n))
    products = [
        tf.matmul(part, _matrix(unit, bins, *lengths).astype(np.float32))
        for part, unit in zip(input, units, strict=True)
        if part is not None
    ]
    return sum(products[1:], products[0])


def _lengths(fft_length: Any) -> list[int]:
    return [] if fft_length is None else [int(length) for length in np.ravel(fft_length)]


def _in_two(last: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a transform along the last two axes: along the other one first if it gives pairs."""
    to_real = last is _to_real

    def along_both(input: Any, fft_length: Any = None, name: Any = None) -> Any:
        rows, columns = _lengths(fft_length) or (None, None)
        if to_real:
            return last(_turned(other(_turned(input), rows)), columns)
        return _turned(other(_turned(last(input, columns)), rows))

    return along_both


def _turned(x: Pair) -> Pair:
    rank = len(x[0].shape)
    order = [*range(rank - 2), rank - 1, rank - 2]
    real, imag = (None if part is None else tf.transpose(part, order) for part in x)
    return real, imag


def _inverse_stft(
    stfts: Pair,
    frame_length: Any,
    frame_step: Any,
    fft_length: Any = None,
    window_fn: Any = tf.signal.hann_window,
    name: Any = None,
) -> Any:
    rows = int(frame_length)
    length = 1 << (rows - 1).bit_length() if fft_length is None else int(fft_length)
    require(length >= rows)
    frames = _to_real(stfts, length)[..., :rows]
    return tf.signal.overlap_and_add(frames * _window(window_fn, rows), int(frame_step))


def _window(window_fn: Any, rows: int) -> np.ndarray:
    if window_fn is None:
        return np.ones(rows, np.float32)
    with tf.init_scope():
        return np.asarray(window_fn(rows, dtype=tf.float32))


def _stft(
    signals: Any,
    frame_length: Any,
    frame_step: Any,
    fft_length: Any = None,
    window_fn: Any = tf.signal.hann_window,
    pad_end: Any = False,
    name: Any = None,
) -> Pair:
    """Convolves a signal with the waves in their window."""
    *channels, size = signals.shape[1:]
    step, rows = int(frame_step), int(frame_length)
    require(None not in signals.shape[1:])
    signals = tf.reshape(signals, [-1, size]) if channels else signals
    length = 1 << (rows - 1).bit_length() if fft_length is None else int(fft_length)
    bins, used = length // 2 + 1, min(rows, length)
    waves = _matrix(np.fft.rfft, used, length)
    kernel = np.concatenate([waves.real, waves.imag], 1) * _window(window_fn, rows)[:used, None]
    kernel = kernel.astype(np.float32)
    if pad_end:
        signals = tf.pad(
            signals, [(0, 0), (0, max(0, (-(-size // step) - 1) * step + rows - size))]
        )
    frames = (signals.shape[-1] - rows) // step + 1
    signals = signals[:, : (frames - 1) * step + used, None]
    y = tf.nn.conv1d(signals, kernel[:, None], step, "VALID")
    y = tf.reshape(y, [-1, *channels, frames, 2 * bins]) if channels else y
    return y[..., :bins], y[..., bins:]


def _magnitude(x: Pair, name: Any = None) -> Any:
    """Computes the longer part times what the ratio of both adds, as squares take more bits."""
    real, imag = x
    if imag is None:
        return tf.abs(real)
    real, imag = tf.abs(real), tf.abs(imag)
    longer = tf.maximum(real, imag)
    ratio = tf.minimum(real, imag) / longer
    return longer * tf.sqrt(1.0 + ratio * ratio)


def _angle(input: Pair, name: Any = None) -> Any:
    require(input[1] is not None)
    return tf.atan2(input[1], input[0])


_FFT, _IFFT = _transform(np.fft.fft), _transform(np.fft.ifft)
_RFFT = _transform(np.fft.rfft)

OF_REAL = ("stft", "rfft", "rfft2d")
"""Transforms that TFLite computes in float."""

HAVE_KERNELS = {*OF_REAL, "abs", "real", "imag", "cast", "getitem"}
"""Operations on complex numbers of which TFLite has kernels."""

RULES: dict[str, Callable[..., Any]] = {
    **ARITHMETIC,
    "fft": _FFT,
    "ifft": _IFFT,
    "rfft": _RFFT,
    "irfft": _to_real,
    "fft2d": _in_two(_FFT, _FFT),
    "ifft2d": _in_two(_IFFT, _IFFT),
    "rfft2d": _in_two(_RFFT, _FFT),
    "irfft2d": _in_two(_to_real, _IFFT),
    "stft": _stft,
    "inverse_stft": _inverse_stft,
    "abs": _magnitude,
    "angle": _angle,
}
"""Kind of an operation -> what it computes of pairs."""

KNOWN = {*RULES, "zeros_like", *PARTWISE}
