"""Custom layers as people write them, none of them registered with Keras."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tests.helpers import keras, layers
from tests.networks.computed_kernels import COMPUTED


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

    def call(self, inputs):
        return self.gain * inputs


class OwnGelu(layers.Layer):
    def call(self, inputs):
        return tf.nn.gelu(inputs)


@tf.function
def powered(x):
    return tf.square(x) + x


class OfFunctions(layers.Layer):
    """A layer with a compiled `call` that calls a compiled function."""

    @tf.function
    def call(self, inputs):
        return powered(tf.tanh(inputs))


class ReflectionPadding2D(layers.Layer):
    def call(self, inputs):
        return tf.pad(inputs, [[0, 0], [1, 1], [2, 2], [0, 0]], mode="REFLECT")


class PositionEmbedding(layers.Layer):
    def build(self, input_shape):
        self.table = self.add_weight("table", input_shape[1:], initializer="uniform")

    def call(self, inputs):
        return inputs + tf.expand_dims(self.table, 0)


class EmbeddedPositions(layers.Layer):
    """Embeddings of a range, which read nothing from the model, as in tutorials."""

    def build(self, input_shape):
        self.embedding = layers.Embedding(*input_shape[1:], embeddings_regularizer="l2")
        self.scale = layers.Dense(1, use_bias=False)

    def call(self, inputs):
        positions = self.embedding(tf.range(inputs.shape[1]))
        return inputs + positions + self.scale(tf.ones((1, 3)))


class ClassToken(layers.Layer):
    """Prepends the same token to every sequence."""

    def build(self, input_shape):
        self.token = self.add_weight("token", (1, 1, input_shape[-1]), initializer="uniform")

    def call(self, inputs):
        token = inputs[:, :1] * 0.0 + self.token
        return tf.concat([token, inputs], axis=1)


class ManyTokens(layers.Layer):
    """Prepends several tokens, copied for each example."""

    def build(self, input_shape):
        shape = (1, 1, input_shape[-1])
        self.tokens = [self.add_weight(f"token{i}", shape, initializer="ones") for i in range(3)]

    def call(self, inputs):
        count, size = tf.shape(inputs)[0], inputs.shape[-1]
        copies = [
            tf.tile(self.tokens[0], [count, 1, 1]),
            tf.repeat(self.tokens[1], count, axis=0),
            tf.broadcast_to(self.tokens[2], [count, 1, size]),
        ]
        return tf.concat([*copies, tf.reshape(inputs, [-1, 64, size])], axis=1)


class FixedDropout(layers.Dropout):
    """Dropout with a fixed noise shape, as in efficientnet."""

    def _get_noise_shape(self, inputs):
        sizes = tf.shape(inputs)
        given = self.noise_shape or [None] * len(inputs.shape)
        return tuple(sizes[i] if size is None else size for i, size in enumerate(given))


class Block(layers.Layer):
    """A convolution with BatchNormalization and dropout inside, and a bypass."""

    def __init__(self, filters, **kwargs):
        super().__init__(**kwargs)
        self.conv = layers.Conv2D(filters, 3, padding="same", use_bias=False)
        self.norm = layers.BatchNormalization()
        self.drop = layers.Dropout(0.2)

    def call(self, inputs, training=None):
        x = self.norm(self.conv(inputs), training=training)
        return tf.nn.relu(inputs + self.drop(x, training))


class Residual(layers.Layer):
    """Creates a layer in its `call`, like keras-tcn."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.drop = layers.Dropout(0.2)

    def call(self, inputs, training=None):
        return layers.add([inputs, self.drop(tf.nn.relu(inputs), training=training)])


class Sum(layers.Layer):
    def call(self, inputs):
        return inputs[0] + inputs[1]


class OwnResidual(Residual):
    """Creates a custom layer in its `call`, like deepctr."""

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
    """A convolution with its own weights and TensorFlow's operations."""

    def __init__(self, filters, **kwargs):
        super().__init__(**kwargs)
        self.filters = filters

    def build(self, input_shape):
        shape = (3, 3, input_shape[-1], self.filters)
        self.kernel = self.add_weight("kernel", shape, regularizer=keras.regularizers.l2(0.01))
        self.bias = self.add_weight("bias", (self.filters,))

    def call(self, inputs):
        return tf.nn.conv2d(inputs, self.kernel, strides=2, padding="SAME") + self.bias


