"""Tests Keras masks as tensors: layers that read one are traced or lowered like any other layer."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.ops.weighted_sums import RECENT
from tests.helpers import keras, layers, rng, scramble
from tests.networks.lent_weights import TiedHead

pytestmark = pytest.mark.legacy

STEPS, TOKENS, SIZE = 4, 9, 8


class Shift(layers.Layer):
    """A projection, and an offset for the steps that are not padding."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.dense = layers.Dense(SIZE)

    def build(self, input_shape):
        self.offset = self.add_weight("offset", (SIZE,), initializer="ones")
        super().build(input_shape)

    def call(self, inputs, mask=None):
        y = self.dense(inputs)
        return y if mask is None else y + self.offset * tf.cast(mask, y.dtype)[..., tf.newaxis]


class Positions(layers.Layer):
    """Embeddings of token ids and of positions, with a mask from an inner layer."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.tokens = layers.Embedding(TOKENS, SIZE, mask_zero=True)
        self.positions = layers.Embedding(STEPS, SIZE)

    def call(self, inputs):
        return self.tokens(inputs) + self.positions(tf.range(STEPS))

    def compute_mask(self, inputs, mask=None):
        return self.tokens.compute_mask(inputs)


class Encoder(layers.Layer):
    """An encoder that passes its mask to the attention."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.attention = layers.MultiHeadAttention(2, 4)
        self.project = keras.Sequential([layers.Dense(10, activation="relu"), layers.Dense(SIZE)])
        self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]

    def call(self, inputs, mask=None):
        visible = None if mask is None else tf.cast(mask[:, tf.newaxis, :], "int32")
        attended = self.attention(inputs, inputs, attention_mask=visible)
        x = self.norms[0](inputs + attended)
        return self.norms[1](x + self.project(x))


class Decoder(layers.Layer):
    """A decoder that masks later steps, and padding of the encoder's and its own input."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.own = layers.MultiHeadAttention(2, 4)
        self.other = layers.MultiHeadAttention(2, 4)
        self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]

    def call(self, inputs, encoded, mask=None):
        x = self.norms[0](inputs + self.own(inputs, inputs, inputs, use_causal_mask=True))
        if mask is not None:
            x = x * tf.cast(mask, x.dtype)[..., tf.newaxis]
        return self.norms[1](x + self.other(query=x, value=encoded, key=encoded))


class Scores(layers.Layer):
    """Attention without weights that stores its scores, with a softmax written by hand."""

    def call(self, inputs, mask=None, **kwargs):
        scores = tf.matmul(inputs, inputs, transpose_b=True)
        if mask is not None:
            scores -= 1e4 * (1.0 - tf.cast(mask[:, tf.newaxis], scores.dtype))
        powers = tf.exp(scores - tf.reduce_max(scores, axis=-1, keepdims=True))
        self.weights_of_steps = powers / tf.reduce_sum(powers, axis=-1, keepdims=True)
        return tf.matmul(self.weights_of_steps, inputs)


class Attend(layers.Layer):
    """Creates another layer in its call, and reads a tensor that this layer stores."""

    def call(self, inputs, mask=None):
        attention = Scores()
        attended = attention(inputs, mask=mask)
        return attended + tf.reduce_max(attention.weights_of_steps, axis=-1, keepdims=True)


class Constant(layers.Layer):
    """Returns a mask that cannot be traced, from TensorFlow's operations on Python values."""

    def call(self, inputs):
        return 2.0 * inputs

    def compute_mask(self, inputs, mask=None):
        return tf.constant(np.arange(STEPS)[np.newaxis] < 3)


def embedded():
    tokens = keras.Input((STEPS,), dtype="int32")
    return tokens, layers.Embedding(TOKENS, SIZE, mask_zero=True)(tokens)


def of_tokens(function):
    def build():
        tokens, x = embedded()
        return tokens, function(tokens, x)

    return build


def masked_sum(tokens, x):
    weights = layers.Softmax(axis=1)(layers.Dense(1)(x), mask=tf.not_equal(tokens, 0)[..., None])
    return tf.reduce_sum(weights * x, 1)


def real_numbers():
    x = keras.Input((STEPS, 5))
    return x, layers.GlobalAveragePooling1D()(Shift()(layers.Masking()(x)))


