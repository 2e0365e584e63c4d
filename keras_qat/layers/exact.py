"""What kernels give at inference, step for step, in place of what training computes.

Training rounds real numbers to the nearest step. Kernels compute with whole numbers and round in
ways of their own. At inference the quantization-aware model computes as they do: with 8 bits as
XNNPACK, which runs on phones and desktops, with 16 as TFLite's reference kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from keras_qat.branching import cond, straight_through, with_gradient_of
from keras_qat.integer_kernels.grid import Grid, carry_steps, kept, steps_of
from keras_qat.integer_kernels.int8 import INT8_KERNELS
from keras_qat.integer_kernels.int16 import INT16_KERNELS
from keras_qat.kinds import ceiling_of, is_known
from keras_qat.layers import bias as bias_lib
from keras_qat.layers import int8, int16
from keras_qat.layers.scheduled import Phase, infers

__all__ = [
    "KERNELS",
    "NEAREST",
    "Source",
    "has_kernel",
    "input_step",
    "merge_result",
    "nearest",
    "with_rounded_bias",
    "wrapper_result",
]


class Source(NamedTuple):
    """What computes a tensor that a `Quantize` layer rounds.

    `kind`: its kernel, as in `kinds.kind_of`. `call`: what that computes. `activation`: that
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


Simulated = Callable[[Any], Any]
"""What training computes from a layer's input: in real numbers, rounded to the nearest step."""

NEAREST = "nearest"
"""In place of a kernel: what a `Quantize` layer rounds that is no kernel's result."""

KERNELS = {
    8: INT8_KERNELS,
    16: {kind: _in_int16(kernel) for kind, kernel in INT16_KERNELS.items()},
}
"""Bits of activations -> kernels of layers without weights."""

DTYPES = {8: tf.float32, 16: tf.float64}
"""Bits of activations -> what holds their steps, and the sums of products of them."""


def has_kernel(wrapper: Any, call: int = 0) -> bool:
    """Whether a kernel computes a call of a wrapper from one known grid to another.

    int16 kernels do so of wrappers that have the same grids in all calls, as the steps of the
    weights follow from them.
    """
    ends = wrapper.ends.get(call, (None, None))
    if any(each is None or each.spec.bits not in KERNELS for each in ends):
        return False
    if ends[0].spec.bits != ends[1].spec.bits or not is_known(wrapper.layer):
        return False
    if ends[0].spec.bits == 16 and len(set(wrapper.ends.values())) > 1:
        return False
    if getattr(wrapper.layer, "data_format", None) == "channels_first":
        return False
    return int8.has_codes(wrapper)


def wrapper_result(wrapper: Any, call: int, inputs: Any, simulated: Simulated, phase: Phase) -> Any:
    """The result of a call of a wrapper, at inference that of its kernel."""
    if not has_kernel(wrapper, call):
        return simulated(inputs)
    before, after = wrapper.ends[call]
    bits = after.spec.bits

    def exact(grid: Grid, output: Grid) -> Any:
        steps = steps_of(inputs, before, grid, DTYPES[bits])
        if bits == 16:
            y = int16.computed(wrapper, steps, grid, output)
        else:
            least = grid.scale if len(wrapper.ends) == 1 else input_step(wrapper)
            y = int8.computed(wrapper, steps, grid, output, least)
        return output.clip(y, _ceiling(wrapper.activation))

    return at_inference([before, after], exact, inputs, simulated, phase)


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
        rounded = int8.weights(wrapper, grid_of(wrapper.input_quantizer).scale).bias
        return tf.zeros([1]) if bias is None else tf.cast(rounded - bias, x.dtype)

    applies = phase.quantizing
    if phase.training is not False:
        applies = tf.logical_and(applies, tf.logical_not(phase.training))
    added = cond(applies, difference, lambda: tf.zeros_like(difference()))
    if getattr(wrapper.layer, "data_format", None) == "channels_first":
        added = tf.reshape(added, [-1] + [1] * (len(wrapper.layer.kernel_size)))
    return x + added


