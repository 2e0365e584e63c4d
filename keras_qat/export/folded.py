"""A wrapper's weights as the runtime holds them: BatchNormalization folded, on their levels."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from keras_qat import fake_quant
from keras_qat.int16_kernels import step_of
from keras_qat.layers import QuantizeWeights, int16
from keras_qat.layers.bias import factor_and_bias, least_weight_step, rounded_bias
from keras_qat.schedule import scheduled_layers

__all__ = ["Folded", "fold", "scales_of_float_layers", "whole_steps"]


INT8_MAX = 127
"""Largest code of a weight in TFLite, which leaves out -128."""


@dataclasses.dataclass(frozen=True)
class Folded:
    """The kernel and bias of one layer.

    Args:
        name: attribute of the kernel in the layer.
        kernel: float32, each value a whole number of its channel's steps.
        limits: 127 steps of each output channel, shaped to broadcast against `kernel`. None if
            the kernel is not quantized.
        bias: float32, one for each output channel, or None.
        rounding: the largest change of a weight, in steps of its training, because TFLite's codes
            end at 127: 0 but for wide asymmetric 8-bit ranges.
        bias_codes: the bias in whole steps of the products, int64, where an int16 kernel computes.
    """

    name: str
    kernel: np.ndarray
    limits: np.ndarray | None
    bias: np.ndarray | None
    rounding: float = 0.0
    bias_codes: np.ndarray | None = None


def fold(wrapper: Any) -> Folded:
    """Folds the BatchNormalization of a wrapper into its kernel and bias."""
    if int16.computes_in_int16(wrapper):
        return _fold_int16(wrapper)
    factor: Any
    factor, exact = factor_and_bias(wrapper)
    least: Any = least_weight_step(wrapper, exact).numpy().astype(np.float64)
    bias: Any = rounded_bias(wrapper)[1]
    factor, bias = (None if each is None else each.numpy() for each in (factor, bias))
    if not wrapper.weight_axes:
        return _affine(factor, bias, least)
    ((name, axes),) = wrapper.weight_axes.items()
    kernel = getattr(wrapper.layer, name).numpy()
    per_channel = [kernel.shape[axis] if axis in axes else 1 for axis in range(-kernel.ndim, 0)]
    factor = None if factor is None else factor.reshape(per_channel)
    least = least.reshape(per_channel) if least.ndim else least
    quantizer = wrapper.weight_quantizers.get(name)
    if quantizer is None:
        return Folded(name, kernel if factor is None else kernel * factor, None, bias)
    if quantizer.spec.per_channel:
        codes, scale = _codes_per_channel(kernel, axes, quantizer.spec.bits, factor)
    else:
        codes, scale = _codes_per_tensor(kernel, quantizer, factor)
    kernel, scale, rounding = _in_int8(codes, scale, axes, least)
    limits = (INT8_MAX * scale).astype(np.float32)
    return Folded(name, kernel.astype(np.float32), limits, bias, rounding)


def _fold_int16(wrapper: Any) -> Folded:
    """The weights as the layer itself computes with them at inference."""
    ends = wrapper.input_quantizer, wrapper.result_quantizer
    input_step, output_step = (step_of(*each.current_range()) for each in ends)
    weights = int16.weights(wrapper, input_step, output_step)
    codes, steps = (np.asarray(each) for each in (weights.codes, weights.steps))
    if not wrapper.weight_axes:
        codes, steps = (each.reshape(1, 1, -1, 1) for each in (codes, steps))
    kernel, limits = (each.astype(np.float32) for each in (codes * steps, INT8_MAX * steps))
    folded = Folded(next(iter(wrapper.weight_axes), ""), kernel, limits, None)
    if weights.bias is None:
        return folded
    whole = np.asarray(weights.bias)
    products = float(input_step) * (steps.reshape(whole.shape) if steps.size > 1 else steps.item())
    bias = (whole * products).astype(np.float32)
    return dataclasses.replace(folded, bias=bias, bias_codes=whole.astype(np.int64))


def _codes_per_channel(
    kernel: np.ndarray, axes: tuple[int, ...], bits: int, factor: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Q(a W) = a Q(W): the codes of the kernel as it is; the scales are multiplied by |a|."""
    limits = fake_quant.channel_limits(kernel, axes)
    scale = limits.numpy() / np.float32(2 ** (bits - 1) - 1)
    codes = np.round(fake_quant.fake_quantize_channels(kernel, limits, bits).numpy() / scale)
    scale = scale.astype(np.float64)
    if factor is None:
        return codes, scale
    # A channel that BatchNormalization switches off keeps its scale: all its codes are zero.
    return codes * np.sign(factor), scale * np.where(factor == 0, 1.0, np.abs(factor))


