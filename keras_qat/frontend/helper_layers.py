"""Layers that lowering makes because Keras has none that do this alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.frontend.keras2.backend import keras, register, resolve_training

__all__ = [
    "Contract",
    "FlattenTime",
    "HardSwish",
    "LastStep",
    "MaskScores",
    "Regularize",
    "RestoreTime",
    "ReverseSteps",
    "Roll",
    "TrainingOnly",
    "WeightTensor",
]


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


@keras.utils.register_keras_serializable(package="keras_qat", name="FoldSteps")
class FlattenTime(keras.layers.Layer):
    """Makes every step of a sequence an example: [batch, steps, ...] to [batch * steps, ...]."""

    def call(self, inputs: Any) -> Any:
        return tf.reshape(inputs, [-1, *inputs.shape[2:]])

    def compute_output_shape(self, input_shape: Any) -> Any:
        return tf.TensorShape([None, *input_shape[2:]])


@register
class LastStep(keras.layers.Layer):
    """The last step of a sequence: [batch, steps, ...] to [batch, ...]."""

    def call(self, inputs: Any) -> Any:
        return inputs[:, -1]

    def compute_output_shape(self, input_shape: Any) -> Any:
        return tf.TensorShape([input_shape[0], *input_shape[2:]])


@register
class MaskScores(keras.layers.Layer):
    """Lowers scores of attention where masks hide them, for softmax to make next to nothing of it.

    It takes the scores, [batch, ..., steps, steps], and masks that are False, or 0, where there is
    nothing to attend to: [batch, steps, steps], or what is broadcast to that.

    Args:
        causal: how many steps attend to how many, if later ones are hidden too.
        hidden: whether the masks are True, or not 0, for what is hidden, instead.
    """

    BELOW = 12.0
    """How far below all scores: exp(-12) is 6e-6. -1e9 would leave 8 bits nothing for the rest."""

    def __init__(
        self, causal: tuple[int, int] | None = None, hidden: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.hidden = hidden
        self.causal = None if causal is None else np.tri(*causal, dtype=bool)

    def masks(self, scores: Any, masks: Any) -> list[Any]:
        """Where there is something to attend to, by mask, that of causality too: bool."""
        found = []
        for mask in masks:
            for _ in range(len(scores.shape) - len(mask.shape)):
                mask = tf.expand_dims(mask, -3)
            mask = tf.cast(mask, tf.bool)
            found.append(~mask if self.hidden else mask)
        return found if self.causal is None else [*found, tf.constant(self.causal)]

    def call(self, inputs: Any) -> Any:
        scores, *masks = tf.nest.flatten(inputs)
        low = tf.stop_gradient(tf.reduce_min(scores) - self.BELOW)
        for mask in self.masks(scores, masks):
            scores = tf.where(mask, scores, low)
        return scores

    def compute_output_shape(self, input_shape: Any) -> Any:
        return tf.nest.flatten(input_shape)[0]

    def get_config(self) -> dict[str, Any]:
        causal = None if self.causal is None else list(self.causal.shape)
        return {**super().get_config(), "causal": causal, "hidden": self.hidden}


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
class ReverseSteps(keras.layers.Layer):
    """The steps of a sequence from the last one to the first."""

    def call(self, inputs: Any) -> Any:
        return tf.reverse(inputs, [1])

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape


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
class TrainingOnly(keras.layers.Layer):
    """Computes something in training and passes its input on otherwise, as paths are dropped.

    Args:
        model: what it computes in training, or its configuration.
    """

    def __init__(self, model: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model = keras.Model.from_config(model) if isinstance(model, dict) else model

    def call(self, inputs: Any, training: Any = None) -> Any:
        training = resolve_training(training)
        if isinstance(training, bool):
            return self.model(inputs, training=True) if training else inputs
        return tf.cond(
            training, lambda: self.model(inputs, training=True), lambda: tf.identity(inputs)
        )

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "model": self.model.get_config()}


@keras.utils.register_keras_serializable(package="keras_qat", name="UnfoldSteps")
class RestoreTime(keras.layers.Layer):
    """The inverse of `FlattenTime`, for a number of steps that is known."""

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


@register
class WeightTensor(keras.layers.Layer):
    """Gives a weight, or what is computed from several, as a tensor that other layers read.

    Args:
        shapes: of the weights.
        expression: a model that computes the tensor from the weights, or its configuration; by
            default the tensor is the only weight.
        weight_dtype: type of the weights.
        frozen: places of weights that do not train.
        regularizers, constraints: those of each weight, as layers take them.

    Shapes: what it reads says only where it is called; the output has no batch.
    """

    def __init__(
        self,
        shapes: list[Any],
        expression: Any = None,
        weight_dtype: str = "float32",
        frozen: Any = (),
        regularizers: Any = (),
        constraints: Any = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.shapes = [tuple(shape) for shape in shapes]
        self.expression = expression
        if isinstance(expression, dict):
            self.expression = keras.Model.from_config(expression)
        self.weight_dtype, self.frozen = weight_dtype, tuple(frozen)
        none = [None] * len(self.shapes)
        self.regularizers = [keras.regularizers.get(each) for each in regularizers or none]
        self.constraints = [keras.constraints.get(each) for each in constraints or none]

    def build(self, input_shape: Any) -> None:
        self.parts = [
            self.add_weight(
                name=f"weight_{place}" if place else "weight",
                shape=shape,
                dtype=self.weight_dtype,
                initializer="zeros",
                regularizer=self.regularizers[place],
                constraint=self.constraints[place],
                trainable=place not in self.frozen,
            )
            for place, shape in enumerate(self.shapes)
        ]
        super().build(input_shape)

    def call(self, inputs: Any) -> Any:
        return self.value()

    def value(self) -> Any:
        """The tensor."""
        if self.expression is None:
            return tf.convert_to_tensor(self.parts[0])
        return self.expression([tf.convert_to_tensor(each) for each in self.parts])

    def compute_output_shape(self, input_shape: Any) -> Any:
        return tf.TensorShape(
            self.shapes[0] if self.expression is None else self.expression.output_shape
        )

    def get_config(self) -> dict[str, Any]:
        expression = self.expression and self.expression.get_config()
        return {
            **super().get_config(),
            "shapes": self.shapes,
            "expression": expression,
            "weight_dtype": self.weight_dtype,
            "frozen": self.frozen,
            "regularizers": [keras.regularizers.serialize(each) for each in self.regularizers],
            "constraints": [keras.constraints.serialize(each) for each in self.constraints],
        }
