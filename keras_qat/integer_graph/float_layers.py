"""Computes layers that stay float with operations that TFLite's converter supports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_qat.graph.operations import get_kind, is_operation
from keras_qat.keras2.backend import keras, layers


def _category_encoding(layer: Any, x: Any, count_weights: Any = None) -> Any:
    # Keras counts with DenseBincount, which TFLite lacks.
    codes = tf.one_hot(tf.cast(x, tf.int32), layer.num_tokens, 1.0, 0.0)
    if layer.output_mode == "one_hot":
        return tf.squeeze(codes, -2) if x.shape[-1] == 1 else codes
    if layer.output_mode == "multi_hot":
        return tf.reduce_max(codes, -2)
    codes = (
        codes if count_weights is None else codes * tf.cast(count_weights, tf.float32)[..., None]
    )
    return tf.reduce_sum(codes, -2)


def _group_normalization(layer: Any, x: Any) -> Any:
    # Keras asks for the shape of its input at run time, of which TFLite makes a wrong broadcast.
    axis = layer.axis % x.shape.rank
    sizes = _sizes(x)
    split = [*sizes[:axis], layer.groups, sizes[axis] // layer.groups, *sizes[axis + 1 :]]
    grouped = tf.reshape(x, split)
    axes = [index for index in range(1, len(split)) if index != axis]
    mean = tf.reduce_mean(grouped, axes, keepdims=True)
    variance = tf.reduce_mean(tf.math.squared_difference(grouped, mean), axes, keepdims=True)
    y = tf.reshape((grouped - mean) * tf.math.rsqrt(variance + layer.epsilon), sizes)
    shape = [1] * axis + [-1] + [1] * (len(sizes) - axis - 1)
    y = y * tf.reshape(layer.gamma, shape) if layer.scale else y
    return y + tf.reshape(layer.beta, shape) if layer.center else y


def _layer_normalization(layer: Any, x: Any) -> Any:
    # Keras spells it as a batch normalization of one image, in three times as many operations.
    axes = [axis % x.shape.rank for axis in tf.nest.flatten(layer.axis)]
    mean = tf.reduce_mean(x, axes, keepdims=True)
    variance = tf.reduce_mean(tf.math.squared_difference(x, mean), axes, keepdims=True)
    y = (x - mean) * tf.math.rsqrt(variance + layer.epsilon)
    shape = [x.shape[axis] if axis in axes else 1 for axis in range(x.shape.rank)]
    y = y * tf.reshape(layer.gamma, shape) if layer.scale else y
    return y + tf.reshape(layer.beta, shape) if layer.center else y


def _random_crop(layer: Any, x: Any, training: Any = None) -> Any:
    # What Keras computes at inference, without its choice between that and a random crop.
    return keras.preprocessing.image.smart_resize(x, (layer.height, layer.width))


def _sizes(x: Any) -> list[Any]:
    """Returns the sizes of a tensor's axes: -1 for the batch, if it alone is unknown."""
    sizes = x.shape.as_list()
    if None in sizes[1:]:
        return [tf.shape(x)[axis] if size is None else size for axis, size in enumerate(sizes)]
    return [-1, *sizes[1:]]


def _activation(layer: Any, x: Any) -> Any:
    # Before TensorFlow 2.16 the converter has no Softsign.
    if layer.activation is keras.activations.softsign:
        return x / (1.0 + tf.abs(x))
    return layer(x)


def _resizing(layer: Any, x: Any) -> Any:
    if layer.interpolation not in ("nearest", "bilinear"):
        raise ValueError(
            f"{layer.name}: TFLite cannot resize with interpolation={layer.interpolation!r}. Use "
            f"'bilinear' or 'nearest', or resize the images before they go into the model."
        )
    return layer(x)


def _not_in_tflite(layer: Any, *args: Any, **kwargs: Any) -> Any:
    raise ValueError(
        f"{layer.name}: TFLite has no operation for {type(layer).__name__}. Compute it before the "
        f"model, in the input pipeline, and quantize the model after it."
    )


def _clipped(layer: Any, t: Any, clip_value_min: Any, clip_value_max: Any, **options: Any) -> Any:
    # The converter makes ReLU6 of a minimum that comes first. Of integers there is no kernel.
    if tf.as_dtype(t.dtype).is_floating:
        return layer(t, clip_value_min, clip_value_max, **options)
    return tf.minimum(tf.maximum(t, clip_value_min), clip_value_max)


def _relu6(layer: Any, features: Any, **options: Any) -> Any:
    if tf.as_dtype(features.dtype).is_floating:
        return layer(features, **options)
    return tf.minimum(tf.maximum(features, 0), 6)


def _product_without_nan(layer: Any, x: Any, y: Any, **options: Any) -> Any:
    return tf.where(tf.equal(y, 0.0), tf.zeros_like(y), x * y)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "clip_by_value": _clipped,
    "relu6": _relu6,
    "multiply_no_nan": _product_without_nan,
}
"""Operation -> its computation in float where TFLite has no kernel for TensorFlow's own."""

_FORMS: dict[type, Callable[..., Any]] = {
    layers.Activation: _activation,
    layers.Resizing: _resizing,
    **dict.fromkeys(
        (
            layers.Hashing,
            layers.HashedCrossing,
            layers.IntegerLookup,
            layers.StringLookup,
            layers.TextVectorization,
        ),
        _not_in_tflite,
    ),
    layers.CategoryEncoding: _category_encoding,
    layers.GroupNormalization: _group_normalization,
    layers.LayerNormalization: _layer_normalization,
    layers.RandomCrop: _random_crop,
}
"""Layer class -> its computation in float where TFLite has no kernel for Keras' own."""


