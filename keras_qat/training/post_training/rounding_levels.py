"""The two levels that each weight of a layer lies between."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_qat.arithmetic import fake_quant
from keras_qat.training.batch_norm import per_tensor_fold
from keras_qat.training.layers import QuantizeWrapper
from keras_qat.training.ranges.weight_limits import least_squares_limits


class Levels:
    """The weights of a wrapper as the level below each and the fraction of a step above that.

    Args:
        wrapper: a wrapper with one quantized weight.
        ranges: "mse" or "minmax", as `weights` of `learn_rounding`.
    """

    def __init__(self, wrapper: QuantizeWrapper, ranges: str) -> None:
        self.layer = wrapper.layer
        ((self.name, self.quantizer),) = wrapper.weight_quantizers.items()
        self.weights = getattr(self.layer, self.name)
        self.value = self.weights.numpy()
        axes, bits = self.quantizer.channel_axes, self.quantizer.spec.bits
        folded, self.factor = self.value, np.float32(1)
        if wrapper.fold == "per_tensor":  # The range is the folded kernel's.
            folded = per_tensor_fold.folded(wrapper).numpy()
            self.factor = per_tensor_fold.factors(wrapper).numpy()
        if ranges == "mse":
            limits = least_squares_limits(folded, axes, bits)
        else:
            limits = fake_quant.channel_limits(folded, axes).numpy()
        self.levels = 2 ** (bits - 1) - 1
        scale = limits / np.float32(self.levels)
        self.scale = scale / np.where(self.factor == 0, np.float32(1), self.factor)
        steps = np.clip(folded / scale, -self.levels, self.levels)
        # The largest weight of a channel sets the range, so it stays at the end.
        stays = np.abs(steps) >= self.levels * (1 - 1e-6)
        if self.quantizer.spec.preserve == "zeros":
            stays |= self.value == 0
        self.below = np.where(stays, np.round(steps), np.floor(steps)).astype(np.float32)
        self.share = np.where(stays, 0.0, steps - self.below).astype(np.float32)
        self.free = (~stays).astype(np.float32)

    def weights_at(self, up: Any) -> dict[str, Any]:
        """Returns the weight, by its attribute's name, `up` steps above the levels below."""
        return {self.name: (self.below + up) * self.scale}

    def settle(self, up: np.ndarray) -> None:
        """Moves the weights `up` steps above the levels below."""
        moved = self.weights_at(up)[self.name]
        self.weights.assign(np.where(self.factor == 0, self.value, moved))
        self.quantizer.set_limits(self.scale * np.float32(self.levels))
