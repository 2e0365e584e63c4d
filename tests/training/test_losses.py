"""Tests losses and metrics that a model adds, besides those it was compiled with."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.tflite.interpreter import FileInterpreter
from tests.helpers import export_exact, images, keras, observe, quantize_on, rng, save_and_load
from tests.networks.small import functional, layers


def measured(model, x):
    """Returns the loss on targets of zero, without and with the compiled loss."""
    model.compile("sgd", "mse")
    whole = model.evaluate(x, np.zeros((len(x), *model.output_shape[1:])), verbose=0)
    return whole - np.mean(model.predict(x, verbose=0) ** 2), whole


def kernels(contents):
    return [name for name, *_ in FileInterpreter(contents).operations()]


def with_loss():
    """Returns a model that adds a loss on the output of an inner layer."""
    keras.utils.set_random_seed(3)
    x = keras.Input((6, 6, 4))
    hidden = layers.Conv2D(6, 3, activation="relu", name="hidden")(x)
    pooled = layers.GlobalAveragePooling2D()(hidden)
    model = keras.Model(x, layers.Dense(2, name="head")(pooled))
    model.add_loss(10.0 * tf.reduce_mean(hidden))
    model.add_loss(tf.reduce_sum(layers.Dense(1, name="critic")(pooled) ** 2))
    return model


@pytest.mark.slow
def test_each_output_has_a_loss_and_metrics():
    x, data = keras.Input((4,)), rng(0).normal(size=(16, 4)).astype(np.float32)
    hidden = layers.Dense(5, activation="relu")(x)
    model = keras.Model(x, [layers.Dense(2, name=name)(hidden) for name in "ab"])
    qat = keras_qat.quantize_model(model)
    qat.compile("sgd", {"a": "mse", "b": "mae"}, {"a": ["mae", "mse"], "b": "mae"})
    zeros = [np.zeros((16, 2), np.float32)] * 2
    qat.fit(data, zeros, verbose=0)
    figures = qat.evaluate(data, zeros, verbose=0, return_dict=True)
    a, b = qat.predict(data, verbose=0)
    absolute, squared = np.abs(a).mean(), np.square(a).mean()
    expected = {"a_loss": squared, "a_mse": squared, "a_mae": absolute, "b_mae": np.abs(b).mean()}
    assert {name: figures[name] for name in expected} == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_an_added_loss_stays_in_float():
    model, x = with_loss(), images(32, (6, 6, 4))
    assert not keras_qat.plan(model).float_layers
    qat = observe(keras_qat.quantize_model(model, strict=True), x)
    assert measured(qat, x)[0] == pytest.approx(measured(model, x)[0], rel=0.02)
    contents = keras_qat.export_tflite(qat)
    plain = keras_qat.quantize_model(keras.Model(model.input, model.output))
    assert kernels(contents) == kernels(keras_qat.export_tflite(observe(plain, x)))
    assert keras_qat.verify(qat, contents, x).identical == 1


def test_an_added_loss_is_saved_and_stripped_and_trains(tmp_path):
    model, x = with_loss(), images(32, (6, 6, 4))
    qat = observe(keras_qat.quantize_model(model), x)
    before = measured(qat, x)
    loaded = save_and_load(qat, tmp_path / "qat.keras")
    assert measured(loaded, x) == pytest.approx(before)
    assert measured(keras_qat.strip_quantization(qat), x) == pytest.approx(measured(model, x))
    loaded.compile(keras.optimizers.SGD(0.01), loss=None)
    loaded.fit(x, epochs=3, verbose=0)
    assert measured(loaded, x)[0] < 0.7 * before[0]


REGULARIZED = {
    "dense": lambda x: layers.Dense(8, activity_regularizer="l1")(x),
    "relu": lambda x: layers.Dense(8, activation="relu", activity_regularizer="l1")(x),
    "tanh": lambda x: layers.Dense(8, activation="tanh", activity_regularizer="l2")(x),
    "conv1d": lambda x: layers.Conv1D(4, 3, activity_regularizer="l1")(x),
    "in_front_of_norm": lambda x: layers.ReLU()(
        layers.BatchNormalization()(layers.Conv1D(4, 3, activity_regularizer="l1")(x))
    ),
    "shared": lambda x: (lambda layer: layer(layer(x)))(layers.Dense(4, activity_regularizer="l2")),
    "separable": lambda x: layers.SeparableConv1D(4, 3, activity_regularizer="l1")(x),
    "transposed": lambda x: layers.Conv1DTranspose(4, 3, activity_regularizer="l1")(x),
    "recurrent": lambda x: layers.LSTM(24, activity_regularizer="l1")(x),
    "conv2d": lambda x: layers.Conv2D(2, 2, activity_regularizer="l2")(
        layers.Reshape((4, 2, 4))(x)
    ),
    "attention": lambda x: layers.MultiHeadAttention(2, 3, activity_regularizer="l1")(x, x),
}
"""Losses that Keras adds for the results of a layer."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(REGULARIZED))
def test_activities_are_regularized(name):
    model, x = functional((8, 4), build=REGULARIZED[name]), images(32, (8, 4))
    # In one batch, so that ranges include all values.
    qat = observe(keras_qat.quantize_model(model), x, batches=1)
    (expected, _), (result, _) = measured(model, x), measured(qat, x)
    assert expected > 0
    assert result == pytest.approx(expected, rel=0.02)
    assert measured(keras_qat.strip_quantization(qat), x)[0] == pytest.approx(expected, rel=1e-4)
    qat.compile("sgd", "mse")
    for size in (64, 32):
        history = qat.fit(x, np.zeros((32, *model.output_shape[1:])), batch_size=size, verbose=0)
    assert np.isfinite(history.history["loss"][0])
    export_exact(qat, x)


