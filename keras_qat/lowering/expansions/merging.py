"""Expands calls that merge tensors, such as Add or `tf.concat`, to calls that TFLite supports."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Value
from keras_qat.graph.facts import solve
from keras_qat.graph.operations import read_array
from keras_qat.helper_layers.operations import Contract, OnGrid
from keras_qat.keras2.backend import keras, layers
from keras_qat.keras2.layers_and_models import clone
from keras_qat.lowering.expand_call import Expansion, get_value, is_tensor, require, try_each
from keras_qat.lowering.expansions.matrices import expand_einsum, expand_product
from keras_qat.ops.op import FixedRange, SharedRange
from keras_qat.ops.registry import find_op


def _align_axes(expansion: Expansion | None = None) -> Expansion:
    """Return an expansion of a merging layer that first reshapes all inputs to the same rank.

    Keras adds missing axes after the batch, but TFLite would add them before the batch. If all
    ranks are equal, call `expansion` instead.
    """

    def expand(layer: keras.layers.Layer, inputs: Any, **kwargs: object) -> tf.Tensor:
        inputs = tf.nest.flatten(inputs)
        if len(inputs) == 1:
            return inputs[0]
        rank, aligned = max(len(x.shape) for x in inputs), list(inputs)
        for index, x in enumerate(inputs):
            added = rank - len(x.shape)
            sizes = [-1 if size is None else size for size in x.shape[1:]]
            if added and sizes.count(-1) <= 1:
                aligned[index] = layers.Reshape([1] * added + sizes, name=f"axes{index}")(x)
        if any(x is not y for x, y in zip(inputs, aligned, strict=True)):
            return layer(aligned)
        require(expansion is not None)
        return expansion(layer, inputs) if expansion else None

    return expand


def _merge_pairs(layer: keras.layers.Layer, inputs: Any) -> tf.Tensor:
    """Expand `Add()([a, b, c])` to two calls, because TFLite's ADD has two inputs."""
    require(len(inputs) > 2)
    first, *middle, last = inputs
    for index, x in enumerate(middle, start=1):
        first = type(layer)(name=f"part{index}", dtype=layer.dtype_policy)([first, x])
    return layer([first, last])


def _merge_extremum(layer: keras.layers.Layer, inputs: Any) -> tf.Tensor:
    return (_merge_pairs if len(inputs) > 2 else _convert_fixed_ranges)(layer, inputs)


def _average(layer: keras.layers.Layer, inputs: Any) -> tf.Tensor:
    return layers.Rescaling(1.0 / len(inputs))(layers.Add(name="add")(inputs))


def _custom_scale(layer: keras.layers.Layer, inputs: Any) -> tf.Tensor:
    a, b = inputs
    return layers.Add()([a, layers.Rescaling(layer.scale, name="scale")(b)])


def _dot(layer: keras.layers.Layer, inputs: Any) -> tf.Tensor:
    if not layer.normalize:
        return _convert_second_factor(layer, inputs)
    axes = [layer.axes] * 2 if isinstance(layer.axes, int) else layer.axes
    normalized = [
        layers.UnitNormalization(axis, name=f"norm{index}")(x)
        for index, (axis, x) in enumerate(zip(axes, inputs, strict=True))
    ]
    return clone(layer, normalize=False)(normalized)


def _rescale(layer: keras.layers.Layer, x: tf.Tensor) -> tf.Tensor:
    """Expand a Rescaling or Normalization that TFLite does not support, for example of integers."""
    if not x.dtype.is_floating:
        return layer(tf.cast(x, dtype=layer.compute_dtype, name="cast"))
    if len(x.shape) > 1:  # TFLite's operator needs the number of channels.
        require(x.shape[-1] is None and isinstance(layer, layers.Rescaling))
        scaled = tf.multiply(x, np.float32(layer.scale), name="scaled")
        return tf.add(scaled, np.float32(layer.offset)) if np.any(layer.offset) else scaled
    require(len(x.shape) == 1)
    return layers.Reshape((), name="flat")(layer(layers.Reshape((1,), name="column")(x)))


def _multiply_matrices(a: tf.Tensor, b: tf.Tensor, *flags: object, **options: object) -> tf.Tensor:
    """Expand `tf.matmul([a, b], c)` to `tf.matmul(tf.stack([a, b]), c)`."""
    pair = [a, b]
    if not any(isinstance(factor, (list, tuple)) for factor in pair):
        return _convert_second_factor(tf.matmul, a, b, *flags, **options)
    for index, factor in enumerate(pair):
        if isinstance(factor, (list, tuple)):
            require(all(map(is_tensor, factor)))
            pair[index] = tf.stack(list(factor), name="ab"[index])
    return tf.matmul(*pair, *flags, **options)


def _einsum(equation: str, *inputs: Any, **kwargs: object) -> tf.Tensor:
    require(len(inputs) == 2 and all(map(is_tensor, inputs)))
    return Contract(equation)(list(inputs))