class OfBackend(layers.Layer):
    """Convolutions and pooling of `keras.backend`, which use TensorFlow 1."""

    def build(self, input_shape):
        channels = input_shape[-1]
        self.kernel = self.add_weight("kernel", (3, 3, channels, 6))
        self.bias = self.add_weight("bias", (6,))
        self.depthwise = self.add_weight("depthwise", (3, 3, 6, 1))
        self.pointwise = self.add_weight("pointwise", (1, 1, 6, 5))
        self.up = self.add_weight("up", (2, 2, 3, 5))

    def call(self, inputs):
        k = keras.backend
        x = k.relu(k.bias_add(k.conv2d(inputs, self.kernel, padding="same"), self.bias))
        x = k.pool2d(x, (2, 2), (2, 2)) + k.pool2d(x, (2, 2), (2, 2), pool_mode="avg")
        x = k.separable_conv2d(x, self.depthwise, self.pointwise, padding="same")
        x = k.conv2d_transpose(x, self.up, (k.shape(x)[0], 8, 8, 3), (2, 2), padding="same")
        return k.batch_flatten(x)


class OwnDepthwise(layers.DepthwiseConv2D):
    """A subclass of a Keras layer."""

    def call(self, inputs):
        return super().call(inputs) * 0.5


class OwnDense(layers.Layer):
    def build(self, input_shape):
        self.parts = [self.add_weight("kernel", (input_shape[-1], 6)), self.add_weight("b", (6,))]

    def call(self, inputs):
        return tf.nn.relu(tf.nn.bias_add(tf.matmul(inputs, self.parts[0]), self.parts[1]))


class Crossed(layers.Layer):
    """Multiplies over the steps."""

    def build(self, input_shape):
        self.mix = self.add_weight("mix", (input_shape[1], 5))

    def call(self, inputs):
        return tf.tensordot(inputs, self.mix, axes=(1, 0))


class SoftGate(layers.Layer):
    """Computes with functions of its weights."""

    def build(self, input_shape):
        self.logits = self.add_weight("logits", input_shape[-1:], initializer="uniform")

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
    """An activation with an option: an object that is not hashable."""

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


class Blur(layers.Layer):
    """A blur of each channel and a mixture of neighbours, which do not train."""

    def call(self, inputs):
        blur = np.outer([1, 2, 1], [1, 2, 1])[:, :, None, None].repeat(4, 2) / 16
        x = tf.nn.depthwise_conv2d(inputs, blur.astype(np.float32), [1, 2, 2, 1], "SAME")
        pairs = np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 1, 4, 3)
        return tf.nn.conv2d(x, pairs, 1, "VALID")


class PassesTrainingOn(layers.Layer):
    """Passes `training` by position, like layers of some packages."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.mixer = layers.Dense(4)
        self.dropout = layers.Dropout(0.5)

    def __call__(self, inputs, training=None, **kwargs):
        return super().__call__(inputs, training, **kwargs)

    def call(self, inputs, training=None, **kwargs):
        return self.mixer(self.dropout(inputs, training))


class DropsInTraining(layers.Layer):
    """Calls a layer only in training, as in an example of Keras' documentation."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first, self.second = layers.Dense(4), layers.Dense(4, "relu")
        self.short = [layers.Dense(4), layers.Dense(4), layers.Dense(4)]
        self.dropout = layers.Dropout(0.5)

    def call(self, inputs, training=False):
        x = self.second(self.first(inputs))
        if training:
            x = self.dropout(x, training=training)
        for layer in self.short:
            inputs = layer(inputs)
        return x + inputs


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
    "two outputs": two_parts,
    "at each step": lambda x: layers.TimeDistributed(ChannelAffine())(conv(x)),
    "a model at each step": lambda x: layers.TimeDistributed(
        keras.Sequential([keras.Input((8, 4)), layers.Lambda(lambda t: t[:, ::2]), ClassToken()])
    )(x),
    "training by position": lambda x: PassesTrainingOn()(x),
    "a layer in training alone": lambda x: DropsInTraining()(x),
    "paths that are dropped": lambda x: layers.Add()([x, DropPath()(conv(x))]),
    "two inputs": lambda x: Mixed()(conv(x), x, factor=1.5),
    "Lambda, scaled": lambda x: layers.Lambda(lambda t: t / 127.5 - 1.0)(x),
    "Lambda, depth to space": lambda x: layers.Lambda(lambda t: tf.nn.depth_to_space(t, 2))(x),
    "Lambda, mean and maximum": lambda x: layers.Lambda(
        lambda t: tf.concat(
            [tf.reduce_mean(t, axis=-1, keepdims=True), tf.reduce_max(t, axis=-1, keepdims=True)],
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
    **COMPUTED,
}
"""Name -> a function of a tensor of 8 x 8 x 4. All are computed in integers."""


class LateProjection(layers.Layer):
    """A layer created in `build`, which Keras gives the name of an earlier layer."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = layers.Conv2D(4, 1, name="conv")

    def build(self, input_shape):
        self.second = layers.Conv2D(4, 1, name="conv")

    def call(self, inputs):
        return self.first(inputs) + self.second(inputs)