def test_folding_leaves_no_layer_of_ours():
    model, x = functional((8, 4), build=REGULARIZED["relu"]), images(32, (8, 4))
    qat = keras_qat.quantize_model(model)
    folded = keras_qat.strip_quantization(qat, folded=True)
    np.testing.assert_allclose(folded.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-4)
    assert "Regularize" not in folded.to_json()


def test_an_added_metric_is_measured():
    keras.utils.set_random_seed(3)
    x = keras.Input((4,))
    hidden = layers.Dense(6)(x)
    model = keras.Model(x, layers.Dense(2)(hidden))
    model.add_metric(tf.reduce_mean(hidden), "activity", aggregation="mean")
    data = rng().normal(size=(32, 4)).astype(np.float32)
    qat = observe(keras_qat.quantize_model(model), data)
    result = []
    for variant in (model, qat):
        variant.compile("sgd", "mse")
        measures = variant.evaluate(data, np.zeros((32, 2)), verbose=0, return_dict=True)
        result.append(measures["activity"])
    assert result[1] == pytest.approx(result[0], abs=0.02)


class Sampling(layers.Layer):
    """Draws a sample, like a variational encoder, and adds a loss. It stays in float."""

    def call(self, inputs):
        self.add_loss(tf.reduce_mean(tf.square(inputs)))
        return inputs + 0.0 * tf.random.normal(tf.shape(inputs))


class Outer(layers.Layer):
    """Contains such a layer."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.sampling = Sampling()

    def call(self, inputs):
        return self.sampling(inputs)


FLOAT_LAYERS = {
    "layer": Sampling,
    "inner layer": Outer,
    "regularizer": lambda: layers.Dense(4, activity_regularizer="l2", name="in_float"),
}


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:These layers compute in float")
@pytest.mark.parametrize("eagerly", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("make", FLOAT_LAYERS.values(), ids=FLOAT_LAYERS)
def test_layers_in_float_add_their_losses_in_evaluate(make, eagerly):
    x = images(32, (4,))
    model = functional((4,), build=lambda x: layers.Dense(4)(make()(layers.Dense(4)(x))))
    recipe = keras_qat.recipes.int8().override("in_float", quantize=False)
    has_override = make is FLOAT_LAYERS["regularizer"]
    qat = quantize_on(model, x, recipe if has_override else "int8")
    for each in (model, qat):
        each.compile("sgd", "mse", run_eagerly=eagerly)
    qat.fit(x, x, epochs=1, verbose=0)  # Leaves losses of its own function.
    model = keras_qat.strip_quantization(qat)
    model.compile("sgd", "mse", run_eagerly=eagerly)
    added = measured(model, x)[0]
    assert added > 0
    assert measured(qat, x)[0] == pytest.approx(added, rel=0.05)
