"""Models in which several operations or layers read one weight, or weights belong to no layer."""

import numpy as np
import tensorflow as tf

from tests.helpers import images, keras, layers, rng

TOKENS = rng().integers(0, 20, (16, 6)).astype(np.int32)


IMAGES = rng().normal(size=(16, 8, 8, 1)).astype(np.float32)


class TiedHead(layers.Layer):
    """Computes logits by the transposed table of an embedding."""

    def __init__(self, embedding, **kwargs):
        super().__init__(**kwargs)
        self.embedding = embedding

    def call(self, x):
        return tf.matmul(x, self.embedding.embeddings, transpose_b=True)


def language_model(head, **options):
    tokens = keras.Input((6,), dtype="int32", name="tokens")
    table = layers.Embedding(20, 8, name="table", **options)
    x = layers.Dense(8, "relu", name="hidden")(table(tokens))
    return keras.Model(tokens, head(table)(x)), TOKENS


class Transposed(layers.Layer):
    """A dense layer with the transposed kernel of another layer."""

    def __init__(self, dense, **kwargs):
        super().__init__(**kwargs)
        self.dense = dense

    def build(self, input_shape):
        self.bias = self.add_weight("bias", (self.dense.kernel.shape[0],))

    def call(self, x):
        return tf.nn.relu(tf.matmul(x, self.dense.kernel, transpose_b=True) + self.bias)


def autoencoder():
    inputs = keras.Input((8,), name="row")
    first, second = layers.Dense(6, "relu", name="first"), layers.Dense(4, name="second")
    x = second(first(inputs))
    model = keras.Model(inputs, Transposed(first, name="b")(Transposed(second, name="a")(x)))
    return model, rng().normal(size=(16, 8)).astype(np.float32)


def inside_one_layer():
    tokens = keras.Input((6,), dtype="int32", name="tokens")
    return keras.Model(tokens, Block(name="block")(tokens)), TOKENS


class Subclassed(keras.Model):
    """A model whose call reads a layer's weights, and passes them to another layer."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.block, self.hidden = Block(), layers.Dense(8)
        self.head = TiedHead(self.block.table)

    def call(self, tokens):
        x = self.block(tokens)
        x = tf.matmul(x, self.block.table.embeddings) + self.hidden(self.block.table(tokens))
        return self.head(tf.nn.relu(x))


def subclassed():
    model = Subclassed()
    model(TOKENS)
    return model, TOKENS


class Block(layers.Layer):
    """Tied embeddings inside of one layer."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table, self.hidden = layers.Embedding(20, 8), layers.Dense(8, "relu")

    def call(self, tokens):
        x = self.hidden(self.table(tokens))
        return tf.matmul(x, self.table.embeddings, transpose_b=True)


class Masked(layers.Layer):
    """A PixelCNN as in tutorials: a convolution with a kernel that is masked in each call."""

    def __init__(self, sees_itself, **kwargs):
        super().__init__(name=kwargs.pop("name", None))
        self.sees_itself, self.conv = sees_itself, layers.Conv2D(**kwargs)

    def build(self, input_shape):
        self.conv.build(input_shape)
        self.mask = np.zeros(self.conv.kernel.shape)
        self.mask[:1] = 1.0
        self.mask[1, : 1 + self.sees_itself] = 1.0

    def call(self, inputs):
        self.conv.kernel.assign(self.conv.kernel * self.mask)
        return self.conv(inputs)


