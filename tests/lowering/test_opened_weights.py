"""Weights that opened layers read: tables, those of other layers, constrained and frozen ones."""

import logging
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.ops.weighted_sums import RECENT
from tests.helpers import images, keras, layers, observe, quantize_on, scramble

pytestmark = pytest.mark.legacy


class OwnTable(layers.Embedding):
    """Subclasses Keras' layer, as many do."""

    def call(self, inputs):
        return super().call(inputs) * 2.0


class Entries(layers.Layer):
    """Looks entries up that are no longer than `most`."""

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


class Shifted(layers.Layer):
    """Adds a weight that is a tensor of the file."""

    def build(self, input_shape):
        self.shift = self.add_weight("shift", (3, 2), initializer="random_normal")

    def call(self, inputs):
        return tf.tanh(inputs) + self.shift


@pytest.mark.parametrize("options", [{"target": "ethos_u55"}, {"kernels": "onnxruntime"}])
def test_weights_as_tensors_where_shapes_or_numbers_are_computed_in_float(options):
    inputs, x = keras.Input((3, 2)), images(16, (3, 2))
    model = keras.Model(inputs, Shifted()(layers.Dense(2)(inputs)))
    qat = observe(keras_qat.quantize_model(model, **options), x)
    np.testing.assert_allclose(qat.predict(x, verbose=0), qat(x), atol=0.05)
    if "target" in options:
        pytest.importorskip("tflite_micro")
        assert keras_qat.verify(qat, keras_qat.export_tflite(qat, **options), x).identical == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("make", [partial(OwnTable, 900, 4), Entries])
@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_tables_of_ones_own_are_looked_up_in_integers(make, dtype):
    words = keras.Input((6,), dtype=dtype)
    model = keras.Model(words, layers.Dense(3)(make()(words)))
    data = np.random.default_rng(0).integers(0, 900, (32, 6)).astype(dtype)
    qat = quantize_on(model, data)
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), data)
    assert report.identical == 1
    assert report.is_good  # Tokens in 8 bits would be other words.


def test_entries_that_are_shortened_stay_in_float():
    words = keras.Input((6,), dtype="int32")
    model = keras.Model(words, layers.Dense(3)(Entries(most=0.1)(words)))
    assert keras_qat.plan(model).float_layers


@keras.utils.register_keras_serializable()
class Tied(layers.Layer):
    """Scores of all entries of a table, by a product with the table itself."""

    def __init__(self, transposed=False, **kwargs):
        super().__init__(**kwargs)
        self.transposed = transposed
        self.table, self.dense = layers.Embedding(20, 8), layers.Dense(8)

    def call(self, x):
        h = self.dense(self.table(x))
        if self.transposed:
            return tf.matmul(h, tf.transpose(self.table.embeddings))
        return tf.matmul(h, self.table.embeddings, transpose_b=True)

    def get_config(self):
        return {**super().get_config(), "transposed": self.transposed}


@pytest.mark.sample(1)
@pytest.mark.skipif(not RECENT, reason="TensorFlow 2.15 rounds one in a hundred otherwise")
@pytest.mark.parametrize("transposed", [False, True])
def test_weights_that_another_layer_owns_train_and_are_saved(transposed, tmp_path):
    ids = keras.Input((6,), dtype="int32")
    model = keras.Model(ids, layers.Dense(3)(Tied(transposed)(ids)))
    x = np.arange(24).reshape(4, 6) % 20
    qat = keras_qat.quantize_model(model, strict=True)
    qat(x, training=True)
    before = qat.predict(x, verbose=0)
    model.set_weights([weight * 0 for weight in model.get_weights()])
    np.testing.assert_array_equal(qat.predict(x, verbose=0), before)
    qat.save(tmp_path / "qat.keras")
    loaded = keras.models.load_model(tmp_path / "qat.keras")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), before)
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), x).identical == 1


@pytest.mark.parametrize("multiply", [tf.multiply, lambda x, y: layers.Multiply()([x, y])])
def test_variables_of_no_layer_and_layers_that_read_them_say_what_to_do(multiply):
    inputs, factor = keras.Input((6,)), tf.Variable(np.ones((1, 6), np.float32), name="factor")
    model = keras.Model(inputs, multiply(inputs, factor))
    with pytest.raises(ValueError, match=r"reads factor:0.*Make one custom layer"):
        keras_qat.quantize_model(model)


