"""Expands operations on complex numbers to operations on pairs of floats.

TFLite has no integer kernels for complex numbers. A Fourier transform becomes a product with
matrices of cosines and sines. Many audio models begin with operations on spectra, and then convert
the spectra to floats.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Generator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike, NDArray

from keras_qat.graph.calls import Call, Value, flatten_values, map_values
from keras_qat.graph.facts import solve
from keras_qat.graph.operations import MOVES, get_kind, is_operation
from keras_qat.helper_layers.elementwise_functions import Formula
from keras_qat.lowering.expand_call import CannotExpand, require, unwrap
from keras_qat.tracing.cannot_trace import TooLarge

Pair = tuple[Any, Any]
"""A complex tensor as (real part, imaginary part). An imaginary part of zeros is None."""

Transform = Callable[..., NDArray[Any]]
"""A function of `np.fft`, such as `np.fft.rfft`."""

Lengths = ArrayLike | None
"""The argument `fft_length` of a transform: an integer, or a list of one integer."""

LARGEST = 2**20
"""The maximum number of values in the matrix of a Fourier transform."""


class ComplexPart:
    """A part of the graph with float inputs, complex numbers in between, and float results.

    For example, `tf.abs(tf.signal.stft(x) * 2.0)` is a part with three calls and the float input
    `x`. Calling this object with a tensor for each float input runs the original operations.
    """

    def __init__(self, call: Call) -> None:
        self.end, self.name = call, call.layer.name
        self.calls = _list_complex_calls(call)
        read = dict.fromkeys(x for inner in self.calls for x in inner.inputs)
        self.floats = [value for value in read if not _is_complex(value)]

    def __call__(self, *tensors: tf.Tensor) -> tf.Tensor:
        return self._run(tensors, _call_layer)

    def compute_pairs(self, *tensors: tf.Tensor) -> tf.Tensor:
        """Compute the same results without complex tensors, on pairs of floats."""
        return self._run(tensors, _compute)

    def _run(
        self, tensors: tuple[tf.Tensor, ...], compute: Callable[[Call, Mapping[Value, Any]], Any]
    ) -> tf.Tensor:
        results: dict[Value, Any] = dict(zip(self.floats, tensors, strict=True))
        for call in self.calls:
            computed = compute(call, results)
            results.update(zip(flatten_values(call.outputs), computed, strict=True))
        return results[self.end.output]

    @property
    def has_kernels(self) -> bool:
        """Whether TFLite has float kernels for all operations. Then pairs are unnecessary."""
        kinds = {get_kind(call) for call in self.calls}
        return bool(kinds.intersection(OF_REAL)) and kinds <= HAVE_KERNELS

    @property
    def is_on_request(self) -> bool:
        """Whether the operations stay in float, but have integer kernels as pairs."""
        shapes = [(1, *value.shape[1:]) for value in self.floats]
        with contextlib.suppress(CannotExpand, TooLarge):
            known = self.has_kernels and not any(None in shape for shape in shapes)
            return known and self.compute_pairs(*map(tf.zeros, shapes)) is not None
        return False


def find_complex_part(call: Call) -> ComplexPart | None:
    """Return the `ComplexPart` with `call` as its last call. Return None if it is unsupported."""
    is_end = any(x.is_complex for x in call.inputs) and call.output.is_float
    if not is_end or not is_operation(call.layer):
        return None
    found = ComplexPart(call)
    return found if all(get_kind(inner) in KNOWN for inner in found.calls) else None


def _list_complex_calls(end: Call) -> list[Call]:
    calls: dict[Call, None] = {}

    def visit(call: Call) -> Generator[Call, Any, None]:
        yield from (x.producer for x in call.inputs if x.producer and _is_complex(x))
        calls[call] = None

    solve(end, visit)
    return list(calls)


def _is_complex(value: Value) -> bool:
    """Return True for a complex value, and for the zeros in `tf.complex(x, tf.zeros_like(x))`."""
    return value.producer is not None and (
        value.is_complex or get_kind(value.producer) == "zeros_like"
    )


def _call_layer(call: Call, results: Mapping[Value, Any]) -> list[Any]:
    args, kwargs = map_values(results.__getitem__, (call.args, call.kwargs))
    return tf.nest.flatten(call.layer(*args, **kwargs))


def _compute(call: Call, results: Mapping[Value, Any]) -> list[Any]:
    kind, values = get_kind(call), [x for x in call.inputs if x.is_complex]
    if kind == "zeros_like":
        return [(tf.zeros_like(results[values[0]][0]), None) if values else None]
    if kind not in SEPARABLE:
        args, kwargs = map_values(results.__getitem__, (call.args, dict(call.kwargs)))
        kwargs.pop("name", None)
        return [RULES[kind](*args, **kwargs)]
    real = _compute_separately(call, results, 0)
    has_imag = any(results[value][1] is not None for value in values)
    imag = _compute_separately(call, results, 1) if has_imag else [None] * len(real)
    return list(zip(real, imag, strict=True))


def _compute_separately(call: Call, results: Mapping[Value, Any], index: int) -> list[Any]:
    """Run a call on the real part (`index` 0) or imaginary part (`index` 1) of each input."""

    def select(value: Value) -> Any:
        pair = results[value]
        if not value.is_complex:
            return pair
        return tf.zeros_like(pair[0]) if pair[index] is None else pair[index]

    return _call_layer(call, {value: select(value) for value in call.inputs})


def _to_pair(x: Pair | ArrayLike | None) -> Pair:
    if isinstance(x, tuple):
        return x
    require(x is not None)
    constant = np.asarray(x)
    real, imag = (part.astype(np.float32) for part in (constant.real, constant.imag))
    return real, imag if imag.any() else None


def _cast(x: Pair | tf.Tensor, dtype: tf.DType) -> Any:
    if not isinstance(x, tuple):
        require(x is not None)
        return x, None
    return x if tf.as_dtype(dtype).is_complex else x[0]


def _join(real: tf.Tensor, imag: tf.Tensor) -> Pair:
    if real is None:
        return tf.zeros_like(imag), imag
    is_zero = imag is None or not (tf.is_tensor(imag) or np.any(imag))
    return real, None if is_zero else imag


def _multiply(x: Any, y: Any, product: Callable[[Any, Any], Any] = operator.mul) -> Pair:
    (a, b), (c, d) = _to_pair(x), _to_pair(y)

    def multiply(left: tf.Tensor, right: tf.Tensor) -> Any:
        return None if left is None or right is None else product(left, right)

    real, subtracted = multiply(a, c), multiply(b, d)
    real = real if subtracted is None else real + -subtracted
    first, second = multiply(a, d), multiply(b, c)
    return real, second if first is None else first if second is None else first + second


def _require_imag(x: Pair) -> tf.Tensor:
    require(x[1] is not None)
    return x[1]


def _magnitude(x: Pair) -> Any:
    """Compute sqrt(a^2 + b^2) as a * sqrt(1 + (b/a)^2) with a >= b. Squares need more bits."""
    real, imag = x
    if imag is None:
        return tf.abs(real)
    real, imag = tf.abs(real), tf.abs(imag)
    longer = tf.maximum(real, imag)
    ratio = tf.minimum(real, imag) / longer
    return longer * Formula('["sqrt", ["add", 1.0, ["multiply", "x", "x"]]]', name="sqrt")(ratio)


def _make_matrix(transform: Transform, size: int | None, *length: int) -> NDArray[Any]:
    """Return a matrix M with `x @ M` equal to the transform of `x` along its last axis."""
    size = unwrap(size)
    if (count := size * max([size, *length])) > LARGEST:
        raise TooLarge(
            f"a Fourier transform of {size} values needs a matrix of {count:,} values, more than "
            f"the limit of {LARGEST:,}. Use shorter frames, as in tf.signal.stft, or compute the "
            f"transform before the model"
        )
    return np.round(transform(np.eye(size), *length), 12) + 0.0  # Avoids negative zeros.


def _expand_transform(transform: Transform) -> Callable[..., Pair]:
    def multiply(input: Any, fft_length: Lengths = None) -> Pair:
        x = input if isinstance(input, tuple) else (input, None)
        lengths = [] if fft_length is None else map(int, np.ravel(fft_length))
        matrix = _make_matrix(transform, x[0].shape[-1], *lengths)
        return _multiply(x, matrix, tf.matmul)

    return multiply


def _stft(
    signals: tf.Tensor,
    frame_length: int,
    frame_step: int,
    fft_length: int | None = None,
    window_fn: Callable[..., Any] | None = tf.signal.hann_window,
    pad_end: bool = False,
) -> Pair:
    """Compute `tf.signal.stft` as a convolution with windowed cosines and sines."""
    *channels, size = signals.shape[1:]
    step, rows = int(frame_step), int(frame_length)
    require(None not in signals.shape[1:])
    signals = tf.reshape(signals, [-1, size]) if channels else signals
    # The default is the next power of two.
    length = 1 << (rows - 1).bit_length() if fft_length is None else int(fft_length)
    bins, used = length // 2 + 1, min(rows, length)
    waves = _make_matrix(np.fft.rfft, used, length)
    with tf.init_scope():
        window = window_fn(rows, dtype=tf.float32) if window_fn else np.ones(rows, np.float32)
    window = np.asarray(window)[:used, None]
    kernel = (np.concatenate([waves.real, waves.imag], 1) * window).astype(np.float32)
    if pad_end:
        missing = (-(-size // step) - 1) * step + rows - size
        signals = tf.pad(signals, [(0, 0), (0, max(0, missing))])
    frames = (signals.shape[-1] - rows) // step + 1
    signals = signals[:, : (frames - 1) * step + used, None]
    y = tf.nn.conv1d(signals, kernel[:, None], step, "VALID")
    y = tf.reshape(y, [-1, *channels, frames, 2 * bins]) if channels else y
    return y[..., :bins], y[..., bins:]


OF_REAL = ("stft", "rfft")
"""Fourier transforms of float tensors that have float kernels in TFLite."""

HAVE_KERNELS = {*OF_REAL, "abs", "real", "imag", "cast", "getitem"}
"""All operations on complex tensors that have float kernels in TFLite."""

RULES: dict[str, Callable[..., Any]] = {
    "cast": _cast,
    "complex": _join,
    "multiply": _multiply,
    "conj": lambda x: (x[0], None if x[1] is None else -x[1]),
    "fft": _expand_transform(np.fft.fft),
    "rfft": _expand_transform(np.fft.rfft),
    "stft": _stft,
    "real": lambda input: input[0],
    "imag": _require_imag,
    "abs": _magnitude,
    "angle": lambda input: tf.atan2(_require_imag(input), input[0]),
}
"""Maps a kind of operation to a function that computes it with a `Pair` for each complex tensor."""

SEPARABLE = MOVES.union(("pad", "reduce_mean", "reduce_sum"))
"""Operations that are computed for the real part, and then for the imaginary part."""

KNOWN = {*RULES, "zeros_like", *SEPARABLE}
