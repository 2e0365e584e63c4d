"""Examples of operators that move, pool, concatenate and resize."""

import numpy as np
import tensorflow as tf

from keras_qat.helper_layers.operations import FlattenTime, RestoreTime, Roll
from keras_qat.keras2.backend import keras
from tests.ops.examples.example import BATCH, Example, chosen, one_of, sizes

_layers = keras.layers


def _pooling(kind):
    make = {name: getattr(_layers, f"{kind}Pooling{name}") for name in ("1D", "2D")}
    in_nn = {"Max": tf.nn.max_pool2d, "Average": tf.nn.avg_pool2d}[kind]
    in_nn_1d = {"Max": tf.nn.max_pool1d, "Average": tf.nn.avg_pool1d}[kind]

    def example(numbers):
        padding = str(numbers.choice(["same", "valid"]))
        pool, strides = sizes(numbers, 1, 5, 2), sizes(numbers, 1, 4, 2)
        return chosen(
            numbers,
            Example(make["2D"](pool, strides, padding), ((7, 9, 3),)),
            Example(make["2D"](pool[0], padding=padding), ((9, 8, 2),)),
            Example(make["1D"](pool[0], strides[0], padding), ((9, 5),)),
            Example(lambda x: in_nn(x, pool, strides, padding.upper()), ((7, 9, 3),)),
            Example(lambda x: in_nn(x, [1, 2, 3, 1], 2, padding.upper()), ((7, 9, 3),)),
            Example(lambda x: in_nn_1d(x, 3, 2, padding.upper()), ((9, 3),)),
        )

    return example


def _reduction(function, kind="", dtypes=()):
    def example(numbers):
        rank = int(numbers.integers(1, 4 if dtypes else 5))
        shape = sizes(numbers, 2, 7, rank)
        count = int(numbers.integers(1, rank + 2))
        axes = [int(item) for item in numbers.permutation(rank + 1)[:count]]
        keep = bool(numbers.integers(2))
        size = int(numbers.integers(1, 4))
        lengths = (3, 4, 5)[:size]
        examples = [
            Example(lambda x: function(x, axes, keepdims=keep), (shape,), dtypes),
            Example(lambda x: function(x, axes[0], keep), (shape,), dtypes),
            Example(lambda x: function(x), (shape,), dtypes),
            Example(lambda x: function(x, [1, 2], keep), ((6, 7, 5),), dtypes),
        ]
        if kind:
            make = getattr(_layers, f"Global{kind}Pooling{size}D")
            examples += [
                Example(make(keepdims=keep), ((*lengths, 4),)),
                Example(make("channels_first", keepdims=keep), ((4, *lengths),)),
            ]
        return chosen(numbers, *examples)

    return example


def _resize(interpolation):
    def example(numbers):
        new, times = sizes(numbers, 1, 14, 2), sizes(numbers, 1, 4, 2)
        shape = (*sizes(numbers, 1, 9, 2), 3)
        at_least_2 = (max(size, 2) for size in new)
        cropped = _layers.Resizing(*at_least_2, interpolation, crop_to_aspect_ratio=True)
        return chosen(
            numbers,
            Example(_layers.Resizing(*new, interpolation), (shape,)),
            Example(_layers.UpSampling2D(times, interpolation=interpolation), (shape,)),
            Example(cropped, ((7, 9, 3),)),
        )

    return example


def _concatenate(numbers):
    axis, count = int(numbers.integers(0, 4)), int(numbers.integers(2, 5))
    shapes = []
    for _ in range(count):
        shape = [4, 5, 6]
        if axis:
            shape[axis - 1] = int(numbers.integers(1, 7))
        shapes.append(tuple(shape))
    if axis == 0:
        return Example(lambda *x: tf.concat(list(x), 0), tuple(shapes))
    build = chosen(
        numbers,
        lambda *x: _layers.Concatenate(axis)(list(x)),
        lambda *x: _layers.Concatenate(axis - 4)(list(x)),
        lambda *x: tf.concat(list(x), axis),
        lambda *x: tf.concat(list(x), axis=axis - 4),
    )
    return Example(build, tuple(shapes))


def _stack(numbers):
    axis = chosen(numbers, 0, 1, 2, -1, -2)
    return Example(lambda *x: tf.stack(list(x), axis), ((4, 5),) * int(numbers.integers(1, 4)))


