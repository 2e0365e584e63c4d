"""Tests that layers which add a loss or metric are traced, and the model still adds it."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.comparison import assert_kept
from tests.helpers import build_model, images, keras, layers, quantize_on


class Divergence(layers.Layer):
    """The mean of a variational encoder, with a divergence as loss in both phases."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(8)

    def call(self, x, training=None):
        mean, variance = tf.split(self.dense(x), 2, axis=-1)
        self.add_loss(-0.5 * tf.reduce_mean(1.0 + variance - mean**2 - tf.exp(variance)))
        self.add_metric(tf.reduce_mean(mean), name="mean")
        self.add_loss(0.0 * 2)  # As in the last step of TabNet.
        return mean


class Codebook(layers.Layer):
    """Quantizes like a VQ-VAE: two losses, one of a weight, and a straight-through gradient."""

    def build(self, shape):
        self.codes = self.add_weight("codes", (4, 6), initializer="random_normal")

    def call(self, x):
        distances = tf.reduce_sum(self.codes**2, 0) - 2.0 * tf.matmul(x, self.codes)
        nearest = tf.one_hot(tf.argmin(distances, -1), 6)
        chosen = tf.matmul(nearest, self.codes, transpose_b=True)
        commitment = tf.reduce_mean((tf.stop_gradient(chosen) - x) ** 2)
        self.add_loss([0.25 * commitment, tf.reduce_mean((chosen - tf.stop_gradient(x)) ** 2)])
        return x + tf.stop_gradient(chosen - x)


class Nested(layers.Layer):
    """Contains such a layer, which it calls twice."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.codebook = Codebook()

    def call(self, x):
        return self.codebook(self.codebook(x) + x)


class Clusters(layers.Layer):
    """Returns shares of clusters by a computed kernel, with their entropy as loss."""

    def build(self, shape):
        self.kernel = self.add_weight("kernel", (2, 4, 2), initializer="random_normal")

    def call(self, x):
        shares = tf.nn.softmax(tf.matmul(x, tf.reshape(self.kernel, (4, 4))))
        self.add_loss(-tf.reduce_mean(shares * tf.math.log(shares)))
        return shares


@pytest.mark.sample(1)
@pytest.mark.parametrize("layer", [Divergence, Nested, Clusters])
def test_losses_of_opened_layers(layer, tmp_path):
    keras.utils.set_random_seed(1)
    model = build_model((4,), lambda inputs: layers.Dense(2)(layer(name="own")(inputs)))
    x = images(32, (4,))
    qat = keras_qat.quantize_model(model, strict=True)
    for each in (model, qat):
        each.compile("sgd", "mse")
    keras_qat.set_quantization(qat, False)
    expected = model.evaluate(x, np.zeros((32, 2)), verbose=0, return_dict=True)
    results = qat.evaluate(x, np.zeros((32, 2)), verbose=0, return_dict=True)
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        assert results[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    keras_qat.set_quantization(qat, True)
    keras_qat.calibrate(qat, x)
    assert_kept(qat, x, tmp_path)
    loaded = keras.models.load_model(tmp_path / "qat.keras")
    count = len(model.losses) - (layer is Divergence)  # One of them is 0.
    assert len(loaded.losses) == len(qat.losses) == count
    qat.fit(x, np.zeros((32, 2)), verbose=0)
    plain = keras_qat.strip_quantization(qat)
    assert type(plain.get_layer("own")) is layer
    assert plain.losses


class Endpoint(layers.Layer):
    """Returns its prediction, and adds a loss that compares it with labels from an input."""

    def call(self, labels, prediction):
        classes = tf.cast(labels[:, 0], tf.int32)  # 2.99 would be class 2.
        each = keras.losses.sparse_categorical_crossentropy(classes, prediction)
        self.add_loss(tf.reduce_mean(each))
        return prediction


def model_with_labels(how):
    x, labels = keras.Input((6,), name="x"), keras.Input((1,), name="labels")
    prediction = layers.Dense(8, "softmax", name="prediction")(x)
    if how == "layer":
        return keras.Model([x, labels], Endpoint(name="endpoint")(labels, prediction))
    error = tf.square(labels - tf.reduce_sum(prediction, 1, keepdims=True))
    if how == "output":
        return keras.Model([x, labels], [prediction, error])
    model = keras.Model([x, labels], prediction)
    model.add_loss(tf.reduce_mean(error))
    return model


@pytest.mark.sample(1)
@pytest.mark.parametrize("outputs", [None, ["prediction"]], ids=["all outputs", "one output"])
@pytest.mark.parametrize("how", ["layer", "model"])
def test_labels_that_only_losses_read_are_not_quantized(how, outputs):
    model = model_with_labels(how)
    x, labels = images(64, (6,)), np.arange(64.0, dtype=np.float32)[:, None] % 8
    model.compile("sgd")
    qat = quantize_on(model, [x, labels], outputs=outputs)
    qat.compile("sgd")
    expected = model.evaluate([x, labels], verbose=0)
    assert qat.evaluate([x, labels], verbose=0) == pytest.approx(expected, rel=0.01)
    assert not any("labels" in quantizer.name for quantizer in keras_qat.quantizers(qat))
    assert len(keras_qat.export_tflite(qat)) > 0


def test_labels_after_the_outputs_of_the_file_are_not_quantized():
    qat = keras_qat.quantize_model(model_with_labels("output"), outputs=["prediction"])
    assert not any("labels" in quantizer.name for quantizer in keras_qat.quantizers(qat))


class OpaqueEndpoint(layers.Layer):
    """Computes a loss with sparse tensors, like a CTC loss, so it stays in float."""

    def __init__(self, gives_loss=False, **kwargs):
        super().__init__(**kwargs)
        self.gives_loss = gives_loss

    def call(self, labels, prediction):
        classes = tf.sparse.to_dense(tf.sparse.from_dense(tf.cast(labels, tf.int32)))[:, 0]
        each = keras.losses.sparse_categorical_crossentropy(classes, prediction)
        if self.gives_loss:
            return each[:, None]
        self.add_loss(tf.reduce_mean(each))
        return prediction


@pytest.mark.slow
@pytest.mark.parametrize("gives_loss", [False, True], ids=["adds loss", "returns loss"])
def test_labels_that_an_opaque_layer_reads_are_not_quantized(gives_loss):
    x, labels = keras.Input((6,), name="x"), keras.Input((1,), name="labels")
    prediction = layers.Dense(8, "softmax", name="prediction")(x)
    endpoint = OpaqueEndpoint(gives_loss, name="endpoint")
    model = keras.Model([x, labels], endpoint(labels, prediction))
    data = images(64, (6,)), np.arange(64.0, dtype=np.float32)[:, None] % 8
    with pytest.warns(UserWarning, match="endpoint: "):
        qat = quantize_on(model, list(data))
    assert not any("labels" in quantizer.name for quantizer in keras_qat.quantizers(qat))
    assert "only float layers read" in str(keras_qat.plan(model))

    def loss(trained):
        if gives_loss:
            return np.asarray(trained(list(data))).mean()
        trained.compile("sgd")
        return trained.evaluate(list(data), verbose=0)

    assert loss(qat) == pytest.approx(loss(model), rel=0.02)


def test_a_single_input_of_an_opaque_layer_is_quantized():
    """An integer device can only pass integers."""

    class Opaque(layers.Layer):
        def call(self, x):
            return tf.sparse.to_dense(tf.sparse.from_dense(x))

    x = keras.Input((4,))
    plan = keras_qat.plan(keras.Model(x, Opaque()(x)))
    assert plan.rows[0].spec is not None