def _codes_per_tensor(
    kernel: np.ndarray, quantizer: Any, factor: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Codes of the folded kernel in the range that training stored, zero being code 0."""
    spec = quantizer.spec
    folded = kernel if factor is None else kernel * factor.astype(np.float32)
    minimum, maximum = quantizer.current_range(folded)
    values = fake_quant.fake_quantize(folded, minimum, maximum, spec.bits, spec.narrow_range)
    steps = 2**spec.bits - (2 if spec.narrow_range else 1)
    scale = (float(maximum) - float(minimum)) / steps
    return np.round(values.numpy() / scale), np.full([1] * kernel.ndim, scale)


def _in_int8(
    codes: np.ndarray, scale: np.ndarray, axes: tuple[int, ...], least: Any = 0.0
) -> tuple[np.ndarray, np.ndarray, float]:
    """Kernel values and scale per channel with codes of at most 127.

    TFLite's int8 kernels have no zero point for weights. A channel of an asymmetric 8-bit kernel
    that reaches past 127 steps gets wider ones, and its weights are rounded to them. Where codes
    are small, as with fewer bits, steps become a whole number of times finer: the weights stay,
    and the bias, which TFLite rounds to input scale times weight scale, is rounded less. No step
    is below `least`, with which the bias fits 32 bits; the few weights that this rounds are next
    to nothing against their bias.
    """
    reduced = tuple(axis for axis in range(-codes.ndim, 0) if axis not in axes)
    highest = np.max(np.abs(codes), axis=reduced, keepdims=True)
    widening = np.maximum(highest / INT8_MAX, 1.0)
    rounded = np.round(codes / widening) * widening
    rounding = float(np.max(np.abs(rounded - codes)))
    finer = np.maximum(INT8_MAX // np.maximum(highest, 1.0), 1.0)
    if np.any(least > 0):
        finest = np.divide(scale, least, out=np.full_like(finer, np.inf), where=least > 0)
        finer = np.clip(np.floor(finest), 1.0, finer)
    values, step = rounded * scale, scale * widening / finer
    narrow = step < least
    wide = np.where(narrow, least, 1.0)
    return (
        np.where(narrow, np.round(values / wide) * wide, values),
        np.maximum(step, least),
        rounding,
    )


def whole_steps(wrapper: Any) -> dict[str, np.ndarray]:
    """The weights of a `QuantizeWeights` on their levels, by path."""
    # As the runtime computes them from codes: in float32.
    return {path: codes * scale for path, (codes, scale) in _codes_by_path(wrapper).items()}


def scales_of_float_layers(model: Any) -> list[float]:
    """The steps of all weights that `QuantizeWeights` layers of a model hold in 8 bits."""
    layers = (layer for layer in scheduled_layers(model) if isinstance(layer, QuantizeWeights))
    return [float(scale) for layer in layers for _, scale in _codes_by_path(layer).values()]


def _codes_by_path(wrapper: Any) -> dict[str, tuple[np.ndarray, np.float32]]:
    found = {}
    for path, quantizer in wrapper.weight_quantizers.items():
        kernel, axes = wrapper.weight(path).numpy(), quantizer.channel_axes
        codes, scale = _codes_per_channel(kernel, axes, quantizer.spec.bits, None)
        found[path] = codes.astype(np.float32), np.float32(scale.item())
    return found


def _affine(factor: np.ndarray, bias: np.ndarray, least: np.ndarray) -> Folded:
    """A layer that multiplies and adds per channel, as a kernel [1, 1, channels, 1] and a bias.

    One weight per channel with a scale of its own is always exact.
    """
    kernel = factor.reshape(1, 1, -1, 1).astype(np.float64)
    codes, scale = np.sign(kernel) * INT8_MAX, np.abs(kernel) / INT8_MAX
    scale = np.where(kernel == 0, 1.0 / INT8_MAX, scale)
    least = least.reshape(1, 1, -1, 1) if least.ndim else least
    kernel, scale, _ = _in_int8(codes, scale, (-2,), least)
    return Folded("", kernel.astype(np.float32), (INT8_MAX * scale).astype(np.float32), bias)
