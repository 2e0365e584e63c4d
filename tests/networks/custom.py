"""Custom layers as people write them, none of them registered with Keras."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.frontend.keras2.backend import keras

layers = keras.layers

__all__ = ["CLOSED", "COMPUTED", "OPENED"]

COMPUTED = (
    *("standardized weights", "normalized weights", "a standardized kernel", "a masked kernel"),
    *("a normalized depthwise kernel", "a kernel of complex numbers"),
    *("normalized transposed kernels", "a normalized kernel with gaps"),
)
"""Names in `OPENED` of layers whose kernel is computed from weights."""


class ChannelAffine(layers.Layer):
    """A factor and an offset for each channel."""

    def build(self, input_shape):
        self.weight = self.add_weight("weight", input_shape[-1:], initializer="ones")
        self.bias = self.add_weight("bias", input_shape[-1:])
        super().build(input_shape)

    def call(self, inputs):
        return inputs * self.weight + self.bias


class ZeroInitGain(layers.Layer):
    def build(self, input_shape):
        self.gain = self.add_weight("gain", (), initializer="zeros")
        super().build(input_shape)

    def call(self, inputs):
        return self.gain * inputs


class OwnGelu(layers.Layer):
    def call(self, inputs):
        return tf.nn.gelu(inputs)


@tf.function
def powered(x):
    return tf.square(x) + x


class OfFunctions(layers.Layer):
    """A `call` that TensorFlow compiles, and a function that it compiles inside."""

    @tf.function
    def call(self, inputs):
        return powered(tf.tanh(inputs))


class ReflectionPadding2D(layers.Layer):
    def call(self, inputs):
        return tf.pad(inputs, [[0, 0], [1, 1], [2, 2], [0, 0]], mode="REFLECT")


class PositionEmbedding(layers.Layer):
    def build(self, input_shape):
        self.table = self.add_weight("table", input_shape[1:], initializer="uniform")
        super().build(input_shape)

    def call(self, inputs):
        return inputs + tf.expand_dims(self.table, 0)


class EmbeddedPositions(layers.Layer):
    """As in tutorials: an embedding of a range, which reads nothing of the model."""

    def build(self, input_shape):
        self.embedding = layers.Embedding(*input_shape[1:], embeddings_regularizer="l2")
        self.scale = layers.Dense(1, use_bias=False)
        super().build(input_shape)

    def call(self, inputs):
        positions = self.embedding(tf.range(inputs.shape[1]))
        return inputs + positions + self.scale(tf.ones((1, 3)))


class ClassToken(layers.Layer):
    """In front of the sequence, for every example the same."""

    def build(self, input_shape):
        self.token = self.add_weight("token", (1, 1, input_shape[-1]), initializer="uniform")
        super().build(input_shape)

    def call(self, inputs):
        token = inputs[:, :1] * 0.0 + self.token
        return tf.concat([token, inputs], axis=1)


class ManyTokens(layers.Layer):
    """Several of them, as a copy for each example."""

    def build(self, input_shape):
        shape = (1, 1, input_shape[-1])
        self.tokens = [self.add_weight(f"token{i}", shape, initializer="ones") for i in range(3)]
        super().build(input_shape)

    def call(self, inputs):
        count, size = tf.shape(inputs)[0], inputs.shape[-1]
        copies = [
            tf.tile(self.tokens[0], [count, 1, 1]),
            tf.repeat(self.tokens[1], count, axis=0),
            tf.broadcast_to(self.tokens[2], [count, 1, size]),
        ]
        return tf.concat([*copies, tf.reshape(inputs, [-1, 64, size])], axis=1)


class FixedDropout(layers.Dropout):
    """As efficientnet has it."""

    def _get_noise_shape(self, inputs):
        sizes = tf.shape(inputs)
        given = self.noise_shape or [None] * len(inputs.shape)
        return tuple(sizes[i] if size is None else size for i, size in enumerate(given))


class Block(layers.Layer):
    """A convolution with BatchNormalization and dropout inside, and a way past it."""

    def __init__(self, filters, **kwargs):
        super().__init__(**kwargs)
        self.conv = layers.Conv2D(filters, 3, padding="same", use_bias=False)
        self.norm = layers.BatchNormalization()
        self.drop = layers.Dropout(0.2)

    def call(self, inputs, training=None):
        x = self.norm(self.conv(inputs), training=training)
        return tf.nn.relu(inputs + self.drop(x, training))


class Residual(layers.Layer):
    """Makes a layer in its `call`, as keras-tcn does."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.drop = layers.Dropout(0.2)

    def call(self, inputs, training=None):
        return layers.add([inputs, self.drop(tf.nn.relu(inputs), training=training)])