class Residual(layers.Layer):
    """A masked convolution between two other convolutions."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.before = layers.Conv2D(4, 1, activation="relu")
        self.masked = Masked(True, filters=4, kernel_size=3, activation="relu", padding="same")
        self.after = layers.Conv2D(4, 1)

    def call(self, x):
        return layers.add([x, self.after(self.masked(self.before(x)))])


class MaskedConv(layers.Conv2D):
    """A convolution that masks its own kernel in each call."""

    def build(self, input_shape):
        super().build(input_shape)
        self.mask = np.tril(np.ones((3, 3), np.float32))[..., None, None]

    def call(self, x):
        self.kernel.assign(self.kernel * self.mask)
        return super().call(x)


def pixel_cnn():
    image = keras.Input((8, 8, 1), name="image")
    x = Masked(False, filters=4, kernel_size=3, activation="relu", padding="same", name="a")(image)
    x = MaskedConv(3, 3, name="c")(Residual(name="b")(x))
    return keras.Model(image, x), IMAGES


class WeightNorm(layers.Wrapper):
    """Assigns a normalized kernel to its inner layer, like TensorFlow Addons."""

    def build(self, input_shape):
        self.layer.build(input_shape)
        self.v = self.layer.kernel
        self.g = self.add_weight("g", self.v.shape[-1:], initializer="ones")
        super().build(input_shape)

    def call(self, x):
        axes = list(range(len(self.v.shape) - 1))
        self.layer.kernel = tf.nn.l2_normalize(self.v, axis=axes) * self.g
        return self.layer(x)


def normalized():
    image = keras.Input((8, 8, 1), name="image")
    x = WeightNorm(layers.Conv2D(4, 3, activation="relu"))(image)
    return keras.Model(image, WeightNorm(layers.Dense(3))(x)), IMAGES


class Twice(layers.Layer):
    """Uses one kernel in two convolutions, and one offset for both."""

    def build(self, input_shape):
        self.kernel = self.add_weight("kernel", (3, 3, input_shape[-1], 4))
        self.offset = self.add_weight("offset", (4,))

    def call(self, inputs):
        near = tf.nn.conv2d(inputs, self.kernel, 1, "SAME") + self.offset
        return near + tf.nn.conv2d(inputs, self.kernel, 1, "SAME", dilations=2) + self.offset


class Demodulated(layers.Layer):
    """A convolution divided by the length of its kernels, of any size, as in generators."""

    def __init__(self, size=3, strides=2, **kwargs):
        super().__init__(**kwargs)
        self.size, self.strides = size, strides

    def build(self, input_shape):
        self.kernel = self.add_weight("kernel", (self.size, self.size, input_shape[-1], 4))

    def call(self, inputs):
        lengths = 1.0 + tf.reduce_sum(tf.abs(self.kernel), [0, 1, 2])
        return tf.nn.conv2d(inputs, self.kernel, self.strides, "VALID") * lengths


class Turned(Twice):
    """Uses one kernel, and the same kernel transposed."""

    def call(self, inputs):
        turned = tf.reverse(self.kernel, [0, 1])
        sums = [tf.nn.conv2d(inputs, kernel, 1, "SAME") for kernel in (self.kernel, turned)]
        return tf.maximum(*sums) + self.offset


def reads_outside():
    factor = tf.Variable(np.linspace(0.5, 1.5, 8), dtype=tf.float32)

    class ReadsOutside(layers.Layer):
        def call(self, x):
            return x * factor + tf.reduce_sum(tf.exp(factor))

    return ReadsOutside()


def picks_outside():
    order = tf.Variable([5, 0, 7, 2], trainable=False)

    class PicksOutside(layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight("scale", (4,), initializer="ones")

        def call(self, x):
            return tf.gather(x, order, axis=-1) * self.scale

    return PicksOutside()


class OwnTable(layers.Embedding):
    """A subclass of Keras' layer."""

    def call(self, inputs):
        return super().call(inputs) * 2.0


class Entries(layers.Layer):
    """Looks up entries with a length of at most `most`."""

    def __init__(self, most=None):
        super().__init__()
        self.most = most

    def build(self, input_shape):
        self.table = self.add_weight("table", (900, 4))

    def call(self, inputs):
        ids = tf.cast(inputs, tf.int32)
        return tf.nn.embedding_lookup(params=self.table, ids=ids, max_norm=self.most)

    def get_config(self):
        return {"most": self.most}


class Graph(layers.Layer):
    """Describes known nodes by the sums of their neighbours, given the requested node."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.nodes = tf.constant(np.random.default_rng(1).normal(size=(6, 4)), tf.float32)
        self.prepare = keras.Sequential(
            [layers.BatchNormalization(), layers.Dropout(0.1), layers.Dense(4, activation="relu")]
        )
        self.describe = layers.Dense(4)

    def call(self, indices):
        x = self.prepare(self.nodes)
        sums = x + tf.gather(x, [1, 2, 3, 4, 5, 0])
        return tf.gather(self.describe(tf.concat([x, sums], 1)), indices)


def of(layer, data, units=3):
    """Returns a model of one layer, and a dense layer after it."""
    inputs = keras.Input(data.shape[1:], dtype=data.dtype.name)
    return keras.Model(inputs, layers.Dense(units)(layer(inputs))), data


IDS = rng().integers(0, 900, (32, 6))
MODELS = {
    "kernels that a wrapper computes": normalized,
    "a layer's class": lambda: language_model(TiedHead),
    "a Lambda": lambda: language_model(
        lambda table: layers.Lambda(lambda x: tf.matmul(x, table.embeddings, transpose_b=True))
    ),
    "an operation": lambda: language_model(
        lambda table: lambda x: tf.matmul(x, table.embeddings, transpose_b=True)
    ),
    "an autoencoder": autoencoder,
    "inside one layer": inside_one_layer,
    "a subclassed model": subclassed,
    "masks of kernels": pixel_cnn,
    "two convolutions": lambda: of(Twice(), images(8)),
    "lengths of kernels": lambda: of(Demodulated(), images(8)),
    "lengths of pointwise kernels": lambda: of(Demodulated(1), images(8)),
    "lengths of kernels without strides": lambda: of(Demodulated(1, 1), images(8)),
    "a kernel turned around": lambda: of(Turned(), images(8)),
    "a factor of no layer": lambda: of(reads_outside(), images(16, (6, 8))),
    "an order of no layer": lambda: of(picks_outside(), images(16, (6, 8))),
    "a subclass of a table": lambda: of(OwnTable(900, 4), IDS.astype("int32")),
    "a subclass of a table of floats": lambda: of(OwnTable(900, 4), IDS.astype("float32")),
    "entries": lambda: of(Entries(), IDS.astype("int32")),
    "entries of floats": lambda: of(Entries(), IDS.astype("float32")),
    "constants alone": lambda: of(Graph(), np.arange(6, dtype=np.int32)),
}
