"""Weights that several operations or layers read: tied embeddings, kernels that a layer masks."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.helpers import build_model, keras, layers
from tests.networks.lent_weights import TiedHead, language_model, pixel_cnn


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
    model = build_model(shape, lambda inputs: layers.Flatten()(layer(inputs)))
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