def form_of(layer: Any) -> Callable[..., Any] | None:
    """Returns how files compute a layer in float; None if they compute its own `call`."""
    if is_operation(layer):
        return _OPERATIONS.get(get_kind(layer))
    kind: Any = type(layer)
    bases: list[Any] = [base for base in kind.__mro__ if base in _FORMS]
    return _FORMS[bases[0]] if bases and kind.call is bases[0].call else None


def rnn(
    step_function: Callable[[Any, Any], tuple[Any, Any]],
    inputs: Any,
    initial_states: Any,
    go_backwards: bool = False,
    mask: Any = None,
    constants: Any = None,
    unroll: bool = False,
    input_length: Any = None,
    time_major: bool = False,
    zero_output_for_mask: bool = False,
    return_all_outputs: bool = True,
) -> tuple[Any, Any, Any]:
    """Computes what `keras.backend.rnn` does, without its lists of tensors.

    The converter takes such lists for one batch size only. Arguments and results are those of
    `keras.backend.rnn`, which all of Keras' recurrent layers are computed with.
    """
    to_front = lambda x: tf.transpose(x, [1, 0, *range(2, len(x.shape))])  # noqa: E731
    if not time_major:
        inputs = tf.nest.map_structure(to_front, inputs)
        mask = None if mask is None else to_front(mask)
    if mask is not None and mask.dtype != tf.bool:
        mask = tf.cast(mask, tf.bool)
    sequence = tf.nest.flatten(inputs)[0]
    steps = sequence.shape[0] if sequence.shape[0] is not None else tf.shape(sequence)[0]

    def step(position: Any, states: Any, before: Any) -> tuple[Any, Any]:
        """Computes the output and states of a step; `before` is the output of the step before."""
        # Not a slice, of which older converters know five axes at most.
        x = tf.nest.map_structure(lambda x: tf.gather(x, position), inputs)
        output, new_states = step_function(x, (*states, *(constants or ())))
        new_states = tf.nest.pack_sequence_as(states, tf.nest.flatten(new_states))
        if mask is None:
            return output, new_states
        valid = mask[position]
        hidden = tf.nest.map_structure(tf.zeros_like, output)
        if before is not None and not zero_output_for_mask:
            hidden = before
        return _choose(valid, output, hidden), _choose(valid, new_states, states)

    states = tuple(initial_states)
    if isinstance(steps, int) and (unroll or steps == 1):
        last, outputs, states = _step_by_step(step, steps, states, go_backwards)
    else:
        last, outputs, states = _in_a_loop(step, steps, states, go_backwards, return_all_outputs)
    if not return_all_outputs or outputs is None:
        outputs = tf.nest.map_structure(lambda y: y[None], last)
    if not time_major:
        outputs = tf.nest.map_structure(to_front, outputs)
    return last, outputs, states


def _step_by_step(step: Any, steps: int, states: Any, backwards: bool) -> tuple[Any, Any, Any]:
    output, outputs = None, []
    for position in range(steps):
        output, states = step(steps - 1 - position if backwards else position, states, output)
        outputs.append(output)
    return output, tf.nest.map_structure(lambda *y: tf.stack(y), *outputs), states


def _in_a_loop(
    step: Any, steps: Any, states: Any, backwards: bool, all_outputs: bool
) -> tuple[Any, Any, Any]:
    position_of = lambda count: steps - 1 - count if backwards else count  # noqa: E731
    # The first step outside of the loop: it tells the shapes of the outputs.
    first, states = step(position_of(0), states, None)
    shapes = tf.nest.map_structure(lambda x: x.shape, (first, states))
    empty = tf.nest.map_structure(
        lambda y: tf.zeros(tf.concat([[steps], tf.shape(y)], 0), y.dtype), first
    )

    def store(outputs: Any, output: Any, count: Any) -> Any:
        def one(stored: Any, new: Any) -> Any:
            here = tf.range(steps) == count
            here = tf.reshape(here, [-1, *[1] * len(new.shape)])
            return tf.where(here, new[None], stored)

        return tf.nest.map_structure(one, outputs, output)

    def body(count: Any, output: Any, states: Any, *outputs: Any) -> Any:
        output, states = step(position_of(count), states, output)
        return (count + 1, output, states, *(store(stored, output, count) for stored in outputs))

    outputs = (store(empty, first, 0),) if all_outputs else ()
    invariants = tf.nest.map_structure(
        lambda y: tf.TensorShape([None, *y.shape.as_list()[1:]]), outputs
    )
    _, last, states, *outputs = tf.while_loop(
        lambda count, *_: count < steps,
        body,
        (1, first, states, *outputs),
        shape_invariants=(tf.TensorShape([]), *shapes, *invariants),
    )
    return last, outputs[0] if all_outputs else None, states


def _choose(valid: Any, new: Any, old: Any) -> Any:
    """Returns `new` for examples where the step is valid and `old` for others, tensor by tensor."""

    def one(new: Any, old: Any) -> Any:
        return tf.where(tf.reshape(valid, [-1, *[1] * (len(new.shape) - 1)]), new, old)

    return tf.nest.map_structure(one, new, old)
