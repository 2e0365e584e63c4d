"""The weights of a wrapper as the runtime holds them: BatchNormalization folded, on their levels."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from keras_qat import fake_quant

__all__ = ["Folded", "fold"]


@dataclasses.dataclass(frozen=True)
class Folded:
    """The kernel and bias of one layer.

    Args:
        name: attribute of the kernel in the layer.
        kernel: float32, each value a whole number of steps.
        limits: largest value of each output channel in 127 steps (256 levels, narrow range);
            shaped to broadcast against `kernel`. None if the kernel is not quantized.
        bias: float32, one for each output channel, or None.
    """

    name: str
    kernel: np.ndarray
    limits: np.ndarray | None
    bias: np.ndarray | None


def fold(wrapper: Any) -> Folded:
    """Folds the BatchNormalization of a wrapper into its kernel and bias.

    Per channel, BatchNorm(conv(x, Q(W)) + b) = conv(x, a Q(W)) + a (b - mean) + beta with
    a = gamma / sqrt(variance + epsilon): the integer codes stay, the scales are multiplied.
    """
    layer, batch_norm = wrapper.layer, wrapper.batch_norm
    ((name, axes),) = wrapper.weight_axes.items()
    kernel = getattr(layer, name)
    limits = fake_quant.channel_limits(kernel, axes)
    levels = 2 ** (wrapper.weight_spec.bits - 1) - 1
    codes = np.round(
        fake_quant.fake_quantize_channels(kernel, limits, wrapper.weight_spec.bits).numpy()
        / (limits.numpy() / levels)
    )
    scale = limits.numpy().astype(np.float64) / levels
    bias = layer.bias.numpy().astype(np.float64) if layer.use_bias else None
    if batch_norm is not None:
        factor, offset = factor_and_offset(batch_norm)
        bias = (0.0 if bias is None else bias) * factor + offset
        factor = factor.reshape([kernel.shape[axis] if axis in axes else 1 for axis in _axes(kernel)])
        codes *= np.sign(factor)
        # A channel that BatchNormalization switches off keeps its scale: all its codes are zero.
        scale *= np.where(factor == 0, 1.0, np.abs(factor))
    return Folded(
        name,
        (codes * scale).astype(np.float32),
        (127 * scale).astype(np.float32),
        None if bias is None else bias.astype(np.float32),
    )


def factor_and_offset(batch_norm: Any) -> tuple[np.ndarray, np.ndarray]:
    """What BatchNormalization at inference multiplies by and adds, per channel, in float64."""
    mean, variance = (
        each.numpy().astype(np.float64)
        for each in (batch_norm.moving_mean, batch_norm.moving_variance)
    )
    factor = 1 / np.sqrt(variance + batch_norm.epsilon)
    if batch_norm.scale:
        factor = factor * batch_norm.gamma.numpy()
    offset = -mean * factor
    if batch_norm.center:
        offset = offset + batch_norm.beta.numpy()
    return factor, offset


def _axes(kernel: Any) -> range:
    return range(-len(kernel.shape), 0)