def _limit(
    x: tf.Tensor,
    y: tf.Tensor,
    *,
    sign: int,
    merge: Callable[..., Any],
    operation: Callable[..., Any],
) -> tf.Tensor:
    """Expand `tf.maximum(x, 6.0)`, for example, if 6.0 may lie outside the range of `x`.

    The constant becomes a tensor, the output of an OnGrid layer. Both inputs then share one range.
    """
    tensor, limit = (x, read_array(y)) if is_tensor(x) else (y, read_array(x))
    farthest = 0.0 if limit is None else float(sign * np.max(sign * limit))
    if limit is None or not tensor.dtype.is_floating or limit.ndim > len(tensor.shape):
        return _convert_fixed_ranges(operation, x, y)
    fixed = solve(get_value(tensor), find_fixed_range)
    require(sign * farthest > 0 and not (fixed and fixed[0] <= farthest <= fixed[1]))
    if fixed:
        tensor = layers.Rescaling(1.0, name="input")(tensor)
    return merge()([tensor, OnGrid(limit.tolist(), name="number")(tensor)])


def _convert_fixed_ranges(layer: Callable[..., Any], *args: object, **kwargs: object) -> tf.Tensor:
    """Apply a Rescaling(1) to inputs with a fixed range, if other inputs have other ranges.

    For example, a sigmoid always has the range 0 to 1, but a concatenation needs one range for all
    inputs. The Rescaling converts the sigmoid's results to this range.
    """
    answers: dict[Value, Any] = {}
    tensors = list(filter(is_tensor, tf.nest.flatten((args, kwargs))))
    fixed = [solve(get_value(x), find_fixed_range, answers) for x in tensors]
    require(len(set(fixed)) > 1)
    chosen = [x for x, limits in zip(tensors, fixed, strict=True) if limits]
    return _call_with_rescaled(layer, args, kwargs, tensors, chosen)


def _convert_second_factor(layer: Callable[..., Any], *args: object, **kwargs: object) -> tf.Tensor:
    """Apply a Rescaling(1) to the second factor of a product if it is a softmax, for example.

    A softmax has the fixed range 0 to 1. XNNPACK requires a range that is symmetric around 0.
    """
    tensors = list(filter(is_tensor, tf.nest.flatten((args, kwargs))))
    require(len(tensors) == 2)
    limits = solve(get_value(tensors[1]), find_fixed_range)
    require(limits and limits[0] == 0)
    return _call_with_rescaled(layer, args, kwargs, tensors, tensors[1:])


def _call_with_rescaled(
    layer: Callable[..., Any], args: Any, kwargs: Any, tensors: list[Any], chosen: list[Any]
) -> tf.Tensor:
    """Call a layer or an operation with a Rescaling(1) of each tensor in `chosen`."""
    rescaled: dict[int, Any] = {}
    for x in chosen:
        if len(x.shape) >= 2 and id(x) not in rescaled:
            index = next(index for index, tensor in enumerate(tensors) if tensor is x)
            rescaled[id(x)] = layers.Rescaling(1.0, name=f"input{index}")(x)
    require(rescaled)
    args, kwargs = tf.nest.map_structure(lambda leaf: rescaled.get(id(leaf), leaf), (args, kwargs))
    return layer(*args, **kwargs)


def find_fixed_range(value: Value) -> Generator[Value, Any, tuple[float, float] | None]:
    """Find the range that TFLite requires for a tensor, such as (-1, 1) for the result of a tanh.

    A reshape, for example, has the range of its input. Return None if TFLite requires no range.
    """
    call = value.producer
    op = find_op(call) if call else None
    if call is not None and op is not None and isinstance(op.output, SharedRange):
        ranges = set()
        for x in call.inputs:
            ranges.add((yield x))
        return ranges.pop() if len(ranges) == 1 else None
    if op is None or not isinstance(op.output, FixedRange):
        return None
    return op.output.minimum, op.output.maximum


OPERATIONS: dict[str, Expansion] = {
    "concat": lambda values, axis=0: _convert_fixed_ranges(tf.concat, values, axis),
    "stack": lambda values, axis=0: _convert_fixed_ranges(tf.stack, values, axis),
    "maximum": partial(_limit, sign=1, merge=layers.Maximum, operation=tf.maximum),
    "minimum": partial(_limit, sign=-1, merge=layers.Minimum, operation=tf.minimum),
}

OF_FLOATS: dict[str, Expansion] = {
    "matmul": try_each(_multiply_matrices, expand_product),
    "einsum": try_each(_einsum, expand_einsum),
}

LAYERS_ALWAYS: dict[type | str, Expansion] = {
    **dict.fromkeys((layers.Add, layers.Multiply), _align_axes(_merge_pairs)),
    layers.Average: _align_axes(_average),
    layers.Subtract: _align_axes(),
    "applications.inception_resnet_v2.CustomScaleLayer": _custom_scale,
}

LAYERS: dict[type | str, Expansion] = {
    Contract: _convert_second_factor,
    **dict.fromkeys((layers.Normalization, layers.Rescaling), _rescale),
    layers.Dot: _dot,
    layers.Concatenate: _align_axes(_convert_fixed_ranges),
    **dict.fromkeys((layers.Maximum, layers.Minimum), _align_axes(_merge_extremum)),
}
