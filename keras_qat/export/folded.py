"""A wrapper's weights as the runtime holds them: BatchNormalization folded, on their levels."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from keras_qat import fake_quant
from keras_qat.layers import QuantizeWeights, exact, int8, int16
from keras_qat.layers.bias import factor_and_bias
from keras_qat.layers.int8 import INT8_MAX
from keras_qat.schedule import scheduled_layers

__all__ = ["Folded", "fold", "scales_of_float_layers", "whole_steps"]


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
        placeholder: whether TFLite's converter gets a placeholder for the kernel.
    """

    name: str
    kernel: np.ndarray
    limits: np.ndarray | None
    bias: np.ndarray | None
    rounding: float = 0.0
    bias_codes: np.ndarray | None = None
    placeholder: bool = False


def fold(wrapper: Any) -> Folded:
    """Folds the BatchNormalization of a wrapper into its kernel and bias."""
    if exact.has_kernel(wrapper) and wrapper.ends[0][0].spec.bits == 16:
        return _fold_int16(wrapper)
    if int8.has_codes(wrapper):
        return _fold_int8(wrapper)
    factor, bias = (None if each is None else each.numpy() for each in factor_and_bias(wrapper))
    ((name, axes),) = wrapper.weight_axes.items()
    kernel = getattr(wrapper.layer, name).numpy()
    if factor is not None:
        factor = factor.reshape(
            [kernel.shape[axis] if axis in axes else 1 for axis in range(-kernel.ndim, 0)]
        )
        kernel = kernel * factor
    quantizer = wrapper.weight_quantizers.get(name)
    if quantizer is None:
        return Folded(name, kernel, None, bias)
    kernel, scale, rounding = _in_int8(*_codes_of_range(kernel, quantizer), axes)
    limits = (INT8_MAX * scale).astype(np.float32)
    return Folded(name, kernel.astype(np.float32), limits, bias, rounding)


def _fold_int8(wrapper: Any) -> Folded:
    """The weights as the layer itself computes with them at inference."""
    found = int8.weights(wrapper, exact.input_step(wrapper))
    codes, steps, bias = (None if each is None else each.numpy() for each in found)
    return _folded(wrapper, codes, steps, bias)


def _folded(wrapper: Any, codes: Any, steps: Any, bias: Any) -> Folded:
    if not wrapper.weight_axes:
        codes, steps = (each.reshape(1, 1, -1, 1) for each in (codes, steps))
    kernel, limits = (each.astype(np.float32) for each in (codes * steps, INT8_MAX * steps))
    bias = None if bias is None else bias.astype(np.float32)
    return Folded(next(iter(wrapper.weight_axes), ""), kernel, limits, bias)


def _fold_int16(wrapper: Any) -> Folded:
    """The same for an int16 kernel."""
    before, after = (exact.grid_of(each).scale for each in wrapper.ends[0])
    weights = int16.weights(wrapper, before, after)
    codes, steps = weights.codes.numpy(), weights.steps.numpy()
    if weights.bias is None:
        return _folded(wrapper, codes, steps, None)
    whole = weights.bias.numpy()
    products = float(before) * (steps.reshape(whole.shape) if steps.size > 1 else steps.item())
    folded = _folded(wrapper, codes, steps, whole * products)
    return dataclasses.replace(folded, bias_codes=whole.astype(np.int64))


def _codes_of_range(kernel: np.ndarray, quantizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """Codes of the folded kernel in the range that training stored, zero being code 0."""
    spec = quantizer.spec
    minimum, maximum = quantizer.current_range(kernel)
    values = fake_quant.fake_quantize(kernel, minimum, maximum, spec.bits, spec.narrow_range)
    steps = 2**spec.bits - (2 if spec.narrow_range else 1)
    scale = (float(maximum) - float(minimum)) / steps
    return np.round(values.numpy() / scale), np.full([1] * kernel.ndim, scale)


def _in_int8(
    codes: np.ndarray, scale: np.ndarray, axes: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, float]:
    """Kernel values and scale per channel with codes of at most 127.

    TFLite's int8 kernels have no zero point for weights. A channel of an asymmetric 8-bit kernel
    that reaches past 127 steps gets wider ones, and its weights are rounded to them. Where codes
    are small, as with fewer bits, steps become a whole number of times finer: the weights stay,
    and the bias, which TFLite rounds to input scale times weight scale, is rounded less.
    """
    reduced = tuple(axis for axis in range(-codes.ndim, 0) if axis not in axes)
    highest = np.max(np.abs(codes), axis=reduced, keepdims=True)
    widening = np.maximum(highest / INT8_MAX, 1.0)
    rounded = np.round(codes / widening) * widening
    finer = np.maximum(INT8_MAX // np.maximum(highest, 1.0), 1.0)
    return rounded * scale, scale * widening / finer, float(np.max(np.abs(rounded - codes)))


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
        kernel = wrapper.weight(path)
        limits = fake_quant.channel_limits(kernel, quantizer.channel_axes)
        scale = limits.numpy() / np.float32(2 ** (quantizer.spec.bits - 1) - 1)
        values = fake_quant.fake_quantize_channels(kernel, limits, quantizer.spec.bits)
        found[path] = np.round(values.numpy() / scale), np.float32(scale.item())
    return found