def merge_result(
    source: Source,
    tensors: list[Any],
    quantizer: Any,
    inputs: Any,
    simulated: Simulated,
    phase: Phase,
) -> Any:
    """The quantized result of a layer without weights, at inference that of its kernel.

    Args:
        source: the layer.
        tensors: its inputs.
        quantizer: that of its result.
        inputs: its result.
        simulated: quantizes that.
        phase: that of the call.
    """
    bits = quantizer.spec.bits

    def exact(*grids: Grid) -> Any:
        *given, output = grids
        steps = [
            steps_of(each, owner, grid, DTYPES[bits])
            for each, owner, grid in zip(tensors, source.quantizers, given, strict=True)
        ]
        y = KERNELS[bits][source.kind](source.call, steps, given, output)
        return tf.ensure_shape(output.clip(y, _ceiling(source.activation)), inputs.shape)

    return at_inference([*source.quantizers, quantizer], exact, inputs, simulated, phase)


def nearest(quantizer: Any, inputs: Any, simulated: Simulated, phase: Phase) -> Any:
    """`inputs` rounded to the nearest step, as the caller of a file rounds its inputs.

    With 16 bits, float32 is too coarse for that.
    """

    def exact(output: Grid) -> Any:
        dtype = DTYPES[quantizer.spec.bits]
        return output.clip(tf.floor(tf.cast(inputs, dtype) / tf.cast(output.scale, dtype) + 0.5))

    return at_inference([quantizer], exact, inputs, simulated, phase)


def _ceiling(activation: Any) -> float | None:
    """Where a kernel clips for the ReLU merged into it, or None.

    One that ends elsewhere than at 6 is an ordinary one in the file.
    """
    if activation is None:
        return None
    return 6.0 if ceiling_of(activation) == 6 else math.inf


def grid_of(quantizer: Any) -> Grid:
    """The grid of a quantizer's present range."""
    minimum, maximum = quantizer.observe(None, training=False)
    return Grid.of(minimum, maximum, quantizer.spec.bits)


def input_step(wrapper: Any) -> Any:
    """The smallest step of a wrapper's input in all of its calls; None if one is not known."""
    quantizers = {before for before, _ in wrapper.ends.values()}
    if not quantizers or None in quantizers:
        return None
    return tf.reduce_min([grid_of(each).scale for each in quantizers])


def at_inference(
    quantizers: list[Any], exact: Callable[..., Any], x: Any, simulated: Simulated, phase: Phase
) -> Any:
    """`simulated(x)`; at inference, with all of some quantizers in use, what a kernel gives.

    Args:
        quantizers: those of the kernel's inputs, then of its output.
        exact: from their grids to steps.
        x: a tensor.
        simulated: what training computes from it; the gradient is its.
        phase: that of the call.
    """
    if phase.training is True or phase.quantizing is False:
        return simulated(x)
    ranges = [each.observe(None, training=False) for each in quantizers]
    applies = infers(phase, quantizers, ranges)
    found: list[Any] = []

    def values(x: Any) -> Any:
        # In a graph for inference alone a range stays as it is.
        grids = [kept(each, grid_of, applies is True) for each in quantizers]
        steps = exact(*grids)
        found.append(steps)
        return tf.cast(steps * tf.cast(grids[-1].scale, steps.dtype), x.dtype)

    if phase.training is not False:  # It may be training, which observes: once.
        y = simulated(x)
        exactly = tf.stop_gradient(cond(applies, lambda: values(x), lambda: tf.identity(y)))
        return straight_through(lambda y: exactly, y)
    y = with_gradient_of(
        lambda x: cond(applies, lambda: values(x), lambda: simulated(x)), simulated, x
    )
    if applies is True:
        carry_steps(y, found[0], quantizers[-1])
    return y