def translation():
    tokens, others = (keras.Input((STEPS,), dtype="int32") for _ in range(2))
    encoded = Encoder()(Positions()(tokens))
    return [tokens, others], Decoder()(Positions()(others), encoded)


MODELS = {
    "average": of_tokens(lambda _, x: layers.GlobalAveragePooling1D()(Shift()(x))),
    "attention": of_tokens(lambda _, x: layers.MultiHeadAttention(2, 4)(x, x)),
    "weights_of_scores": of_tokens(lambda _, x: layers.Attention(use_scale=True)([Shift()(x), x])),
    "additive": of_tokens(lambda _, x: layers.AdditiveAttention()([x, x])),
    "masked_softmax": of_tokens(masked_sum),
    "real_numbers": real_numbers,
    "by_hand": of_tokens(lambda _, x: Attend()(x)),
    "residual": of_tokens(
        lambda _, x: layers.GlobalAveragePooling1D()(layers.Add()([x, layers.ReLU()(Shift()(x))]))
    ),
    "translation": translation,
}


def padded(model, count=32, between=False):
    """Returns random inputs of a model: sequences of 1 to all steps, followed by zeros.

    If `between` is true, other steps except the first are zeros, too.
    """
    numbers, data = rng(3), []
    for tensor in model.inputs:
        sizes = (count, *tensor.shape[1:])
        # Tokens may be float values.
        x = numbers.normal(size=sizes) if len(sizes) == 3 else numbers.integers(1, TOKENS, sizes)
        x[np.arange(STEPS) >= numbers.integers(1, STEPS + 1, (count, 1))] = 0
        if between:
            x[numbers.random((count, STEPS)) < 0.2] = 0
            x[:, 0] = np.where(x[:, 0] == 0, 1, x[:, 0])
        data.append(x.astype(tensor.dtype.as_numpy_dtype))
    return data if len(data) > 1 else data[0]


def test_masks_are_handed_on_where_layers_are_opened_twice():
    """Layers are traced twice if there are tied embeddings."""
    tokens, embedding = keras.Input((STEPS,)), layers.Embedding(TOKENS, SIZE, mask_zero=True)
    x = layers.MultiHeadAttention(1, SIZE)(y := Shift()(embedding(tokens)), y)
    model = scramble(keras.Model(tokens, TiedHead(embedding)(x)))
    qat = keras_qat.quantize_model(model, target="ethos_u55")
    keras_qat.set_quantization(qat, False)
    data = np.arange(4 * STEPS).reshape(4, STEPS) % 3
    np.testing.assert_allclose(qat(data), model(data), rtol=1e-3, atol=1e-4)


class OwnNorm(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def call(self, inputs):
        x = inputs - tf.reduce_mean(inputs, -1, keepdims=True)
        return x / tf.sqrt(tf.reduce_mean(x * x, -1, keepdims=True) + 1e-3)


@pytest.mark.skipif(not RECENT, reason="norms are in float there")
def test_operations_read_no_masks():
    """In BERT, normalization layers follow the token embeddings."""
    tokens = layers.Input((3,), dtype="int32")
    x = OwnNorm()(layers.Embedding(10, 8, mask_zero=True)(tokens))
    model = keras.Model(tokens, layers.SimpleRNN(3)(x))
    assert not keras_qat.plan(model, target="ethos_u55").float_layers


def test_losses_and_metrics_read_the_mask_of_an_output():
    """The loss of a model whose output comes from operations still ignores padding."""
    tokens, x = embedded()
    model = keras.Model(tokens, Shift()(x))
    data = padded(model, 8)
    qat = keras_qat.quantize_model(model)
    keras_qat.set_quantization(qat, False)
    targets = np.where(data[..., np.newaxis] == 0, 1e3, np.zeros((8, STEPS, SIZE)))
    losses = []
    for one in (model, qat):
        one.compile("sgd", "mse")
        losses.append(one.evaluate(data, targets, verbose=0))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0] < 1e3


def test_a_mask_that_cannot_be_traced_leaves_its_reader_in_float():
    x = keras.Input((STEPS, SIZE))
    y = Constant(name="maker")(x)
    model = keras.Model(x, [Shift(name="reader")(y), layers.LSTM(4, name="steps")(y)])
    reasons = keras_qat.plan(model).float_layers
    assert reasons["reader"].endswith("it cannot be traced: it reads a mask that is a constant")
    assert "it has a mask" in reasons["steps"]
