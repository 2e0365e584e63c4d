"""Expands Fourier transforms to products with cosines and sines.

TFLite has no integer kernels for complex numbers. From the operations that create them to the one
that returns their magnitude, angle or a part, they become pairs of tensors. What the front ends of
audio models compute is supported: transforms, products and movements, but no other arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Value, flatten_values, map_values
from keras_qat.graph.operations import MOVES, get_kind, is_operation
from keras_qat.helper_layers.elementwise_functions import Formula
from keras_qat.lowering.expand_call import require
from keras_qat.tracing.cannot_trace import TooLarge

Pair = tuple[Any, Any]
"""Real and imaginary part; None for an imaginary part of zeros."""

LARGEST = 2**20
"""Most values of a matrix that is written to a file."""


class Spectrum:
    """A call that returns floats for complex numbers, with all complex operations before it.

    As a function of the floats that these read, `reals`, it computes with TensorFlow's operations.
    """

    def __init__(self, call: Call) -> None:
        self.end, self.name = call, call.layer.name
        before: list[Any] = [call]
        for inner in before:
            before += [x.producer for x in inner.inputs if _is_inside(x)]
        self.inside = list(dict.fromkeys(reversed(before)))
        reads = dict.fromkeys(x for inner in self.inside for x in inner.inputs)
        self.reals = [value for value in reads if not _is_inside(value)]

    def __call__(self, *tensors: Any) -> Any:
        known = dict(zip(self.reals, tensors, strict=True))
        for call in self.inside:
            args, kwargs = map_values(known.__getitem__, (call.args, call.kwargs))
            results = tf.nest.flatten(call.layer(*args, **kwargs))
            known.update(zip(flatten_values(call.outputs), results, strict=True))
        return known[self.end.output]

    def in_pairs(self, *tensors: Any) -> Any:
        """Computes the same with floats alone."""
        known: dict[Value, Any] = dict(zip(self.reals, tensors, strict=True))
        for call in self.inside:
            known.update(zip(flatten_values(call.outputs), _compute(call, known), strict=True))
        return known[self.end.output]

    @property
    def has_kernels(self) -> bool:
        """Whether TFLite computes it in float: it does so for transforms of real signals."""
        kinds = {get_kind(call) for call in self.inside}
        return bool(kinds.intersection(OF_REAL)) and kinds <= HAVE_KERNELS


def spectrum(call: Call) -> Spectrum | None:
    """Returns a call that reads complex numbers and returns floats, if it can be expanded."""
    is_end = any(x.is_complex for x in call.inputs) and call.output.is_float
    if not is_end or not is_operation(call.layer):
        return None
    found = Spectrum(call)
    return found if all(get_kind(inner) in KNOWN for inner in found.inside) else None


def _is_inside(value: Value) -> bool:
    """Returns whether a value is complex, or zeros that stand for an imaginary part."""
    return value.producer is not None and (
        value.is_complex or get_kind(value.producer) == "zeros_like"
    )


def _compute(call: Call, known: Mapping[Value, Any]) -> list[Any]:
    """Returns the results of a call, with pairs in place of complex tensors."""
    kind, values = get_kind(call), [x for x in call.inputs if x.is_complex]
    if kind == "zeros_like":
        return [(tf.zeros_like(known[values[0]][0]), None) if values else None]
    if kind not in PARTWISE:
        args, kwargs = map_values(known.__getitem__, (call.args, call.kwargs))
        return [RULES[kind](*args, **kwargs)]
    real = _compute_part(call, known, 0)
    has_imag = any(known[value][1] is not None for value in values)
    imag = _compute_part(call, known, 1) if has_imag else [None] * len(real)
    return list(zip(real, imag, strict=True))


def _compute_part(call: Call, known: Mapping[Value, Any], index: int) -> list[Any]:
    """Returns the results of a call for the real or for the imaginary part of its inputs."""

    def part(value: Value) -> Any:
        parts = known[value]
        if not value.is_complex:
            return parts
        return tf.zeros_like(parts[0]) if parts[index] is None else parts[index]

    args, kwargs = map_values(part, (call.args, call.kwargs))
    return tf.nest.flatten(call.layer(*args, **kwargs))


def _to_pair(x: Any) -> Pair:
    """Returns a pair unchanged, and a constant as a pair."""
    if isinstance(x, tuple):
        return x
    require(x is not None)
    constant = np.asarray(x)
    real, imag = (part.astype(np.float32) for part in (constant.real, constant.imag))
    return real, imag if imag.any() else None


def _cast(x: Any, dtype: Any, name: Any = None) -> Any:
    if not isinstance(x, tuple):
        require(x is not None)
        return x, None
    return x if tf.as_dtype(dtype).is_complex else x[0]


def _join(real: Any, imag: Any, name: Any = None) -> Pair:
    if real is None:
        return tf.zeros_like(imag), imag
    is_zero = imag is None or not (tf.is_tensor(imag) or np.any(imag))
    return real, None if is_zero else imag


def _multiply(x: Any, y: Any, name: Any = None) -> Pair:
    return _product(lambda a, b: a * b, x, y)


def _product(product: Callable[[Any, Any], Any], x: Any, y: Any) -> Pair:
    """Returns a product of complex tensors, given the product of two floats."""
    (a, b), (c, d) = _to_pair(x), _to_pair(y)

    def multiply(left: Any, right: Any) -> Any:
        return None if left is None or right is None else product(left, right)

    real, subtracted = multiply(a, c), multiply(b, d)
    real = real if subtracted is None else real + -subtracted
    first, second = multiply(a, d), multiply(b, c)
    return real, second if first is None else first if second is None else first + second


def _conjugate(x: Pair, name: Any = None) -> Pair:
    return x[0], None if x[1] is None else -x[1]


def _exp(x: Pair, name: Any = None) -> Pair:
    length, angle = tf.exp(x[0]), x[1]
    return (length, None) if angle is None else (length * tf.cos(angle), length * tf.sin(angle))


def _part(index: int) -> Callable[..., Any]:
    def take(input: Pair, name: Any = None) -> Any:
        require(input[index] is not None)
        return input[index]

    return take


def _magnitude(x: Pair, name: Any = None) -> Any:
    """Multiplies the larger part by a function of the ratio, because squares need more bits."""
    real, imag = x
    if imag is None:
        return tf.abs(real)
    real, imag = tf.abs(real), tf.abs(imag)
    longer = tf.maximum(real, imag)
    ratio = tf.minimum(real, imag) / longer
    return longer * Formula('["sqrt", ["add", 1.0, ["multiply", "x", "x"]]]', name="sqrt")(ratio)


def _angle(input: Pair, name: Any = None) -> Any:
    require(input[1] is not None)
    return tf.atan2(input[1], input[0])


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

    def multiply(input: Any, fft_length: Any = None, name: Any = None) -> Pair:
        x = input if isinstance(input, tuple) else (input, None)
        matrix = _matrix(transform, x[0].shape[-1], *_lengths(fft_length))
        if len(x[0].shape) > 1:
            return _product(tf.matmul, x, matrix)
        row = tuple(part if part is None else part[None] for part in x)  # As a weight may be.
        real, imag = _product(tf.matmul, row, matrix)
        return real[0], None if imag is None else imag[0]

    return multiply


def _lengths(fft_length: Any) -> list[int]:
    return [] if fft_length is None else [int(length) for length in np.ravel(fft_length)]


_FFT = _transform(np.fft.fft)


def _fft2d(input: Any, name: Any = None) -> Pair:
    return _swap_axes(_FFT(_swap_axes(_FFT(input))))


def _swap_axes(x: Pair) -> Pair:
    rank = len(x[0].shape)
    order = [*range(rank - 2), rank - 1, rank - 2]
    real, imag = (None if part is None else tf.transpose(part, order) for part in x)
    return real, imag


def _irfft(input: Pair, fft_length: Any = None, name: Any = None) -> Any:
    bins = input[0].shape[-1]
    lengths = _lengths(fft_length)
    units = (lambda x, *n: np.fft.irfft(x, *n), lambda x, *n: np.fft.irfft(1j * x, *n))
    products = [
        tf.matmul(part, _matrix(unit, bins, *lengths).astype(np.float32))
        for part, unit in zip(input, units, strict=True)
        if part is not None
    ]
    return sum(products[1:], products[0])


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
    frames = _irfft(stfts, length)[..., :rows]
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


OF_REAL = ("stft", "rfft", "rfft2d")
"""Transforms that TFLite computes in float."""

HAVE_KERNELS = {*OF_REAL, "abs", "real", "imag", "cast", "getitem"}
"""Operations on complex numbers that TFLite has kernels for."""

RULES: dict[str, Callable[..., Any]] = {
    "cast": _cast,
    "complex": _join,
    "multiply": _multiply,
    "conj": _conjugate,
    "exp": _exp,
    "fft": _FFT,
    "ifft": _transform(np.fft.ifft),
    "fft2d": _fft2d,
    "rfft": _transform(np.fft.rfft),
    "irfft": _irfft,
    "stft": _stft,
    "inverse_stft": _inverse_stft,
    "real": _part(0),
    "imag": _part(1),
    "abs": _magnitude,
    "angle": _angle,
}
"""Kind of an operation -> a function that computes the same with pairs."""

PARTWISE = MOVES.union(("fftshift", "ifftshift", "pad", "reduce_mean", "reduce_sum"))
"""Kinds that compute the real and the imaginary part in the same way, each by itself."""

KNOWN = {*RULES, "zeros_like", *PARTWISE}
