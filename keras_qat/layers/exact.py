"""What kernels give at inference, step for step, in place of what training computes.

Training rounds real numbers to the nearest step. Kernels compute with whole numbers and round in
ways of their own. At inference the quantization-aware model computes as they do: with 8 bits as
XNNPACK, which runs on phones and desktops, with 16 as TFLite's reference kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from keras_qat.branching import cond, straight_through
from keras_qat.grid import Grid, carry_steps, round_away, steps_of
from keras_qat.int8_kernels import INT8_KERNELS
from keras_qat.int16_kernels import INT16_KERNELS
from keras_qat.layers import bias as bias_lib
from keras_qat.layers import int8, int16
from keras_qat.layers.scheduled import Phase, infers
from keras_qat.patterns import ceiling_of, is_known

__all__ = [
    "KERNELS",
    "Source",
    "has_kernel",
    "merge_result",
    "nearest",
    "with_rounded_bias",
    "wrapper_result",
]


class Source(NamedTuple):
    """What computes a tensor that a `Quantize` layer rounds.

    `kind`: its kernel, as in `patterns.kind_of`. `call`: what that computes. `activation`: that
    merged into it, or None. `quantizers`: those of its inputs.
    """

    kind: str
    call: Any
    activation: Any
    quantizers: list[Any]


def _in_int16(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """An int16 kernel with the arguments of an int8 one."""

    def computed(call: Any, steps: list[Any], grids: list[Grid], output: Grid) -> Any:
        codes = [tf.cast(each, tf.int64) for each in steps]
        result = kernel(call, codes, [each.scale for each in grids], output.scale)
        return tf.cast(result, tf.float64)

    return computed


KERNELS = {
    8: INT8_KERNELS,
    16: {kind: _in_int16(kernel) for kind, kernel in INT16_KERNELS.items()},
}
"""Bits of activations -> kernels of layers without weights."""

DTYPES = {8: tf.float32, 16: tf.float64}
"""Bits of activations -> what holds their steps, and the sums of products of them."""


def has_kernel(wrapper: Any) -> bool:
    """Whether a kernel computes a wrapper from one known grid to another."""
    ends = wrapper.input_quantizer, wrapper.result_quantizer
    if any(each is None or each.spec.bits not in KERNELS for each in ends):
        return False
    if ends[0].spec.bits != ends[1].spec.bits or not is_known(wrapper.layer):
        return False
    if getattr(wrapper.layer, "data_format", None) == "channels_first":
        return False
    return int8.has_codes(wrapper)


def wrapper_result(wrapper: Any, inputs: Any, x: Any, phase: Phase) -> Any:
    """A wrapper's result `x`, at inference that of its kernel, with the gradient of `x`."""
    if not has_kernel(wrapper):
        return x
    before, after = wrapper.input_quantizer, wrapper.result_quantizer
    bits = after.spec.bits

    def exact(grid: Grid, output: Grid) -> Any:
        steps = steps_of(inputs, before, grid, DTYPES[bits])
        y = (int16 if bits == 16 else int8).computed(wrapper, steps, grid, output)
        return y if wrapper.activation is None else _clipped(wrapper.activation, y, output)

    return at_inference([before, after], exact, x, phase)


def with_rounded_bias(wrapper: Any, x: Any, phase: Phase) -> Any:
    """A layer's result `x`, at inference with the bias rounded as files hold it.

    For layers without an exact result, as what rounds them is not known. Small as it is against a
    step of the output, this rounding is the main cause of codes that differ.
    """
    if phase.training is True or wrapper.input_quantizer is None or has_kernel(wrapper):
        return x
    if not int8.has_codes(wrapper):
        return x

    def difference() -> Any:
        _, bias = bias_lib.factor_and_bias(wrapper, tf.float64)
        rounded = int8.weights(wrapper).bias
        return tf.zeros([1]) if bias is None else tf.cast(rounded - bias, x.dtype)

    applies = phase.quantizing
    if phase.training is not False:
        applies = tf.logical_and(applies, tf.logical_not(phase.training))
    added = cond(applies, difference, lambda: tf.zeros_like(difference()))
    if getattr(wrapper.layer, "data_format", None) == "channels_first":
        added = tf.reshape(added, [-1] + [1] * (len(wrapper.layer.kernel_size)))
    return x + added


def merge_result(source: Source, inputs: list[Any], quantizer: Any, x: Any, phase: Phase) -> Any:
    """The result `x` of a layer without weights, at inference that of its kernel.

    Args:
        source: the layer.
        inputs: its inputs.
        quantizer: that of its result.
        x: the result, fake-quantized.
        phase: that of the call.
    """
    bits = quantizer.spec.bits

    def exact(*grids: Grid) -> Any:
        *given, output = grids
        steps = [
            steps_of(each, owner, grid, DTYPES[bits])
            for each, owner, grid in zip(inputs, source.quantizers, given, strict=True)
        ]
        y = KERNELS[bits][source.kind](source.call, steps, given, output)
        return y if source.activation is None else _clipped(source.activation, y, output)

    return at_inference([*source.quantizers, quantizer], exact, x, phase)


def nearest(inputs: Any, quantizer: Any, x: Any, phase: Phase) -> Any:
    """`inputs` rounded to the nearest of 65 536 steps, for which float32 is too coarse."""

    def exact(output: Grid) -> Any:
        return tf.floor(tf.cast(inputs, tf.float64) / output.scale + 0.5)

    return at_inference([quantizer], exact, x, phase)


def _clipped(activation: Any, steps: Any, grid: Grid) -> Any:
    """A ReLU of steps. One that ends elsewhere than at 6 is an ordinary one in the file."""
    steps = tf.nn.relu(steps)
    if ceiling_of(activation) == 6:
        steps = tf.minimum(steps, tf.cast(round_away(6.0 / grid.scale), steps.dtype))
    return steps


def at_inference(quantizers: list[Any], exact: Callable[..., Any], x: Any, phase: Phase) -> Any:
    """`x`; at inference, with all of some quantizers in use, what a kernel gives in its place.

    Args:
        quantizers: those of the kernel's inputs, then of its output.
        exact: from their grids to steps, which may lie outside the range.
        x: what training computes; the gradient is its.
        phase: that of the call.
    """
    if phase.training is True or phase.quantizing is False:
        return x
    ranges = [each.observe(None, training=False) for each in quantizers]
    applies = infers(phase, quantizers, ranges)

    def steps() -> tuple[Any, Any]:
        grids = [
            Grid.of(minimum, maximum, each.spec.bits)
            for (minimum, maximum), each in zip(ranges, quantizers, strict=True)
        ]
        found = tf.stop_gradient(grids[-1].clip(exact(*grids)))
        y = found * tf.cast(grids[-1].scale, found.dtype)
        return found, tf.ensure_shape(tf.cast(y, x.dtype), x.shape)

    def replaced() -> tuple[Any, Any]:
        found, y = steps()
        return found, straight_through(lambda x: y, x)

    if applies is not True:
        return cond(applies, lambda: replaced()[1], lambda: tf.identity(x))
    found, y = replaced()
    carry_steps(y, found, quantizers[-1])
    return y
