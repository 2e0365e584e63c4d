"""Replaces float layers by operations that TFLite's converter supports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_qat.graph.operations import get_kind, is_operation
from keras_qat.keras2.backend import keras, layers


def _category_encoding(
    layer: layers.CategoryEncoding, x: tf.Tensor, count_weights: tf.Tensor | None = None
) -> tf.Tensor:
    # Keras calls DenseBincount, which TFLite lacks.
    encoded = tf.one_hot(tf.cast(x, tf.int32), layer.num_tokens, 1.0, 0.0)
    if layer.output_mode == "one_hot":
        return tf.squeeze(encoded, -2) if x.shape[-1] == 1 else encoded
    if layer.output_mode == "multi_hot":
        return tf.reduce_max(encoded, -2)
    if count_weights is not None:
        encoded *= tf.cast(count_weights, tf.float32)[..., None]
    return tf.reduce_sum(encoded, -2)


def _group_normalization(layer: layers.GroupNormalization, x: tf.Tensor) -> tf.Tensor:
    # Keras reads the shape at run time. TFLite broadcasts such shapes incorrectly.
    axis, sizes = layer.axis % x.shape.rank, x.shape.as_list()
    if None in sizes[1:]:
        sizes = [tf.shape(x)[axis] if size is None else size for axis, size in enumerate(sizes)]
    else:
        sizes = [-1, *sizes[1:]]
    split = [*sizes[:axis], layer.groups, sizes[axis] // layer.groups, *sizes[axis + 1 :]]
    axes = [index for index in range(1, len(split)) if index != axis]
    y = tf.reshape(_normalize(tf.reshape(x, split), axes, layer.epsilon), sizes)
    return _scale_and_shift(layer, y, [1] * axis + [-1] + [1] * (len(sizes) - axis - 1))


def _layer_normalization(layer: layers.LayerNormalization, x: tf.Tensor) -> tf.Tensor:
    # Keras uses fused batch normalization, which becomes three times as many TFLite operators.
    axes = [axis % x.shape.rank for axis in tf.nest.flatten(layer.axis)]
    y = _normalize(x, axes, layer.epsilon)
    shape = [x.shape[axis] if axis in axes else 1 for axis in range(x.shape.rank)]
    return _scale_and_shift(layer, y, shape)


def _normalize(x: tf.Tensor, axes: Sequence[int], epsilon: float) -> tf.Tensor:
    mean = tf.reduce_mean(x, axes, keepdims=True)
    variance = tf.reduce_mean(tf.math.squared_difference(x, mean), axes, keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + epsilon)


def _scale_and_shift(layer: keras.layers.Layer, y: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    y = y * tf.reshape(layer.gamma, shape) if layer.scale else y
    return y + tf.reshape(layer.beta, shape) if layer.center else y


def _conv3d(layer: layers.Conv3D, x: tf.Tensor) -> tf.Tensor:
    if layer.groups == 1:
        return layer(x)
    # TFLite's CONV_3D has no groups.
    pairs = zip(*(tf.split(y, layer.groups, -1) for y in (x, layer.kernel)), strict=True)
    y = tf.concat([layer.convolution_op(part, kernel) for part, kernel in pairs], -1)
    y = y + layer.bias if layer.use_bias else y
    return y if layer.activation is None else layer.activation(y)


def _random_crop(layer: layers.RandomCrop, x: tf.Tensor, training: object = None) -> tf.Tensor:
    # Keras chooses at run time between a resize and a random crop.
    return keras.preprocessing.image.smart_resize(x, (layer.height, layer.width))


def _activation(layer: layers.Activation, x: tf.Tensor) -> tf.Tensor:
    # Before TensorFlow 2.16 the converter does not support Softsign.
    if layer.activation is keras.activations.softsign:
        return x / (1.0 + tf.abs(x))
    return layer(x)


def _resizing(layer: layers.Resizing, x: tf.Tensor) -> tf.Tensor:
    if layer.interpolation not in ("nearest", "bilinear"):
        raise ValueError(
            f"{layer.name}: TFLite cannot resize with interpolation={layer.interpolation!r}. Use "
            f"'bilinear' or 'nearest', or resize the images before they go into the model."
        )
    return layer(x)


def _refuse(layer: keras.layers.Layer, *args: object, **kwargs: object) -> tf.Tensor:
    raise ValueError(
        f"{layer.name}: TFLite has no operation for {type(layer).__name__}. Move the layer into "
        f"the input pipeline, and quantize the rest of the model."
    )


Operation = Callable[..., tf.Tensor]


def _clip_by_value(
    layer: Operation, t: tf.Tensor, clip_value_min: Any, clip_value_max: Any, **options: Any
) -> tf.Tensor:
    # The converter turns minimum and maximum into a ReLU6, which does not support integers.
    if tf.as_dtype(t.dtype).is_floating:
        return layer(t, clip_value_min, clip_value_max, **options)
    return tf.minimum(tf.maximum(t, clip_value_min), clip_value_max)


def _relu6(layer: Operation, features: tf.Tensor, **options: Any) -> tf.Tensor:
    if tf.as_dtype(features.dtype).is_floating:
        return layer(features, **options)
    return tf.minimum(tf.maximum(features, 0), 6)


def _multiply_no_nan(layer: Operation, x: tf.Tensor, y: tf.Tensor, **options: Any) -> tf.Tensor:
    return tf.where(tf.equal(y, 0.0), tf.zeros_like(y), x * y)


_OPERATIONS: dict[str, Operation] = {
    "clip_by_value": _clip_by_value,
    "relu6": _relu6,
    "multiply_no_nan": _multiply_no_nan,
}
"""Maps each operation without a TFLite kernel to an equivalent function."""

_LAYERS: dict[type, Operation] = {
    layers.Activation: _activation,
    layers.Resizing: _resizing,
    layers.Hashing: _refuse,
    layers.HashedCrossing: _refuse,
    layers.IntegerLookup: _refuse,
    layers.StringLookup: _refuse,
    layers.TextVectorization: _refuse,
    layers.CategoryEncoding: _category_encoding,
    layers.GroupNormalization: _group_normalization,
    layers.LayerNormalization: _layer_normalization,
    layers.Conv3D: _conv3d,
    layers.RandomCrop: _random_crop,
}
"""Maps each layer class without TFLite kernels to an equivalent function of TensorFlow."""


def find_variant(layer: keras.layers.Layer) -> Operation | None:
    """Returns the function that replaces `layer.call` in exported files, or None."""
    if is_operation(layer):
        return _OPERATIONS.get(get_kind(layer))
    kind: Any = type(layer)
    bases = [base for base in kind.__mro__ if base in _LAYERS]
    return _LAYERS[bases[0]] if bases and kind.call is bases[0].call else None


def rnn(
    step_function: Callable[[Any, Any], tuple[Any, Any]],
    inputs: Any,
    initial_states: Any,
    go_backwards: bool = False,
    mask: tf.Tensor | None = None,
    constants: Sequence[tf.Tensor] | None = None,
    unroll: bool = False,
    input_length: object = None,
    time_major: bool = False,
    zero_output_for_mask: bool = False,
    return_all_outputs: bool = True,
) -> tuple[Any, Any, Any]:
    """Replaces `keras.backend.rnn`, which all recurrent layers of Keras call.

    Arguments and results are the same, but this function uses no TensorArray. The converter
    supports a TensorArray only with a fixed batch size.
    """
    swap_axes = lambda x: tf.transpose(x, [1, 0, *range(2, len(x.shape))])  # noqa: E731
    if not time_major:
        inputs = tf.nest.map_structure(swap_axes, inputs)
        mask = None if mask is None else swap_axes(mask)
    if mask is not None and mask.dtype != tf.bool:
        mask = tf.cast(mask, tf.bool)
    sequence = tf.nest.flatten(inputs)[0]
    steps = sequence.shape[0] if sequence.shape[0] is not None else tf.shape(sequence)[0]

    def step(index: Any, states: Any, previous: Any) -> tuple[Any, Any]:
        # In older converters, slices support at most five axes, but gather supports more.
        x = tf.nest.map_structure(lambda x: tf.gather(x, index), inputs)
        output, new_states = step_function(x, (*states, *(constants or ())))
        new_states = tf.nest.pack_sequence_as(states, tf.nest.flatten(new_states))
        if mask is None:
            return output, new_states
        valid = mask[index]
        masked_output = tf.nest.map_structure(tf.zeros_like, output)
        if previous is not None and not zero_output_for_mask:
            masked_output = previous
        return _choose(valid, output, masked_output), _choose(valid, new_states, states)

    states = tuple(initial_states)
    if isinstance(steps, int) and (unroll or steps == 1):
        last, outputs, states = _unroll(step, steps, states, go_backwards)
    else:
        last, outputs, states = _loop(step, steps, states, go_backwards, return_all_outputs)
    if not return_all_outputs or outputs is None:
        outputs = tf.nest.map_structure(lambda y: y[None], last)
    if not time_major:
        outputs = tf.nest.map_structure(swap_axes, outputs)
    return last, outputs, states


Step = Callable[[Any, Any, Any], tuple[Any, Any]]


def _unroll(step: Step, steps: int, states: Any, backwards: bool) -> tuple[Any, Any, Any]:
    output, outputs = None, []
    for index in range(steps):
        output, states = step(steps - 1 - index if backwards else index, states, output)
        outputs.append(output)
    return output, tf.nest.map_structure(lambda *y: tf.stack(y), *outputs), states


def _loop(
    step: Step, steps: int | tf.Tensor, states: Any, backwards: bool, all_outputs: bool
) -> tuple[Any, Any, Any]:
    get_index = lambda count: steps - 1 - count if backwards else count  # noqa: E731
    # The first step is outside the loop, because it determines the shapes of the outputs.
    first, states = step(get_index(0), states, None)
    shapes = tf.nest.map_structure(lambda x: x.shape, (first, states))
    empty = tf.nest.map_structure(
        lambda y: tf.zeros(tf.concat([[steps], tf.shape(y)], 0), y.dtype), first
    )

    def store(outputs: Any, output: Any, count: int | tf.Tensor) -> Any:
        def store_one(stored: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
            here = tf.range(steps) == count
            here = tf.reshape(here, [-1, *[1] * len(new.shape)])
            return tf.where(here, new[None], stored)

        return tf.nest.map_structure(store_one, outputs, output)

    def body(count: tf.Tensor, output: Any, states: Any, *outputs: Any) -> Any:
        output, states = step(get_index(count), states, output)
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


def _choose(valid: tf.Tensor, new: Any, old: Any) -> Any:
    """Return `new` for examples with a valid step, and `old` for all other examples."""

    def choose(new: tf.Tensor, old: tf.Tensor) -> tf.Tensor:
        return tf.where(tf.reshape(valid, [-1, *[1] * (len(new.shape) - 1)]), new, old)

    return tf.nest.map_structure(choose, new, old)
