"""Variants of Keras layers with a computed kernel, a mask as input, or a scaled input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from keras_qat.keras2 import configurations
from keras_qat.keras2.backend import keras, layers, register


class _Weight:
    """Descriptor that computes a weight whenever code reads an attribute, such as `kernel`."""

    def __get__(self, layer: keras.layers.Layer | None, owner: type) -> Any:
        return self if layer is None else layer.source.value()


class _Computed(layers.Layer):
    """Mixin for layers that compute a weight from other weights, as in weight normalization.

    TFLite files contain only the computed weight.

    Args:
        source: a `WeightTensor` that computes the weight, or a configuration of a `WeightTensor`.
    """

    computed: str
    """Name of the attribute with the computed weight, such as "kernel"."""

    def __init__(
        self, *args: object, source: keras.layers.Layer | dict[str, Any], **kwargs: object
    ) -> None:
        super().__init__(*args, **kwargs)
        is_config = isinstance(source, dict)
        self.source: Any = configurations.deserialize(source) if is_config else source

    def build(self, input_shape: Any) -> None:
        if not self.source.built:
            self.source.build(input_shape)
        super().build(input_shape)
        self.__dict__.pop(self.computed)  # `build` stored None from `add_weight`.

    def add_weight(self, name: str | None = None, *args: object, **kwargs: object) -> Any:
        return None if name == self.computed else super().add_weight(name, *args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "source": configurations.serialize(self.source)}


def _make_computed(kind: type[layers.Layer], weight: str = "kernel") -> tuple[type, type]:
    """Return the class `kind`, and a registered subclass of `kind` with a computed weight."""
    name, doc = f"Computed{kind.__name__}", f"A `{kind.__name__}` with a computed kernel."
    members = {"computed": weight, weight: _Weight(), "__doc__": doc, "__module__": __name__}
    return kind, register(type(name, (_Computed, kind), members))


COMPUTED = dict(
    (
        *map(_make_computed, (layers.Conv1D, layers.Conv2D, layers.Dense)),
        *map(_make_computed, (layers.Conv1DTranspose, layers.Conv2DTranspose)),
        _make_computed(layers.DepthwiseConv2D, "depthwise_kernel"),
    )
)
"""Maps a layer class to the variant with a computed kernel."""


def has_computed_kernel(layer: object) -> bool:
    """Returns True if a layer computes its kernel. A computed kernel cannot be assigned."""
    return isinstance(layer, _Computed)


class _WithMaskInput(layers.Layer):
    """Mixin for recurrent layers with two inputs: a sequence and its mask, [batch, steps].

    Keras passes a mask as an attribute of the sequence, `_keras_mask`. A file needs a mask tensor.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.input_spec = [keras.layers.InputSpec(ndim=3), keras.layers.InputSpec(ndim=2)]

    def __call__(self, inputs: Any, *args: object, **kwargs: object) -> Any:
        # Keras' recurrent layers would use the second tensor as the initial state.
        return layers.Layer.__call__(self, inputs, *args, **kwargs)

    def build(self, input_shape: Any) -> None:
        # When Keras 2.15 loads a file, `input_shape` is only the shape of the sequence.
        is_one = all(size is None or isinstance(size, int) for size in input_shape)
        super().build(tf.TensorShape(input_shape if is_one else input_shape[0]))

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        sequence, mask = inputs
        return super().call(sequence, mask=mask, training=training)


WITH_MASK_INPUT: dict[type, Any] = {
    kind: register(
        type(
            f"Masked{kind.__name__}",
            (_WithMaskInput, kind),
            {"__doc__": f"A `{kind.__name__}` with a mask input.", "__module__": __name__},
        )
    )
    for kind in (layers.GRU, layers.LSTM, layers.SimpleRNN)
}
"""Maps a layer class to the variant with a mask input."""


def has_mask_input(layer: object) -> bool:
    return isinstance(layer, _WithMaskInput)


class _Rescaled:
    def __init__(self, *, input_scale: Sequence[float], **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.input_scale = list(map(float, input_scale))

    def rescale(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs * tf.constant(self.input_scale, inputs.dtype)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "input_scale": self.input_scale}  # type: ignore[misc]


@register
class RescaledBatchNormalization(_Rescaled, layers.BatchNormalization):
    """BatchNormalization that first multiplies its input by constants.

    Args:
        input_scale: the constant of each channel.
        kwargs: as for `BatchNormalization`. The statistics describe the scaled input.
    """

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        return super().call(self.rescale(inputs), training=training)


@register
class RescaledNormalization(_Rescaled, layers.Normalization):
    """Normalization that first multiplies its input by constants.

    Args:
        input_scale: the constant of each channel.
        kwargs: as for `Normalization`. The statistics describe the scaled input.
    """

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return super().call(self.rescale(inputs))


RESCALED: dict[type, Any] = {
    layers.BatchNormalization: RescaledBatchNormalization,
    layers.Normalization: RescaledNormalization,
}


def find_statistics(
    layer: keras.layers.Layer,
) -> tuple[NDArray[np.float32], NDArray[np.float32]] | None:
    """Returns a normalization layer's mean and standard deviation, or None if it is untrained."""
    if isinstance(layer, layers.BatchNormalization):
        mean, variance = (np.ravel(seen) for seen in (layer.moving_mean, layer.moving_variance))
        has_seen = np.any(mean != 0) or np.any(variance != 1)
        return (mean, np.sqrt(variance + layer.epsilon)) if has_seen else None
    if isinstance(layer, layers.Normalization) and not layer.invert:
        mean, variance = (np.ravel(moment) for moment in (layer.mean, layer.variance))
        return mean, np.sqrt(np.maximum(variance, 1e-12))
    return None


@register
class FusedBatchNormalization(layers.BatchNormalization):
    """BatchNormalization of vectors with TensorFlow's fused operation, as in `tf.contrib.slim`.

    Unlike Keras' layer for vectors, it stores an unbiased variance (Bessel's correction).
    `recipes.contrib` uses this layer for each BatchNormalization of vectors that is not folded.

    Shapes: [batch, channels].
    """

    def build(self, input_shape: Any) -> None:
        self.axis = [3]  # A vector becomes an image of one pixel.
        super().build([input_shape[0], 1, 1, input_shape[-1]])
        self.input_spec = layers.InputSpec(ndim=2)

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        y = super().call(tf.reshape(inputs, [-1, 1, 1, inputs.shape[-1]]), training=training)
        return tf.reshape(y, [-1, inputs.shape[-1]])