class Sum(layers.Layer):
    def call(self, inputs):
        return inputs[0] + inputs[1]


class OwnResidual(Residual):
    """Makes a layer of one's own in its `call`, as deepctr does."""

    def call(self, inputs, training=None):
        return Sum()([inputs, self.drop(tf.nn.relu(inputs), training=training)])


class Stage(layers.Layer):
    """Blocks in a list, one of them called twice, and a Lambda."""

    def __init__(self, filters, **kwargs):
        super().__init__(**kwargs)
        self.blocks = [Block(filters), Block(filters)]
        self.half = layers.Lambda(lambda x: x / 2.0)

    def call(self, inputs):
        x = self.blocks[1](self.blocks[0](inputs))
        return self.blocks[0](self.half(x))


class OwnConv(layers.Layer):
    """Weights of its own, TensorFlow's operations."""

    def __init__(self, filters, **kwargs):
        super().__init__(**kwargs)
        self.filters = filters

    def build(self, input_shape):
        shape = (3, 3, input_shape[-1], self.filters)
        self.kernel = self.add_weight("kernel", shape, regularizer=keras.regularizers.l2(0.01))
        self.bias = self.add_weight("bias", (self.filters,))
        super().build(input_shape)

    def call(self, inputs):
        return tf.nn.conv2d(inputs, self.kernel, strides=2, padding="SAME") + self.bias


class OfBackend(layers.Layer):
    """What `keras.backend` makes of convolutions and pooling, in the forms of TensorFlow 1."""

    def build(self, input_shape):
        channels = input_shape[-1]
        self.kernel = self.add_weight("kernel", (3, 3, channels, 6))
        self.bias = self.add_weight("bias", (6,))
        self.depthwise = self.add_weight("depthwise", (3, 3, 6, 1))
        self.pointwise = self.add_weight("pointwise", (1, 1, 6, 5))
        self.up = self.add_weight("up", (2, 2, 3, 5))
        super().build(input_shape)

    def call(self, inputs):
        k = keras.backend
        x = k.relu(k.bias_add(k.conv2d(inputs, self.kernel, padding="same"), self.bias))
        x = k.pool2d(x, (2, 2), (2, 2)) + k.pool2d(x, (2, 2), (2, 2), pool_mode="avg")
        x = k.separable_conv2d(x, self.depthwise, self.pointwise, padding="same")
        x = k.conv2d_transpose(x, self.up, (k.shape(x)[0], 8, 8, 3), (2, 2), padding="same")
        return k.batch_flatten(x)


class OwnDepthwise(layers.DepthwiseConv2D):
    """A subclass of a layer of Keras'."""

    def call(self, inputs):
        return super().call(inputs) * 0.5


class OwnDense(layers.Layer):
    def build(self, input_shape):
        self.parts = [self.add_weight("kernel", (input_shape[-1], 6)), self.add_weight("b", (6,))]
        super().build(input_shape)

    def call(self, inputs):
        return tf.nn.relu(tf.nn.bias_add(tf.matmul(inputs, self.parts[0]), self.parts[1]))