def test_operations_on_weights_are_not_left_as_they_are():
    ids, table = keras.Input((6,), dtype="int32"), layers.Embedding(20, 8)
    model = keras.Model(ids, tf.matmul(table(ids), table.embeddings, transpose_b=True))
    with pytest.raises(ValueError, match=r"reads embedding.*Make one custom layer"):
        keras_qat.quantize_model(model, keras_qat.recipes.contrib())


def weighted(factor):
    def penalty(weight):
        return factor * tf.reduce_sum(tf.square(weight))

    return penalty


def test_functions_that_regularize_and_constrain():
    """Keras writes their names only, and copies called a name. Two may have the same."""
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


class Clip(keras.constraints.Constraint):
    def __call__(self, weight):
        return tf.clip_by_value(weight, -0.1, 0.1)


def test_constraints_of_ones_own_need_no_registration():
    inputs, clip = keras.Input((3, 4)), Clip()
    gru = layers.GRU(2, activation="relu", recurrent_constraint=clip, bias_constraint=clip)
    qat = keras_qat.quantize_model(scramble(keras.Model(inputs, gru(inputs))))
    constraints = [weight.constraint for weight in qat.trainable_weights]
    assert sum(isinstance(constraint, Clip) for constraint in constraints) == 2


class Named(Clip):
    """As RNNoise has it: its constructor does not take its configuration."""

    def get_config(self):
        return {"name": "clip"}


def test_constraints_that_no_configuration_makes_are_those_of_the_float_model():
    inputs, clip = keras.Input((3, 4)), Named()
    y = layers.GRU(2, kernel_constraint=clip)(layers.Dense(3, kernel_constraint=clip)(inputs))
    qat = keras_qat.quantize_model(keras.Model(inputs, y))
    assert [w.constraint is clip for w in qat.trainable_weights].count(True) == 2


class FixedPositions(layers.Layer):
    """Positions that do not train, as sines are given to an embedding in tutorials."""

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
    x = keras.Input((8, 4))
    model = keras.Model(x, layers.Dense(2)(kind()(x)))
    qat = keras_qat.quantize_model(model, strict=True)
    assert len(qat.trainable_weights) == len(model.trainable_weights) == 2
    plain = keras_qat.strip_quantization(qat)
    assert len(plain.trainable_weights) == 2
    data = images(4, (8, 4))
    np.testing.assert_array_equal(plain(data), model(data))


class Graph(layers.Layer):
    """Describes nodes that it knows by the sums of their neighbors; reads which node is asked."""

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


def test_layers_that_read_constants_alone_keep_their_weights(tmp_path):
    indices = layers.Input((), dtype="int32")
    model = keras.Model(indices, layers.Dense(2)(Graph()(indices)))
    x = np.arange(6, dtype=np.int32)
    model.layers[1].prepare.layers[0].moving_mean.assign([0.1, -0.2, 0.3, 0.4])
    qat = keras_qat.quantize_model(model, strict=True)
    assert len(qat.trainable_weights) == len(model.trainable_weights)
    keras_qat.calibrate(qat, x)
    contents = keras_qat.export_tflite(qat)
    assert keras_qat.verify(qat, contents, x).identical == 1
    expected = model.predict(x, verbose=0)
    np.testing.assert_allclose(qat.predict(x, verbose=0), expected, atol=0.05 * np.ptp(expected))
    qat.save(tmp_path / "qat.keras")
    assert keras_qat.export_tflite(keras.models.load_model(tmp_path / "qat.keras")) == contents


class Fused(layers.Layer):
    """Weights of its own for each input, as in a BiFPN."""

    def build(self, input_shape):
        self.w = self.add_weight("w", (2,), initializer="ones")

    def call(self, inputs):
        w = tf.nn.relu(self.w)
        total = tf.reduce_sum([w[i] * inputs[i] for i in range(2)], axis=0)
        return total / (tf.reduce_sum(w) + 1e-4)


@pytest.mark.slow
def test_single_numbers_are_compared_layer_by_layer():
    """Micro's interpreter takes the pieces' inputs without any axis as such."""
    pytest.importorskip("tflite_micro")
    inputs = layers.Input((4, 4, 3))
    model = keras.Model(inputs, Fused()([inputs, layers.Conv2D(3, 3, padding="same")(inputs)]))
    x = np.random.default_rng(1).normal(size=(4, 4, 4, 3)).astype(np.float32)
    qat = quantize_on(model, x, target="ethos_u55")
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), x, per_layer=True)
    assert report.identical == 1
    assert not report.differing


class Factored(layers.Layer):
    """Computes a kernel from weights with unequal first sizes."""

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
