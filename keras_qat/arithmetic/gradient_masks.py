"""Masks for the gradients of quantizers on a CPU: elements within the range pass the gradient.

One operation looks at each element once. XLA does not support that operation, and a GPU would wait
for ends that it has computed itself, because the operation reads them from the host's memory. There
quantizers keep a mask of elements (`plain_operations`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.plain_operations import BEYOND, TINY, Scalar, are_numbers, nudged_range

Mask = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
"""Function of the upstream gradient and a tensor, which returns the gradient or zeros."""

OfScalars = Callable[..., tuple[tf.Tensor, ...]]
"""Function of scalars, or of vectors with the same length, that returns a tuple of the same."""


@dataclasses.dataclass(eq=False)
class _Request:
    scalars: tuple[Scalar | bool, ...]
    graph: tf.Graph | None
    results: tuple[tf.Tensor, ...] | None = None


class SharedFunction:
    """A function of scalars that computes its results for all callers with the same operations.

    Launching many operations on scalars costs more than computing them. Callers that ask early and
    need the result late, such as gradients, share operations.
    """

    def __init__(self, function: OfScalars) -> None:
        self._function = function
        self._waiting: list[_Request] = []

    def request(self, *scalars: Scalar | bool) -> Callable[[], tuple[tf.Tensor, ...]]:
        """Returns a function that returns the results for some scalars.

        Its first call computes the results of all requests in the same graph so far.
        """
        request = _Request(scalars, _get_graph())
        self._waiting.append(request)
        return partial(self._find_results, request)

    def _find_results(self, request: _Request) -> tuple[tf.Tensor, ...]:
        if _get_graph() is not request.graph or request.graph is None:
            return self._function(*request.scalars)
        if request.results is None:
            requests = [waiting for waiting in self._waiting if waiting.graph is request.graph]
            self._waiting = [waiting for waiting in self._waiting if waiting not in requests]
            rows = (waiting.scalars for waiting in requests)
            all_results = apply_to_rows(self._function, *rows)
            for waiting, results in zip(requests, all_results, strict=True):
                waiting.results = results
        assert request.results is not None
        return request.results


def apply_to_rows(
    function: OfScalars, *rows: tuple[Scalar | bool, ...]
) -> list[tuple[tf.Tensor, ...]]:
    """Applies a function to rows of scalars with operations on vectors; returns rows of results."""
    if len(rows) == 1:
        return [function(*rows[0])]
    first, *others = zip(*rows, strict=True)
    vectors = function(tf.stack(first), *map(_as_column, others))
    results = (tf.unstack(vector, len(rows)) for vector in vectors)
    return list(zip(*results, strict=True))


def _as_column(scalars: tuple[Scalar | bool, ...]) -> tf.Tensor | Scalar:
    """Stacks scalars, unless all are the same object."""
    first = scalars[0]
    return first if all(scalar is first for scalar in scalars) else tf.stack(scalars)


def _get_graph() -> tf.Graph | None:
    """Returns the graph that is being traced, or None in eager mode."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


class Gates:
    """Computes the ends of quantizers' ranges for gradients, for all quantizers at once."""

    def __init__(self) -> None:
        self.find_relu_end = SharedFunction(find_relu_end)
        self.find_range_ends = SharedFunction(find_range_ends)


def mask_of_range(
    minimum: Scalar,
    maximum: Scalar,
    bits: int,
    narrow_range: bool,
    gates: Gates,
    on: bool | tf.Tensor = True,
) -> Mask:
    """Returns the mask of elements in a range, which is nudged.

    Args:
        minimum, maximum: the range.
        bits, narrow_range: as in `QuantSpec`.
        gates: shared with other quantizers.
        on: True, or a scalar tensor. If it is false, all elements pass.
    """
    nudging = minimum, maximum, float(bits), float(narrow_range)
    if not are_numbers(minimum, maximum):
        ends = gates.find_range_ends.request(*nudging, on)
        return lambda upstream, x: _zero_outside(upstream, x, *ends())
    return lambda upstream, x: _zero_outside(upstream, x, *find_range_ends(*nudging, on))


def mask_of_relu(
    maximum: Scalar, ceiling: float, gates: Gates, on: bool | tf.Tensor = True
) -> Mask:
    """Returns the mask of elements above zero, up to `maximum`, and below the `ceiling`.

    Args:
        maximum: upper end of the range of a ReLU.
        ceiling: upper end of the ReLU.
        gates: shared with other quantizers.
        on: True, or a scalar tensor. If it is false, all elements below the ceiling pass.
    """
    # A ReLU has no gradient at its upper end.
    last = float(np.nextafter(np.float32(ceiling), np.float32(0)))
    ends = maximum, last, on
    is_number = isinstance(maximum, float)
    gate = partial(find_relu_end, *ends) if is_number else gates.find_relu_end.request(*ends)
    return lambda upstream, x: _zero_outside(upstream, x, *gate())


def zero_outside_range(
    gradient: tf.Tensor,
    x: tf.Tensor,
    minimum: Scalar,
    maximum: Scalar,
    bits: int,
    narrow_range: bool,
) -> tf.Tensor:
    """Returns a gradient if `x` is in a range, else zero, without gates.

    The operation that rounds clips infinity to the ends, which are the same to the last bit.
    """
    ends = tf.quantization.fake_quant_with_min_max_vars(
        [math.inf, -math.inf], minimum, maximum, bits, narrow_range
    )
    return _zero_outside(gradient, x, *tf.unstack(ends * BEYOND))


def apply_mask(mask: Mask, upstream: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Applies a mask in float32, and returns the gradient in the type of `upstream`."""
    if x.dtype != tf.float32:
        with tf.control_dependencies([upstream]):  # Otherwise the forward pass would keep the cast.
            x = tf.identity(x)
    gradient = mask(tf.cast(upstream, tf.float32), tf.cast(x, tf.float32))
    return tf.cast(gradient, upstream.dtype)


def _zero_outside(upstream: tf.Tensor, x: tf.Tensor, high: Scalar, low: Scalar = TINY) -> tf.Tensor:
    """Returns `upstream` if `x` is from `low` to `high`, else zero.

    The gradient of another rounding operation does so in one pass. A mask would need four: two
    comparisons, their conjunction and a selection.
    """
    low, high = (tf.cast(end, tf.float32) for end in (low, high))
    return tf.raw_ops.QuantizeAndDequantizeV4Grad(
        gradients=upstream, input=x, input_min=low, input_max=high
    )[0]


def find_relu_end(high: Scalar, last: Scalar, on: bool | tf.Tensor = True) -> tuple[Scalar]:
    """Returns the largest value that passes the gradient of a range from zero, after a ReLU.

    Args:
        high: upper end of the range, which passes, as does a millionth beyond it.
        last: the last value below the upper end of the ReLU.
        on: whether the range counts, or only the ReLU.
    """
    least = min if isinstance(high, float) else tf.minimum
    end = least(high * BEYOND, last)
    return (end if on is True else tf.where(on, end, last),)


def find_range_ends(
    minimum: Scalar,
    maximum: Scalar,
    bits: Scalar,
    narrow_range: Scalar,
    on: bool | tf.Tensor = True,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the largest and the smallest value that pass the gradient of a range.

    They are a millionth beyond the ends of the nudged range, or infinite if it is not `on`.
    """
    low, high = nudged_range(minimum, maximum, bits, narrow_range)
    ends = high * BEYOND, low * BEYOND
    if on is True:
        return ends
    return tf.where(on, ends[0], math.inf), tf.where(on, ends[1], -math.inf)