class Crossed(layers.Layer):
    """A product over the steps."""

    def build(self, input_shape):
        self.mix = self.add_weight("mix", (input_shape[1], 5))
        super().build(input_shape)

    def call(self, inputs):
        return tf.tensordot(inputs, self.mix, axes=(1, 0))


class SoftGate(layers.Layer):
    """Computes with what it makes of its weights."""

    def build(self, input_shape):
        self.logits = self.add_weight("logits", input_shape[-1:], initializer="uniform")
        super().build(input_shape)

    def call(self, inputs):
        return inputs * tf.reshape(tf.nn.softmax(self.logits), [1, 1, 1, -1])


class SplitInTwo(layers.Layer):
    def call(self, inputs):
        return {"first": inputs[..., :2], "second": tf.nn.relu(inputs[..., 2:])}


class DropPath(layers.Layer):
    def call(self, inputs, training=None):
        if training:
            kept = tf.cast(tf.random.uniform([tf.shape(inputs)[0], 1, 1, 1]) > 0.2, inputs.dtype)
            return inputs * kept / 0.8
        return inputs


class Mixed(layers.Layer):
    """Several inputs, options and constants."""

    def call(self, a, b, factor=2.0):
        return tf.maximum(a * factor, b) - tf.constant([0.1, 0.2, 0.3, 0.4])


def hard_swish(x):
    return x * tf.nn.relu6(x + 3.0) / 6.0


def hard_sigmoid_torch(x):
    return tf.nn.relu6(x + 3.0) / 6.0


@dataclasses.dataclass
class Steep:
    """An activation with an option: an object without a hash."""

    by: float

    def __call__(self, x):
        return tf.nn.relu(x * self.by)


def mish(x):
    return x * tf.math.tanh(tf.math.softplus(x))


def shuffle(x):
    x = tf.reshape(x, [-1, 8, 8, 2, 2])
    return tf.reshape(tf.transpose(x, [0, 1, 2, 4, 3]), [-1, 8, 8, 4])


def conv(x, **options):
    return layers.Conv2D(4, 3, padding="same", **options)(x)


def twice(x):
    affine = ChannelAffine()
    return affine(tf.nn.relu(affine(x)))


def two_parts(x):
    parts = SplitInTwo()(x)
    return layers.Concatenate()([parts["second"], parts["first"]])


class StandardizedDense(layers.Layer):
    """Reads its weights several times to compute those that it multiplies by."""

    def build(self, input_shape):
        self.kernel = self.add_weight("kernel", (input_shape[-1], 5))
        super().build(input_shape)

    def call(self, inputs):
        mean, variance = tf.nn.moments(self.kernel, 0)
        return tf.matmul(inputs, (self.kernel - mean) / tf.sqrt(variance + 1e-6))


class WeightNormalized(layers.Layer):
    """A direction and a length for each filter."""

    def build(self, input_shape):
        shape = (3, 3, input_shape[-1], 5)
        self.length = self.add_weight("g", shape[-1:], initializer="ones")
        self.direction = self.add_weight("v", shape, regularizer=keras.regularizers.l2(0.01))
        self.bias = self.add_weight("b", shape[-1:])
        super().build(input_shape)

    def call(self, inputs):
        norms = tf.sqrt(tf.reduce_sum(tf.square(self.direction), [0, 1, 2]))
        kernel = self.length * self.direction / norms
        return tf.nn.conv2d(inputs, kernel, 1, "SAME") + self.bias


class WeightStandardized(layers.Conv2D):
    """A subclass that standardizes its kernel."""

    def call(self, inputs):
        mean, variance = tf.nn.moments(self.kernel, [0, 1, 2], keepdims=True)
        kernel = (self.kernel - mean) * tf.math.rsqrt(variance + 1e-5)
        return tf.nn.bias_add(self.convolution_op(inputs, kernel), self.bias)


