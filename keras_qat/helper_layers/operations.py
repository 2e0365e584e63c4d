"""Helper layers for operations without a Keras layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.keras2.backend import keras, register, resolve_training
from keras_qat.keras2.configurations import load_nested_model


class HelperLayer(keras.layers.Layer):
    """Base class. The configuration of a layer contains the attributes named in `options`."""

    options: tuple[str, ...] = ()

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **{name: getattr(self, name) for name in self.options}}


class SameShape(HelperLayer):
    """Base class of layers that keep the shape of the input."""

    def compute_output_shape(self, input_shape: Any) -> tf.TensorShape:
        return tf.TensorShape(input_shape)


@register
class CarryMask(SameShape):
    """Returns its input with a Keras mask: `CarryMask()(x, mask=mask)`.

    TensorFlow operations drop Keras masks. Later layers, losses and metrics may need the masks.
    """

    def __init__(self, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True

    def call(self, inputs: tf.Tensor, mask: tf.Tensor | None = None) -> tf.Tensor:
        return tf.identity(inputs)


@register
class Contract(HelperLayer):
    """Sums products of two tensors along shared axes: `tf.einsum` of two tensors.

    Args:
        equation: as for `tf.einsum`, e.g. `"abc,adc->abd"`.
    """

    options = ("equation",)

    def __init__(self, equation: str, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.equation = equation

    def call(self, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
        return tf.einsum(self.equation, *inputs)


@keras.utils.register_keras_serializable(package="keras_qat", name="FoldSteps")
class FlattenTime(HelperLayer):
    """Merges the time axis into the batch: [batch, steps, ...] to [batch * steps, ...]."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return tf.reshape(inputs, [-1, *inputs.shape[2:]])

    def compute_output_shape(self, input_shape: Any) -> tf.TensorShape:
        return tf.TensorShape([None, *input_shape[2:]])


