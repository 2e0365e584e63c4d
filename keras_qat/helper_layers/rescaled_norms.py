"""Normalizations of a tensor whose channels were divided by constants before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.keras2.backend import keras, register


class _Multiplies:
    """Multiplies its input by `input_scale`, a power of two for each channel, first."""

    def __init__(self, *, input_scale: Sequence[float], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.input_scale = list(map(float, input_scale))

    def product(self, inputs: Any) -> Any:
        """Returns the input times the constants."""
        return inputs * tf.constant(self.input_scale, inputs.dtype)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "input_scale": self.input_scale}  # type: ignore[misc]


@register
class RescaledBatchNormalization(_Multiplies, keras.layers.BatchNormalization):
    """BatchNormalization of its input times constants.

    Args:
        input_scale: the constant of each channel.
        kwargs: as for `BatchNormalization`. Its statistics are those of the product.
    """

    def call(self, inputs: Any, training: Any = None) -> Any:
        return super().call(self.product(inputs), training=training)


@register
class RescaledNormalization(_Multiplies, keras.layers.Normalization):
    """Normalization of its input times constants.

    Args:
        input_scale: the constant of each channel.
        kwargs: as for `Normalization`. Its statistics are those of the product.
    """

    def call(self, inputs: Any) -> Any:
        return super().call(self.product(inputs))


RESCALED: dict[type[Any], Any] = {
    keras.layers.BatchNormalization: RescaledBatchNormalization,
    keras.layers.Normalization: RescaledNormalization,
}


def seen_statistics(layer: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns mean and standard deviation that a layer has seen; None if it has seen none."""
    if isinstance(layer, keras.layers.BatchNormalization):
        mean, variance = (np.ravel(seen) for seen in (layer.moving_mean, layer.moving_variance))
        has_seen = np.any(mean != 0) or np.any(variance != 1)
        return (mean, np.sqrt(variance + layer.epsilon)) if has_seen else None
    if isinstance(layer, keras.layers.Normalization) and not layer.invert:
        mean, variance = (np.ravel(moment) for moment in (layer.mean, layer.variance))
        return mean, np.sqrt(np.maximum(variance, 1e-12))
    return None