class MaskedSteps(layers.Layer):
    """A kernel that sees no later steps, as its mask, which does not train, says."""

    def build(self, input_shape):
        mask = keras.initializers.Constant(np.array([1, 1, 0], np.float32).reshape(3, 1, 1))
        self.mask = self.add_weight("mask", (3, 1, 1), initializer=mask, trainable=False)
        self.kernel = self.add_weight("kernel", (3, input_shape[-1], 5))
        super().build(input_shape)

    def call(self, inputs):
        return tf.nn.conv1d(inputs, self.mask * self.kernel, 1, "SAME")


class NormalizedDepthwise(layers.Layer):
    def build(self, input_shape):
        self.kernel = self.add_weight("kernel", (3, 3, input_shape[-1], 2))
        super().build(input_shape)

    def call(self, inputs):
        kernel = tf.nn.l2_normalize(self.kernel, [0, 1])
        return tf.nn.depthwise_conv2d(inputs, kernel, [1, 1, 1, 1], "VALID")


class NormalizedTransposed(layers.Layer):
    """Of images and then of their rows, to the sizes that Keras' layers have."""

    def build(self, input_shape):
        self.kernel = self.add_weight("kernel", (3, 3, 5, input_shape[-1]))
        self.steps = self.add_weight("steps", (4, 3, 5))
        super().build(input_shape)

    def call(self, inputs):
        count, height, width = tf.unstack(tf.shape(inputs)[:3])
        kernel, steps = (tf.nn.l2_normalize(w, [0, 1]) for w in (self.kernel, self.steps))
        shape = [count, 2 * height, 2 * width, 5]
        x = tf.nn.conv2d_transpose(inputs, kernel, shape, 2, "SAME")[:, 1]
        return tf.nn.conv1d_transpose(x, steps, [count, 4 * width, 3], 2, "SAME")


class NormalizedWithGaps(layers.Layer):
    """Convolves sequences by the function for any number of axes."""

    def build(self, input_shape):
        self.kernel = self.add_weight("kernel", (3, input_shape[-1], 5))
        super().build(input_shape)

    def call(self, inputs):
        kernel = tf.nn.l2_normalize(self.kernel, [0, 1])
        return tf.nn.convolution(inputs, kernel, padding="SAME", dilations=[2])


class Oscillating(layers.Layer):
    """A depthwise kernel of oscillations that fade, as those of state spaces."""

    def build(self, input_shape):
        shape = (input_shape[-1],)
        self.rate = self.add_weight("rate", shape, initializer="ones")
        self.pitch = self.add_weight("pitch", shape, initializer="ones")
        super().build(input_shape)

    def call(self, inputs):
        rates = tf.complex(-tf.exp(self.rate), self.pitch)
        steps = rates[:, None] * tf.cast(tf.range(3), tf.complex64)
        kernel = tf.transpose(tf.math.real(tf.exp(steps) - 0.5j))[:, None, :, None]
        return tf.nn.depthwise_conv2d(inputs, kernel, [1, 1, 1, 1], "VALID")


class Blur(layers.Layer):
    """A blur of each channel and a mixture of neighbours, which do not train."""

    def call(self, inputs):
        blur = np.outer([1, 2, 1], [1, 2, 1])[:, :, None, None].repeat(4, 2) / 16
        x = tf.nn.depthwise_conv2d(inputs, blur.astype(np.float32), [1, 2, 2, 1], "SAME")
        pairs = np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 1, 4, 3)
        return tf.nn.conv2d(x, pairs, 1, "VALID")