def _reshape(numbers):
    axis = int(numbers.integers(-4, 5))
    if numbers.random() < 0.2:
        axis = chosen(numbers, 2, [-2])
        return Example(lambda x: tf.squeeze(x, axis), ((4, 1, 30),))
    build = chosen(
        numbers,
        _layers.Flatten(),
        _layers.Reshape((6, 20)),
        _layers.Reshape((-1, 3)),
        FlattenTime(),
        RestoreTime(1),
        lambda x: tf.reshape(x, [-1, 20, 6]),
        lambda x: tf.reshape(x, [2, -1]),
        lambda x: tf.expand_dims(x, axis),
    )
    return Example(build)


def _transpose(numbers):
    shape = sizes(numbers, 1, 6, numbers.integers(1, 6))
    order = [int(item) + 1 for item in numbers.permutation(len(shape))]
    builds = [_layers.Permute(order), lambda x: tf.transpose(x, [0, *order])]
    if len(shape) > 1:
        builds += [tf.linalg.matrix_transpose, lambda x: tf.transpose(x)]
    return Example(chosen(numbers, *builds), (shape,))


def _pairs(numbers, count):
    return tuple(sizes(numbers, 0, 4, 2) for _ in range(count))


def _pad(numbers):
    shape = sizes(numbers, 2, 5, numbers.integers(1, 5))
    paddings = [(0, 0), *_pairs(numbers, len(shape))]
    builds = [lambda x: tf.pad(x, paddings)]
    if len(shape) > 1:
        kinds = (_layers.ZeroPadding1D, _layers.ZeroPadding2D, _layers.ZeroPadding3D)
        layer, pairs = kinds[len(shape) - 2], _pairs(numbers, len(shape) - 1)
        builds.append(layer(pairs if len(pairs) > 1 else pairs[0]))
    if len(shape) == 3:
        builds.append(_layers.ZeroPadding2D(_pairs(numbers, 2), data_format="channels_first"))
    return Example(chosen(numbers, *builds), (shape,))


def _mirror_pad(numbers):
    shape = sizes(numbers, 4, 6, numbers.integers(1, 4))
    paddings = [(0, 0), *_pairs(numbers, len(shape))]
    mode = str(numbers.choice(["REFLECT", "SYMMETRIC"]))
    return Example(lambda x: tf.pad(x, paddings, mode), (shape,))


def _part(numbers, size):
    kind = numbers.integers(6)
    if kind == 0:
        return int(numbers.integers(-size, size))
    if kind == 1:
        return slice(None, None, -int(numbers.integers(1, 3)))
    begin = int(numbers.integers(size))
    end = int(numbers.integers(begin + 1, size + 1))
    if kind == 2:
        return slice(begin - size, end - size or None, 2)
    return slice(begin, end) if kind == 3 else slice(begin, None) if kind == 4 else slice(None)


def _slice(numbers):
    shape = sizes(numbers, 2, 6, numbers.integers(1, 5))
    index = [slice(None), *(_part(numbers, size) for size in shape)]
    whole = tuple(index)
    if numbers.random() < 0.5:
        index = index[: numbers.integers(1, len(index) + 1)]
        index.insert(int(numbers.integers(1, len(index) + 1)), Ellipsis)
    if numbers.random() < 0.5:
        index.insert(int(numbers.integers(1, len(index) + 1)), tf.newaxis)
    begins = [0, *(int(numbers.integers(size)) for size in shape)]
    lengths = [-1, *(size - low for size, low in zip(shape, begins[1:], strict=True))]
    builds = [
        lambda x: x[tuple(index)],
        lambda x: x[whole],
        lambda x: x[:, 1],
        lambda x: x[..., -1],
        lambda x: tf.slice(x, begins, lengths),
    ]
    crops = (_layers.Cropping1D, _layers.Cropping2D, _layers.Cropping3D)
    if len(shape) > 1:
        cut = tuple((int(numbers.integers(2)), 0) for _ in shape[1:])
        builds.append(crops[len(shape) - 2](cut if len(cut) > 1 else cut[0]))
    return Example(chosen(numbers, *builds), (shape,))


def _gather(numbers):
    if numbers.random() < 0.3:
        batch = int(numbers.integers(2))
        return Example(
            lambda x, where: tf.gather(x, where, axis=1, batch_dims=batch),
            ((5, 6), (3,)),
            ("float32", str(numbers.choice(["int32", "int64"]))),
        )
    axis = int(numbers.integers(1, 4))
    indices = numbers.integers(0, 4, chosen(numbers, (), (3,), (2, 2)))
    kept = chosen(numbers, indices.tolist(), indices.astype(np.int32), indices)
    return Example(lambda x: tf.gather(x, kept, axis=axis))


