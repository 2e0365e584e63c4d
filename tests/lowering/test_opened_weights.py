"""Tests weights that traced layers read: tables, constrained, frozen and borrowed weights."""

import logging

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.helpers import (
    build_model,
    export_exact,
    images,
    keras,
    layers,
    observe,
    quantize_on,
    scramble,
)
from tests.networks.lent_weights import Entries

pytestmark = pytest.mark.legacy


class Shifted(layers.Layer):
    """Adds a weight, which is a tensor of the file."""

    def build(self, input_shape):
        self.shift = self.add_weight("shift", (3, 2), initializer="random_normal")

    def call(self, inputs):
        return tf.tanh(inputs) + self.shift


@pytest.mark.slow
def test_weights_as_tensors_where_shapes_are_computed_in_float():
    inputs, x = keras.Input((3, 2)), images(16, (3, 2))
    model = keras.Model(inputs, Shifted()(layers.Dense(2)(inputs)))
    qat = observe(keras_qat.quantize_model(model, target="ethos_u55"), x)
    np.testing.assert_allclose(qat.predict(x, verbose=0), qat(x), atol=0.05)
    pytest.importorskip("tflite_micro")
    export_exact(qat, x, target="ethos_u55")


def test_entries_that_are_shortened_stay_in_float():
    words = keras.Input((6,), dtype="int32")
    model = keras.Model(words, layers.Dense(3)(Entries(most=0.1)(words)))
    assert keras_qat.plan(model).float_layers


@pytest.mark.parametrize("multiply", [tf.multiply, lambda x, y: layers.Multiply()([x, y])])
def test_variables_of_no_layer_and_layers_that_read_them_say_what_to_do(multiply):
    inputs, factor = keras.Input((6,)), tf.Variable(np.ones((1, 6), np.float32), name="factor")
    model = keras.Model(inputs, multiply(inputs, factor))
    with pytest.raises(ValueError, match=r"reads factor:0.*Write a custom layer"):
        keras_qat.quantize_model(model)


def test_operations_on_weights_are_not_left_as_they_are():
    ids, table = keras.Input((6,), dtype="int32"), layers.Embedding(20, 8)
    model = keras.Model(ids, tf.matmul(table(ids), table.embeddings, transpose_b=True))
    with pytest.raises(ValueError, match=r"reads embedding.*Write a custom layer"):
        keras_qat.quantize_model(model, keras_qat.recipes.contrib())


def weighted(factor):
    def penalty(weight):
        return factor * tf.reduce_sum(tf.square(weight))

    return penalty


def test_functions_that_regularize_and_constrain():
    """Keras only saves their names, and copies would call a name. Two may have the same name."""
    inputs = keras.Input((4,))
    x = layers.Dense(3, kernel_regularizer=weighted(1.0), bias_regularizer=weighted(100.0))(inputs)
    x = layers.Dense(3, kernel_constraint=lambda weight: 0.0 * weight, name="constrained")(x)
    model, data = scramble(keras.Model(inputs, x)), images(32, (4,))
    qat = observe(keras_qat.quantize_model(model), data)
    np.testing.assert_allclose(sorted(qat.losses), sorted(model.losses), rtol=1e-6)
    qat.compile("sgd", "mse")
    qat.fit(data, np.zeros((32, 3)), verbose=0)
    assert not np.any(qat.get_layer("quant_constrained").layer.kernel)


def test_functions_that_regularize_are_found_by_name(tmp_path):
    inputs, penalty = keras.Input((4,)), weighted(1.0)
    outputs = layers.Dense(3, kernel_regularizer=penalty, activity_regularizer=penalty)(inputs)
    qat = keras_qat.quantize_model(scramble(keras.Model(inputs, outputs)))
    qat.save(tmp_path / "qat.keras")
    custom = {"penalty": penalty}
    loaded = keras.models.load_model(tmp_path / "qat.keras", custom_objects=custom)
    for model in (qat, loaded, keras_qat.strip_quantization(qat)):
        assert len(model.losses) == 2


class Named(keras.constraints.Constraint):
    """A constraint with a constructor that does not accept its configuration, as in RNNoise."""

    def __call__(self, weight):
        return tf.clip_by_value(weight, -0.1, 0.1)

    def get_config(self):
        return {"name": "clip"}


def test_constraints_that_no_configuration_makes_are_those_of_the_float_model():
    inputs, clip = keras.Input((3, 4)), Named()
    y = layers.GRU(2, kernel_constraint=clip)(layers.Dense(3, kernel_constraint=clip)(inputs))
    qat = keras_qat.quantize_model(keras.Model(inputs, y))
    assert [w.constraint is clip for w in qat.trainable_weights].count(True) == 2


class FixedPositions(layers.Layer):
    """Position embeddings that do not train, such as sines in tutorials."""

    count = staticmethod(tf.range)

    def __init__(self, **options):
        super().__init__(**options)
        self.embedding = layers.Embedding(8, 4, embeddings_initializer="normal", trainable=False)

    def call(self, inputs):
        return inputs + self.embedding(self.count(8))


class PositionsOfNumPy(FixedPositions):
    count = staticmethod(np.arange)


@pytest.mark.parametrize("kind", [FixedPositions, PositionsOfNumPy])
def test_embedded_positions_that_do_not_train_stay(kind):
    model = build_model((8, 4), lambda x: layers.Dense(2)(kind()(x)))
    qat = keras_qat.quantize_model(model, strict=True)
    assert len(qat.trainable_weights) == len(model.trainable_weights) == 2
    plain = keras_qat.strip_quantization(qat)
    assert len(plain.trainable_weights) == 2
    data = images(4, (8, 4))
    np.testing.assert_array_equal(plain(data), model(data))


class Fused(layers.Layer):
    """Has a weight for each input, as in a BiFPN."""

    def build(self, input_shape):
        self.w = self.add_weight("w", (2,), initializer="ones")

    def call(self, inputs):
        w = tf.nn.relu(self.w)
        total = tf.reduce_sum([w[i] * inputs[i] for i in range(2)], axis=0)
        return total / (tf.reduce_sum(w) + 1e-4)


@pytest.mark.slow
def test_single_numbers_are_compared_layer_by_layer():
    """TFLite Micro's interpreter receives scalar inputs of single layers."""
    pytest.importorskip("tflite_micro")
    inputs = layers.Input((4, 4, 3))
    model = keras.Model(inputs, Fused()([inputs, layers.Conv2D(3, 3, padding="same")(inputs)]))
    x = np.random.default_rng(1).normal(size=(4, 4, 4, 3)).astype(np.float32)
    qat = quantize_on(model, x, target="ethos_u55")
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), x, per_layer=True)
    assert report.identical == 1
    assert not report.differing


class Factored(layers.Layer):
    """Computes a kernel from weights with different first sizes."""

    def build(self, input_shape):
        self.kernel = self.add_weight("kernel", (input_shape[-1], 5))
        self.scale = self.add_weight("scale", (5,))

    def call(self, inputs):
        return tf.matmul(inputs, tf.nn.l2_normalize(self.kernel, 0) * self.scale)


def test_weights_are_no_batches_that_keras_warns_of(tmp_path):
    x, told = keras.Input((3,)), []
    listener = logging.Handler()
    listener.emit = lambda record: told.append(record.getMessage())
    tf.get_logger().addHandler(listener)
    try:
        qat = keras_qat.quantize_model(keras.Model(x, Factored()(x)), strict=True)
        qat.save(tmp_path / "qat.keras")
        keras.models.load_model(tmp_path / "qat.keras")
    finally:
        tf.get_logger().removeHandler(listener)
    assert not told