OPENED: dict[str, Callable[[Any], Any]] = {
    "a factor and an offset for each channel": lambda x: ChannelAffine()(conv(x)),
    "called twice": twice,
    "a gain": lambda x: layers.Add()([x, ZeroInitGain()(conv(x))]),
    "an own GELU": lambda x: OwnGelu()(conv(x)),
    "tf.function": lambda x: OfFunctions()(conv(x)),
    "padding": lambda x: conv(ReflectionPadding2D()(x)),
    "positions": lambda x: PositionEmbedding()(x),
    "embedded positions": lambda x: EmbeddedPositions()(layers.Reshape((64, 4))(x)),
    "a class token": lambda x: ClassToken()(layers.Reshape((64, 4))(x)),
    "a copy for each example": lambda x: ManyTokens()(conv(x)),
    "a dropout": lambda x: FixedDropout(0.01, noise_shape=(None, 1, 1, 1))(conv(x)),
    "a block": lambda x: Block(4)(x),
    "two layers of one name": lambda x: LateProjection()(x),
    "a layer made in call": lambda x: Residual()(conv(x)),
    "an own layer made in call": lambda x: OwnResidual()(conv(x)),
    "a block of blocks": lambda x: Stage(4)(x),
    "a convolution of one's own": lambda x: tf.nn.relu(OwnConv(6)(x)),
    "Keras' backend": lambda x: OfBackend()(x),
    "a subclass": lambda x: OwnDepthwise(3, padding="same")(x),
    "a product over the steps": lambda x: Crossed()(layers.Reshape((64, 4))(x)),
    "a matrix product of one's own": lambda x: OwnDense()(x),
    "computed from weights": lambda x: SoftGate()(x),
    "standardized weights": lambda x: StandardizedDense()(conv(x)),
    "normalized weights": lambda x: tf.nn.relu(WeightNormalized()(x)),
    "a standardized kernel": lambda x: layers.BatchNormalization()(WeightStandardized(5, 3)(x)),
    "a masked kernel": lambda x: MaskedSteps()(layers.Reshape((64, 4))(x)),
    "a normalized depthwise kernel": lambda x: NormalizedDepthwise()(x),
    "a kernel of complex numbers": lambda x: Oscillating()(x),
    "normalized transposed kernels": lambda x: NormalizedTransposed()(x),
    "a normalized kernel with gaps": lambda x: NormalizedWithGaps()(layers.Reshape((64, 4))(x)),
    "two outputs": two_parts,
    "at each step": lambda x: layers.TimeDistributed(ChannelAffine())(conv(x)),
    "a model at each step": lambda x: layers.TimeDistributed(
        keras.Sequential([keras.Input((8, 4)), layers.Lambda(lambda t: t[:, ::2]), ClassToken()])
    )(x),
    "paths that are dropped": lambda x: layers.Add()([x, DropPath()(conv(x))]),
    "two inputs": lambda x: Mixed()(conv(x), x, factor=1.5),
    "Lambda, scaled": lambda x: layers.Lambda(lambda t: t / 127.5 - 1.0)(x),
    "Lambda, depth to space": lambda x: layers.Lambda(lambda t: tf.nn.depth_to_space(t, 2))(x),
    "Lambda, mean and maximum": lambda x: layers.Lambda(
        lambda t: tf.concat(
            [
                tf.reduce_mean(t, axis=-1, keepdims=True),
                tf.reduce_max(t, axis=-1, keepdims=True),
            ],
            axis=-1,
        )
    )(conv(x)),
    "Lambda, a channel shuffle": lambda x: layers.Lambda(shuffle)(x),
    "Lambda, a slice": lambda x: layers.Lambda(lambda t: t[:, ::2, 1:, :2])(x),
    "Lambda, a distance": lambda x: layers.Lambda(lambda t: tf.abs(t[0] - t[1]))([x, conv(x)]),
    "Lambda, a gate": lambda x: layers.Lambda(lambda t: tf.nn.softmax(tf.sigmoid(t * 3.0)) * t)(x),
    "Lambda, an option": lambda x: layers.Lambda(lambda t, by: t * by, arguments={"by": 3.0})(x),
    "Activation(function)": lambda x: layers.Activation(hard_swish)(conv(x)),
    "activation=function": lambda x: conv(x, activation=hard_sigmoid_torch),
    "activation of TensorFlow": lambda x: layers.Dense(3, tf.exp)(conv(x, activation=tf.sin)),
    "mish": lambda x: conv(x, activation=mish),
    "kernels that are constants": lambda x: Blur()(conv(x)),
}
"""Name -> what it makes of a tensor of 8 x 8 x 4; all are computed in integers."""