def _broadcast(numbers):
    return chosen(
        numbers,
        Example(_layers.RepeatVector(int(numbers.integers(1, 5))), ((6,),)),
        Example(lambda x: tf.broadcast_to(x, (BATCH, 3, 5, 6)), ((1, 5, 1),)),
    )


def _repeat(numbers):
    return chosen(
        numbers,
        Example(_layers.UpSampling1D(3), ((4, 5),)),
        Example(_layers.UpSampling3D((2, 1, 3)), ((2, 3, 2, 3),)),
        Example(_layers.UpSampling3D((2, 1, 3), "channels_first"), ((2, 3, 2, 3),)),
        Example(lambda x: tf.repeat(x, 2, axis=2)),
        Example(lambda x: tf.repeat(x, [3, 0, 1, 2], axis=1)),
        Example(lambda x: tf.repeat(x, [2], axis=-1)),
    )


def _blocks(operation, shape):
    return one_of(lambda x: operation(x, 2), lambda x: operation(x, 3), shape=shape)


def _index(function):
    return one_of(
        lambda x: function(x, -1),
        lambda x: function(x, axis=2),
        lambda x: function(x, axis=1, output_type=tf.int32),
        lambda x: function(x),
    )


EXAMPLES = {
    "max_pooling": _pooling("Max"),
    "average_pooling": _pooling("Average"),
    "reduce_max": _reduction(tf.reduce_max, "Max"),
    "reduce_min": _reduction(tf.reduce_min),
    "reduce_any": _reduction(tf.reduce_any, dtypes=("bool",)),
    "reduce_all": _reduction(tf.reduce_all, dtypes=("bool",)),
    "mean": _reduction(tf.reduce_mean, "Average"),
    "mean_of_one": one_of(
        lambda x: _layers.GlobalAveragePooling2D()(x),
        lambda x: _layers.GlobalAveragePooling2D(keepdims=True)(x),
        lambda x: tf.reduce_mean(x, [1, 2]),
        lambda x: tf.reduce_mean(x, 1, keepdims=True),
        shape=(1, 1, 6),
    ),
    "resize_nearest": _resize("nearest"),
    "resize_bilinear": _resize("bilinear"),
    "concatenate": _concatenate,
    "stack": _stack,
    "reshape": _reshape,
    "transpose": _transpose,
    "depth_to_space": _blocks(tf.nn.depth_to_space, (4, 5, 36)),
    "space_to_depth": _blocks(tf.nn.space_to_depth, (6, 12, 3)),
    "pad": _pad,
    "mirror_pad": _mirror_pad,
    "slice": _slice,
    "split": one_of(
        lambda x: tf.split(x, 2, axis=1),
        lambda x: tf.split(x, 3, -1),
        lambda x: tf.split(x, [1, 3, 1], axis=2),
        lambda x: tf.split(x, [2, -1], axis=3),
        lambda x: tf.split(x, [3, 3], axis=-1),
        lambda x: tf.split(x, 1, axis=1),
        lambda x: tf.split(x, [x.shape[1]], axis=1),  # TensorFlow only computes [-1] in graphs.
    ),
    "unstack": one_of(*(lambda x, axis=axis: tf.unstack(x, axis=axis) for axis in (1, 2, -1))),
    "gather": _gather,
    "tile": one_of(
        lambda x: tf.tile(x, [1, 2, 1, 3]),
        lambda x: tf.tile(x, [1, 1, 4, 1]),
        lambda x: tf.tile(x, [3, 1, 1, 1]),
    ),
    "broadcast": _broadcast,
    "repeat": _repeat,
    "reverse": one_of(
        *(lambda x, axes=axes: tf.reverse(x, axes) for axes in ([1], [-1, 1], [2], [1, 2, 3]))
    ),
    "roll": one_of(Roll([2], [1]), Roll([-1, 7], [2, 1]), Roll([1, 1, 5], [1, -1, 2])),
    "shape": one_of(tf.shape, lambda x: tf.shape(x, out_type=tf.int64)),
    "size": one_of(tf.size, lambda x: tf.size(x, out_type=tf.int64)),
    "argmax": _index(tf.argmax),
    "argmin": _index(tf.argmin),
    "top_k": one_of(*(lambda x, k=k: tf.math.top_k(x, k) for k in (1, 3, 6))),
    "identity": one_of(
        _layers.Dropout(0.3),
        _layers.SpatialDropout2D(0.3),
        _layers.RandomFlip(),
        _layers.GaussianNoise(0.3),
        tf.identity,
        tf.stop_gradient,
    ),
}
