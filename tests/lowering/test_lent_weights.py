"""Weights that several operations or layers read: tied embeddings, kernels that a layer masks."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.helpers import images, keras, layers, rng

TOKENS = rng().integers(0, 20, (16, 6)).astype(np.int32)
IMAGES = rng().normal(size=(16, 8, 8, 1)).astype(np.float32)


class TiedHead(layers.Layer):
    """Logits by the transposed table of an embedding."""

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
    """A dense layer by the transposed kernel of another."""

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
    """A model whose call reads a layer's weights, and which lends them to another layer."""

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
    """PixelCNN as tutorials have it: a convolution whose kernel is masked in each call."""

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
    """A masked convolution between two others."""

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
    """Puts a normalized kernel in the layer inside, as TensorFlow Addons does."""

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
}


@pytest.mark.slow
def test_masks_hold_in_training():
    """What a mask hides stays hidden, and the rest trains as in the float model."""
    keras.utils.set_random_seed(4)
    model, data = pixel_cnn()
    labels = np.ones((16, *model.output_shape[1:]), np.float32)
    qat = keras_qat.quantize_model(model)
    keras_qat.set_quantization(qat, False)
    for trained in (model, qat):
        trained.compile(keras.optimizers.SGD(0.1), "mse")
        trained.fit(data, labels, batch_size=4, shuffle=False, verbose=0)
    np.testing.assert_allclose(qat(data), model(data), atol=1e-5)


class Counting(layers.Conv2D):
    """Changes its kernel in another way in each call."""

    def call(self, x):
        self.kernel.assign(self.kernel * 0.5)
        return super().call(x)


class Remembering(layers.Dense):
    """Keeps what depends on its input."""

    def call(self, x):
        self.bias.assign(tf.reduce_mean(x, 0)[:4])
        return super().call(x)


@pytest.mark.parametrize(
    ("layer", "shape", "reason"),
    [
        (Counting(2, 3), (8, 8, 1), "it assigns another value to a weight each time"),
        (Remembering(4), (6,), "it assigns what depends on its input to a weight"),
    ],
)
def test_other_assignments_stay_whole(layer, shape, reason):
    inputs = keras.Input(shape)
    model = keras.Model(inputs, layers.Flatten()(layer(inputs)))
    kernel = layer.kernel.numpy()
    assert reason in keras_qat.plan(model).float_layers[layer.name]
    np.testing.assert_array_equal(layer.kernel, kernel)


def test_what_stays_whole_keeps_its_weights():
    """A layer that may not be opened lends nothing: both would train a copy."""
    model, _ = language_model(TiedHead)
    recipe = keras_qat.recipes.int8().override("table", open=False)
    (reason,) = keras_qat.plan(model, recipe).float_layers.values()
    assert "it reads table/embeddings:0, a weight of another layer" in reason


def test_stripping_says_what_keras_cannot_copy():
    """A copy's Lambda would read the table of the first model."""
    table = layers.Embedding(20, 8, name="table")
    tokens = keras.Input((6,), dtype="int32")
    tied = layers.Lambda(lambda x: tf.matmul(x, table.embeddings, transpose_b=True))
    qat = keras_qat.quantize_model(keras.Model(tokens, tied(table(tokens))))
    with pytest.raises(ValueError, match="Keras cannot copy the float model"):
        keras_qat.strip_quantization(qat)


def test_stripping_names_a_call_that_keras_reads_wrongly():
    """Of three tensors of tf.einsum a copy of Keras' passes none; the float model loads neither."""
    x, y = keras.Input((2, 3)), keras.Input((3, 2))
    model = keras.Model([x, y], tf.einsum("bij,bjk,bij->bik", x, y, x))
    reason = "cannot copy the float model: Exception .* layer 'tf.einsum.*: Got 0 inputs.*own code"
    with pytest.raises(ValueError, match=reason):
        keras_qat.strip_quantization(keras_qat.quantize_model(model))


class Twice(layers.Layer):
    """One kernel in two convolutions, and one offset for both."""

    def build(self, input_shape):
        self.kernel = self.add_weight("kernel", (3, 3, input_shape[-1], 4))
        self.offset = self.add_weight("offset", (4,))
        super().build(input_shape)

    def call(self, inputs):
        near = tf.nn.conv2d(inputs, self.kernel, 1, "SAME") + self.offset
        return near + tf.nn.conv2d(inputs, self.kernel, 1, "SAME", dilations=2) + self.offset


class Demodulated(layers.Layer):
    """A convolution divided by the length of its kernels, of any size, as generators have it."""

    def __init__(self, size=3, strides=2, **kwargs):
        super().__init__(**kwargs)
        self.size, self.strides = size, strides

    def build(self, input_shape):
        self.kernel = self.add_weight("kernel", (self.size, self.size, input_shape[-1], 4))
        super().build(input_shape)

    def call(self, inputs):
        lengths = 1.0 + tf.reduce_sum(tf.abs(self.kernel), [0, 1, 2])
        return tf.nn.conv2d(inputs, self.kernel, self.strides, "VALID") * lengths


class Turned(Twice):
    """One kernel, turned around."""

    def call(self, inputs):
        turned = tf.reverse(self.kernel, [0, 1])
        sums = [tf.nn.conv2d(inputs, kernel, 1, "SAME") for kernel in (self.kernel, turned)]
        return tf.maximum(*sums) + self.offset


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "make", [Twice, Demodulated, lambda: Demodulated(1), lambda: Demodulated(1, 1), Turned]
)
def test_weights_that_two_operations_read_stay_one(make):
    x = keras.Input((8, 8, 4))
    model = keras.Model(x, make()(x))
    qat = keras_qat.quantize_model(model, strict=True)
    assert len(qat.trainable_weights) == len(model.trainable_weights)
    data = images(8)
    qat.compile(keras.optimizers.SGD(0.001), "mse")
    qat.fit(data, np.ones((8, *model.output_shape[1:])), verbose=0)
    qat(data, training=True)
    expected = keras_qat.strip_quantization(qat)(data)
    assert np.mean(np.abs(qat(data) - expected)) < 0.02 * np.ptp(expected)
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), data).identical == 1


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


@pytest.mark.parametrize("layer", [reads_outside, picks_outside])
def test_a_variable_that_no_layer_holds_is_a_constant(layer, tmp_path):
    x = keras.Input((6, 8))
    model = keras.Model(x, layers.Dense(2)(layer()(x)))
    assert not keras_qat.plan(model).float_layers
    qat = keras_qat.quantize_model(model, strict=True)
    assert len(qat.trainable_weights) == len(model.trainable_weights)
    data = np.random.default_rng(0).normal(size=(16, 6, 8)).astype(np.float32)
    keras_qat.calibrate(qat, data)
    expected, computed = (m.predict(data, verbose=0) for m in (model, qat))
    assert np.abs(computed - expected).max() < 0.05 * np.abs(expected).max()
    contents = keras_qat.export_tflite(qat)
    np.testing.assert_array_equal(keras_qat.TFLiteModel(contents).predict(data), computed)
    qat.save(tmp_path / "qat.keras")
    assert keras_qat.export_tflite(keras.models.load_model(tmp_path / "qat.keras")) == contents