class ByValue(layers.Layer):
    def call(self, inputs):
        if tf.reduce_max(inputs) > 1:
            return inputs * 2.0
        return inputs


class InNumpy(layers.Layer):
    def call(self, inputs):
        return tf.ensure_shape(tf.numpy_function(np.abs, [inputs], tf.float32), inputs.shape)


class Random(layers.Layer):
    def call(self, inputs):
        return inputs + tf.random.uniform((4,))


class Counting(layers.Layer):
    calls = 0

    def call(self, inputs):
        self.calls += 1
        return inputs * float(self.calls)


class OwnNorm(layers.Layer):
    def call(self, inputs):
        mean = tf.reduce_mean(inputs, axis=-1, keepdims=True)
        spread = tf.reduce_mean((inputs - mean) ** 2, axis=-1, keepdims=True)
        return (inputs - mean) * tf.math.rsqrt(spread + 1e-3)


class WithLoss(layers.Layer):
    def call(self, inputs):
        self.add_loss(lambda: tf.constant(1.0))
        return inputs * 2.0


class NoisyInTraining(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(4)

    def call(self, inputs, training=None):
        return self.dense(inputs) * 2.0 if training else self.dense(inputs) * 3.0


CLOSED: dict[str, tuple[Callable[[], Any], str]] = {
    "by value": (ByValue, r"in `if tf.reduce_max\(inputs\) > 1:`"),
    "numpy": (InNumpy, "InvalidArgument|numpy|KerasTensor|Error"),
    "random": (Random, "not compute the same each time"),
    "counting": (Counting, "not compute the same each time"),
    "normalization": (OwnNorm, r"it normalizes \(tf.math.rsqrt\)"),
    "a loss": (WithLoss, "it calls add_loss|adds to the loss"),
    "training": (NoisyInTraining, "computes differently in training"),
}
"""Name -> a layer that cannot be opened, and what is said of it."""


class Reversible(layers.Layer):
    """Normalizes a series, and takes that back in a second call (RevIN)."""

    def build(self, input_shape):
        if isinstance(input_shape, list):
            input_shape = input_shape[0]
        self.gain = self.add_weight("gain", input_shape[-1:], initializer="ones")
        super().build(input_shape)

    def call(self, inputs, statistics=None):
        if statistics is not None:
            mean, deviation = statistics
            return inputs / (self.gain + 1e-10) * deviation + mean
        mean, variance = tf.nn.moments(inputs, 1, keepdims=True)
        deviation = tf.sqrt(variance + 1e-5)
        return (inputs - mean) / deviation * (2.0 * self.gain), mean, deviation


class LateProjection(layers.Layer):
    """A layer made in `build`, which Keras names like the one made before."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = layers.Conv2D(4, 1, name="conv")

    def build(self, input_shape):
        self.second = layers.Conv2D(4, 1, name="conv")
        super().build(input_shape)

    def call(self, inputs):
        return self.first(inputs) + self.second(inputs)


class Net(keras.Model):
    """A subclassed model, with layers in a list, weights of its own and a part called twice."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.stem = layers.Conv2D(4, 3, padding="same", activation="relu")
        self.blocks = [Block(4), Block(4)]
        self.pool, self.head = layers.GlobalAveragePooling2D(), layers.Dense(3, name="logits")

    def build(self, input_shape):
        self.scale = self.add_weight("scale", (4,), initializer="ones")
        super().build(input_shape)

    def call(self, inputs, training=None):
        x = self.stem(inputs) * self.scale
        for block in self.blocks:
            x = block(x, training=training)
        return self.head(self.pool(self.stem(x)))
