"""Layers that lowering makes because Keras has none that do this alone."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_qat.keras2.backend import keras, register

__all__ = ["Contract", "FoldSteps", "HardSwish", "Regularize", "Roll", "UnfoldSteps"]


@register
class Contract(keras.layers.Layer):
    """The sum of products of two tensors along shared axes: `tf.einsum` of two.

    Args:
        equation: as for `tf.einsum`, e.g. `"abc,adc->abd"`.
    """

    def __init__(self, equation: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.equation = equation

    def call(self, inputs: Any) -> Any:
        return tf.einsum(self.equation, *inputs)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "equation": self.equation}


@register
class FoldSteps(keras.layers.Layer):
    """Makes every step of a sequence an example: [batch, steps, ...] to [batch * steps, ...]."""

    def call(self, inputs: Any) -> Any:
        return tf.reshape(inputs, [-1, *inputs.shape[2:]])

    def compute_output_shape(self, input_shape: Any) -> Any:
        return tf.TensorShape([None, *input_shape[2:]])


@register
class Regularize(keras.layers.Layer):
    """Passes values on and adds what a regularizer makes of them to the loss.

    Args:
        activity_regularizer: as layers take it.
    """

    def __init__(self, activity_regularizer: Any, **kwargs: Any) -> None:
        super().__init__(activity_regularizer=activity_regularizer, **kwargs)
        self.supports_masking = True

    def call(self, inputs: Any) -> Any:
        return tf.identity(inputs)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return tf.TensorShape(input_shape)

    def get_config(self) -> dict[str, Any]:
        serialize = keras.regularizers.serialize
        return {
            **super().get_config(),
            "activity_regularizer": serialize(self.activity_regularizer),
        }


@register
class Roll(keras.layers.Layer):
    """`tf.roll` in parts: what leaves at one end of an axis comes in at the other.

    Args:
        shifts: by how many places.
        axes: along which axes.
    """

    def __init__(self, shifts: list[int], axes: list[int], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.shifts, self.axes = list(shifts), list(axes)

    def call(self, inputs: Any) -> Any:
        x = inputs
        for shift, axis in zip(self.shifts, self.axes, strict=True):
            size = x.shape[axis]
            shift = shift if size is None else shift % size
            if shift:
                others = [slice(None)] * (axis % x.shape.rank)
                last, first = slice(-shift, None), slice(None, -shift)
                x = tf.concat([x[(*others, last)], x[(*others, first)]], axis)
        return x

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "shifts": self.shifts, "axes": self.axes}


@register
class UnfoldSteps(keras.layers.Layer):
    """The inverse of `FoldSteps`, for a number of steps that is known."""

    def __init__(self, steps: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.steps = steps

    def call(self, inputs: Any) -> Any:
        return tf.reshape(inputs, [-1, self.steps, *inputs.shape[1:]])

    def compute_output_shape(self, input_shape: Any) -> Any:
        return tf.TensorShape([None, self.steps, *input_shape[1:]])

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "steps": self.steps}


@register
class HardSwish(keras.layers.Layer):
    """x * relu6(x + 3) / 6, in the spelling that TFLite's converter takes for its operation.

    Shapes: any; the output has the input's shape.
    """

    def call(self, inputs: Any) -> Any:
        return inputs * tf.nn.relu6(inputs + 3.0) * (1.0 / 6.0)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape
