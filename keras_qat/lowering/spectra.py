"""Spectra in real numbers: a Fourier transform is a product with cosines and one with sines.

TFLite has complex numbers in float only. Here they are pairs of tensors, from the operations that
make them to one that makes real numbers of them: a magnitude, a part, an angle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.frontend.graph import Call, Value, map_values, values_in
from keras_qat.frontend.tf_operations import array, is_operation
from keras_qat.lowering.written_out import require

Pair = tuple[Any, Any]
"""Real and imaginary part; None for an imaginary part of zeros."""

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
            known[call.output] = _result(call, known)
        return known[self.end.output]

    @property
    def has_kernels(self) -> bool:
        """Whether TFLite computes it in float, as it does transforms of real numbers alone."""
        return any(_symbol(call) == "signal.stft" for call in self.inside)


def spectrum(call: Call) -> Spectrum | None:
    """Returns what a call computes of complex numbers that operations make; None for others."""
    is_end = any(x.is_complex for x in call.inputs) and call.output.is_float
    if not is_end or not is_operation(call.layer):
        return None
    found = Spectrum(call)
    return found if all(_symbol(inner) in RULES for inner in found.inside) else None


def _is_inside(value: Value) -> bool:
    """Returns whether a value is complex, or zeros that stand for an imaginary part."""
    return value.producer is not None and (value.is_complex or _symbol(value.producer) in ZEROS)


def _symbol(call: Call) -> str:
    return str(getattr(call.layer, "symbol", ""))


def _result(call: Call, known: Mapping[Value, Any]) -> Any:
    rule = RULES[_symbol(call)]
    if _symbol(call) in ZEROS:
        return None
    if rule is None:  # It moves numbers, or changes nothing.
        parts = [_with_part(call, known, index) for index in (0, 1)]
        return tuple(part and call.layer(*part[0], **part[1]) for part in parts)
    args, kwargs = map_values(known.__getitem__, (call.args, call.kwargs))
    return rule(*args, **kwargs)


def _with_part(call: Call, known: Mapping[Value, Any], index: int) -> Any:
    """Returns the arguments of a call with one part of its complex input; None if it has none."""
    (value,) = (x for x in call.inputs if x.is_complex)
    if known[value][index] is None:
        return None
    parts = {**known, value: known[value][index]}
    return map_values(parts.__getitem__, (call.args, call.kwargs))


def _cast(x: Any, dtype: Any, name: Any = None) -> Any:
    if not isinstance(x, tuple):
        require(x is not None)
        return x, None
    return x if tf.as_dtype(dtype).is_complex else x[0]


def _pair(real: Any, imag: Any, name: Any = None) -> Pair:
    require(real is not None)
    constant = array(imag)
    return real, imag if constant is None or constant.any() else None


def _waves(size: int, bins: int, length: int) -> Pair:
    """Returns cosines and negative sines: a row for each number, a column for each frequency."""
    require(size * bins <= LARGEST)
    steps = np.outer(np.arange(size), np.arange(bins)) % length
    waves = np.round(np.exp(-2j * np.pi / length * steps), 12) + 0.0  # Zeros have no sign.
    return waves.real.astype(np.float32), waves.imag.astype(np.float32)


def _fft(input: Pair, name: Any = None) -> Pair:
    (real, imag), size = input, input[0].shape[-1]
    require(size is not None)
    cosines, sines = _waves(size, size, size)
    if imag is None:
        return tf.matmul(real, cosines), tf.matmul(real, sines)
    return (
        tf.matmul(real, cosines) - tf.matmul(imag, sines),
        tf.matmul(real, sines) + tf.matmul(imag, cosines),
    )


def _fft2d(input: Pair, name: Any = None) -> Pair:
    return _turned(_fft(_turned(_fft(input))))


def _turned(x: Pair) -> Pair:
    real, imag = (tf.transpose(part, [*range(len(part.shape) - 2), -1, -2]) for part in x)
    return real, imag


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
    size, step, rows = signals.shape[-1], int(frame_step), int(frame_length)
    require(len(signals.shape) == 2 and size is not None)
    length = 1 << (rows - 1).bit_length() if fft_length is None else int(fft_length)
    bins, window = length // 2 + 1, np.ones(rows, np.float32)
    if window_fn is not None:
        with tf.init_scope():
            window = np.asarray(window_fn(rows, dtype=tf.float32))
    used = min(rows, length)
    kernel = np.concatenate(_waves(used, bins, length), 1) * window[:used, None]
    if pad_end:
        signals = tf.pad(
            signals, [(0, 0), (0, max(0, (-(-size // step) - 1) * step + rows - size))]
        )
    frames = (signals.shape[-1] - rows) // step + 1
    signals = signals[:, : (frames - 1) * step + used, None]
    y = tf.nn.conv1d(signals, kernel[:, None], step, "VALID")
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


def _part(index: int) -> Callable[..., Any]:
    def part(input: Pair, name: Any = None) -> Any:
        require(input[index] is not None)
        return input[index]

    return part


ZEROS = ("zeros_like", "compat.v1.zeros_like")
"""Operations that give an imaginary part of zeros."""

RULES: dict[str, Any] = {
    "cast": _cast,
    "dtypes.complex": _pair,
    "complex": _pair,
    "signal.fft": _fft,
    "signal.fft2d": _fft2d,
    "signal.stft": _stft,
    "math.abs": _magnitude,
    "math.angle": _angle,
    "math.real": _part(0),
    "math.imag": _part(1),
    **dict.fromkeys(ZEROS),
    **dict.fromkeys(
        ("__operators__.getitem", "expand_dims", "squeeze", "transpose", "reshape", "identity")
    ),
}
"""TensorFlow's name of an operation -> what it computes of pairs; None for those that move them."""