@keras.utils.register_keras_serializable(package="keras_qat", name="UnfoldSteps")
class RestoreTime(HelperLayer):
    """Restores the time axis after `FlattenTime`: [batch * steps, ...] to [batch, steps, ...]."""

    options = ("steps",)

    def __init__(self, steps: int, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.steps = steps

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return tf.reshape(inputs, [-1, self.steps, *inputs.shape[1:]])

    def compute_output_shape(self, input_shape: Any) -> tf.TensorShape:
        return tf.TensorShape([None, self.steps, *input_shape[1:]])


@register
class LastStep(HelperLayer):
    """Returns the last step of a sequence: [batch, steps, ...] to [batch, ...]."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs[:, -1]

    def compute_output_shape(self, input_shape: Any) -> tf.TensorShape:
        return tf.TensorShape([input_shape[0], *input_shape[2:]])


@register
class ReverseSteps(SameShape):
    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return tf.reverse(inputs, [1])


@register
class MaskScores(HelperLayer):
    """Replaces masked attention scores by low scores. A softmax makes masked scores almost 0.

    The inputs are the scores, [batch, ..., steps, steps], and masks that broadcast to
    [batch, steps, steps]. A mask is False or 0 for masked scores.

    Args:
        causal: two sizes `[query steps, key steps]`. Key steps later than the query step are then
            masked. Or a constant mask [..., steps, steps] that is True for visible scores.
        hidden: True if masks are inverted: True or nonzero for masked scores.
        below: how far masked scores lie below the smallest score. With the usual masked scores of
            -1e9, all visible scores would be quantized to the same value.
        limit: upper bound of masked scores, or None.
        above: True if a minimum follows instead of a softmax. Masked scores then are the highest,
            and `limit` is a lower bound.
    """

    def __init__(
        self,
        causal: Any = None,
        hidden: bool = False,
        below: float = 12.0,
        limit: float | None = None,
        above: bool = False,
        **kwargs: object,
    ) -> None:
        super().__init__(**kwargs)
        self.hidden, self.below, self.limit, self.above = hidden, below, limit, above
        visible = np.tri(*causal) if np.ndim(causal) == 1 else causal
        self.causal = None if visible is None else np.asarray(visible, bool)

    def masks(self, scores: tf.Tensor, masks: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the masks as booleans that are True for visible scores."""
        visible = []
        for mask in masks:
            for _ in range(len(scores.shape) - len(mask.shape)):
                mask = tf.expand_dims(mask, -3)
            mask = tf.cast(mask, tf.bool)
            visible.append(~mask if self.hidden else mask)
        return visible if self.causal is None else [*visible, tf.constant(self.causal)]

    def call(self, inputs: Any) -> tf.Tensor:
        scores, *masks = tf.nest.flatten(inputs)
        sign = -1.0 if self.above else 1.0
        low = tf.reduce_min(sign * scores) - self.below
        low = low if self.limit is None else tf.minimum(low, sign * self.limit)
        end = tf.stop_gradient(sign * low)
        for mask in self.masks(scores, masks):
            scores = tf.where(mask, scores, end)
        return scores

    def compute_output_shape(self, input_shape: Any) -> Any:
        return tf.nest.flatten(input_shape)[0]

    def get_config(self) -> dict[str, Any]:
        visible, causal = self.causal, None
        if visible is not None:
            is_triangle = visible.ndim == 2 and np.array_equal(visible, np.tri(*visible.shape))
            causal = list(visible.shape) if is_triangle else visible.astype(int).tolist()
        own = {"causal": causal, "hidden": self.hidden, "below": self.below}
        return {**super().get_config(), **own, "limit": self.limit, "above": self.above}


@register
class OnGrid(HelperLayer):
    """Returns a constant operand of an operation on `x`, such as the 3 in `x > 3`.

    The constant is quantized with the scale of `x`.

    Args:
        number: the constant, or a nested list of constants.

    Shapes: the input is `x`. Axes of size 1 are added until the output has as many axes as `x`.
    """

    options = ("number",)

    def __init__(self, number: Any, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.number = number

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        shape = self.compute_output_shape(inputs.shape)
        return tf.reshape(tf.cast(self.value(), inputs.dtype), shape)

    def value(self) -> tf.Tensor:
        return tf.constant(self.number, tf.float32)

    def compute_output_shape(self, input_shape: Any) -> tf.TensorShape:
        sizes = np.shape(self.number)
        return tf.TensorShape([1] * (len(input_shape) - len(sizes)) + list(sizes))


@register
class Regularize(SameShape):
    """Returns its input. Adds the value of an activity regularizer to the loss.

    Args:
        activity_regularizer: as for Keras layers.
    """

    def __init__(self, activity_regularizer: Any, **kwargs: object) -> None:
        super().__init__(activity_regularizer=activity_regularizer, **kwargs)
        self.supports_masking = True

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return tf.identity(inputs)

    def get_config(self) -> dict[str, Any]:
        regularizer = keras.regularizers.serialize(self.activity_regularizer)
        return {**super().get_config(), "activity_regularizer": regularizer}


@register
class Roll(HelperLayer):
    """Computes `tf.roll` with slices and concatenations, which TFLite supports.

    Args:
        shifts: number of elements by which each axis is shifted.
        axes: the axes.
    """

    options = ("shifts", "axes")

    def __init__(self, shifts: Sequence[int], axes: Sequence[int], **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.shifts, self.axes = list(shifts), list(axes)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        x = inputs
        for shift, axis in zip(self.shifts, self.axes, strict=True):
            size = x.shape[axis]
            shift = shift if size is None else shift % size
            if shift:
                leading = [slice(None)] * (axis % x.shape.rank)
                last, first = slice(-shift, None), slice(None, -shift)
                x = tf.concat([x[(*leading, last)], x[(*leading, first)]], axis)
        return x


class WithModel(SameShape):
    """A layer that contains a model.

    Args:
        model: the model, or its configuration.
    """

    def __init__(self, model: keras.Model | dict[str, Any] | None, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.model: Any = load_nested_model(model) if isinstance(model, dict) else model

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "model": self.model.get_config()}


@register
class TrainingOnly(WithModel):
    """Applies a model in training, as in stochastic depth. At inference, it returns its input.

    By default, the model is applied to the layer's input. `TrainingOnly(model)(y, given=[x])`
    computes `model([x])` in training, and returns `y` at inference.
    """

    def call(
        self, inputs: tf.Tensor, given: Any = None, training: bool | tf.Tensor | None = None
    ) -> tf.Tensor:
        training = resolve_training(training)
        read = inputs if given is None else given
        if isinstance(training, bool):
            return self.model(read, training=True) if training else inputs
        return tf.cond(
            training, lambda: self.model(read, training=True), lambda: tf.identity(inputs)
        )


@register
class HardSwish(SameShape):
    """Computes x * relu6(x + 3) / 6, which TFLite's converter converts to a HARD_SWISH."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs * tf.nn.relu6(inputs + 3.0) * (1.0 / 6.0)


@register
class Indices(SameShape):
    """Casts integers in a float tensor, such as token ids, to int32."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return tf.cast(inputs, tf.int32)


@register
class Positions(SameShape):
    """Rounds float values to int32. Only models saved by version 0.3.0 contain this layer.

    Args:
        rounding: "floor", "ceil", "round" (halves to even) or "truncate".
    """

    options = ("rounding",)

    def __init__(self, rounding: str, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.rounding = rounding

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return tf.cast(ROUNDINGS[self.rounding](inputs), tf.int32)


ROUNDINGS = {
    "floor": tf.floor,
    "ceil": tf.math.ceil,
    "round": tf.round,
    "truncate": lambda x: tf.sign(x) * tf.floor(tf.abs(x)),
}


@register
class WeightTensor(HelperLayer):
    """Returns a weight, or a tensor computed from several weights.

    Args:
        shapes: the shape of each weight.
        expression: a model that computes the tensor from the weights, or the model's configuration.
            If it is None, the layer returns its only weight.
        weight_dtype: the data type of all weights.
        frozen: indices of weights that are not trained.
        regularizers, constraints: one for each weight, as for Keras layers.

    Shapes: the input is ignored, but Keras layers need one. The output has no batch axis.
    """

    options = ("shapes", "weight_dtype", "frozen")

    def __init__(
        self,
        shapes: Sequence[Any],
        expression: keras.Model | dict[str, Any] | None = None,
        weight_dtype: str = "float32",
        frozen: Sequence[int] = (),
        regularizers: Sequence[Any] = (),
        constraints: Sequence[Any] = (),
        **kwargs: object,
    ) -> None:
        super().__init__(**kwargs)
        self.shapes = [tuple(shape) for shape in shapes]
        self.expression: Any = expression
        if isinstance(expression, dict):
            self.expression = load_nested_model(expression)
        self.weight_dtype, self.frozen = weight_dtype, tuple(frozen)
        none = [None] * len(self.shapes)
        self.regularizers = [keras.regularizers.get(item) for item in regularizers or none]
        self.constraints = [keras.constraints.get(item) for item in constraints or none]

    def build(self, input_shape: Any) -> None:
        self.parts = [
            self.add_weight(
                name=f"weight_{index}" if index else "weight",
                shape=shape,
                dtype=self.weight_dtype,
                initializer="zeros",
                regularizer=self.regularizers[index],
                constraint=self.constraints[index],
                trainable=index not in self.frozen,
            )
            for index, shape in enumerate(self.shapes)
        ]
        super().build(input_shape)

    def call(self, inputs: Any) -> tf.Tensor:
        return self.value()

    def value(self) -> tf.Tensor:
        if self.expression is None:
            return tf.convert_to_tensor(self.parts[0])
        return self.expression([tf.convert_to_tensor(weight) for weight in self.parts])

    def compute_output_shape(self, input_shape: Any) -> tf.TensorShape:
        return tf.TensorShape(
            self.shapes[0] if self.expression is None else self.expression.output_shape
        )

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "expression": self.expression and self.expression.get_config(),
            "regularizers": [keras.regularizers.serialize(item) for item in self.regularizers],
            "constraints": [keras.constraints.serialize(item) for item in self.constraints],
        }
