"""Tests that models with a fixed batch size accept other batches of independent examples."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.tflite.reader import FileGraph
from tests.helpers import export_exact, images, keras, observe, quantize_on
from tests.networks.small import layers

SHAPE = (5, 4)
X = images(20, SHAPE)


def quantized(build, size=8):
    keras.utils.set_random_seed(3)
    x = keras.Input(SHAPE, batch_size=size)
    return observe(keras_qat.quantize_model(keras.Model(x, build(x))), X[:16], batches=2)


def with_shapes(x):
    x = layers.Dense(4)(layers.Conv1D(4, 3, padding="same")(x))
    return layers.Dense(3)(tf.reshape(x, (tf.shape(x)[0], 20)))


class ReadsBatch(layers.Layer):
    """A layer that reads the batch size."""

    def call(self, x):
        return tf.linalg.expm(tf.reshape(x, (x.shape[0], 5, 2, 2)))


@pytest.mark.slow
@pytest.mark.legacy
def test_takes_batches_of_any_size():
    qat, with_open_batch = quantized(with_shapes), quantized(with_shapes, None)
    with_open_batch.set_weights(qat.get_weights())
    y = with_open_batch.predict(X, verbose=0)
    np.testing.assert_array_equal(qat.predict(X, verbose=0), y)
    np.testing.assert_array_equal(qat.predict(X, batch_size=8, verbose=0), y)
    np.testing.assert_array_equal(qat(X), y)
    qat.compile("sgd", "mse")
    assert qat.evaluate(X, y, verbose=0) == 0
    history = qat.fit(X[:8], y[:8], validation_data=(X, y), batch_size=8, verbose=0).history
    assert np.isfinite(history["val_loss"]).all()
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), X, per_layer=True)
    assert report.examples == 20
    assert report.identical == 1


def test_operations_that_hold_the_batch_size():
    qat = quantized(lambda x: layers.Dense(3)(tf.reshape(layers.Dense(4)(x), (8, -1))))
    contents = export_exact(qat, X)
    outputs = keras_qat.simulate(qat, X[:16]).outputs
    codes = keras_qat.TFLiteModel(contents).predict(X, codes=True)
    np.testing.assert_array_equal(next(iter(outputs.values())).codes, codes[:16])
    keras_qat.calibrate(qat, X[:16])


def test_layers_that_read_the_batch_size():
    qat = quantized(lambda x: layers.Dense(3)(layers.Flatten()(ReadsBatch()(x))))
    np.testing.assert_array_equal(qat.predict_on_batch(X[:8]), qat(X[:8]))


class AddsZeros(layers.Layer):
    """A layer that creates a tensor with the batch size."""

    def call(self, x):
        return tf.concat([x, tf.zeros([x.shape[0], 8])], -1)


class VisitsExamples(layers.Layer):
    """A layer that computes the examples one by one."""

    def call(self, x):
        return tf.stack([2.0 * one for one in tf.unstack(x, num=ROWS)])


class Centers(layers.Layer):
    """A layer with results that depend on the batch, unlike their shapes."""

    def call(self, x):
        return x - tf.reduce_mean(x, 0, keepdims=True)


ROWS = 4
MIXING = {
    "neighbours": lambda x, links: tf.matmul(links, layers.Dense(8)(x)),
    "zeros": lambda x, links: AddsZeros()(x),
    "unstack": lambda x, links: VisitsExamples()(x),
    "mean": lambda x, links: Centers()(x),
    "halves": lambda x, links: tf.concat(tf.split(x, 2, axis=0)[::-1], 0),
    "slices": lambda x, links: tf.concat([x[i : i + 1] for i in range(ROWS)], 0),
}


def read_batch(contents):
    return next(iter(FileGraph(contents).inputs.values())).shape[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", MIXING)
@pytest.mark.parametrize("target", [None, "tflm", "ethos_u55"])
def test_life_of_a_model_that_computes_its_examples_together(kind, target, tmp_path):
    keras.utils.set_random_seed(3)
    x, links = keras.Input((8,), batch_size=ROWS), keras.Input((ROWS,), batch_size=ROWS)
    y = layers.Dense(3)(MIXING[kind](layers.Dense(8)(x), links)) + tf.reduce_sum(links, 1)[:, None]
    model, data = keras.Model([x, links], y), [images(5 * ROWS, (8,)), images(5 * ROWS, (ROWS,))]
    assert keras_qat.plan(model, target=target).rows
    qat = quantize_on(model, data, target=target)
    keras_qat.calibrate(qat, data, method="mse")
    qat.compile("sgd", "mse")
    qat.fit(data, model.predict(data, batch_size=ROWS, verbose=0), batch_size=ROWS, verbose=0)
    contents = keras_qat.export_tflite(qat)
    assert read_batch(contents) == ROWS if target else -1
    report = keras_qat.verify(qat, contents, data, per_layer=True)
    assert report.identical == 1
    assert not report.notes
    if target is None:
        assert keras_qat.diagnose(qat, data).examples == 2 * ROWS
    qat.save(tmp_path / "model.keras")
    own = {each.__name__: each for each in (AddsZeros, VisitsExamples, Centers)}
    loaded = keras.models.load_model(tmp_path / "model.keras", custom_objects=own)
    predicted = (each.predict(data, batch_size=ROWS, verbose=0) for each in (qat, loaded))
    np.testing.assert_array_equal(*predicted)


def test_independent_examples_have_the_target_s_batch_size():
    keras.utils.set_random_seed(3)
    x = keras.Input(SHAPE, batch_size=8)
    qat = quantize_on(keras.Model(x, with_shapes(x)), X[:16], target="tflm")
    contents = keras_qat.export_tflite(qat)
    assert read_batch(contents) == 1
    report = keras_qat.verify(qat, contents, X[:16], per_layer=True)
    assert report.identical == 1
    assert report.tensors


def test_too_few_examples_for_a_layer_that_reads_the_batch_size():
    x = keras.Input(SHAPE, batch_size=8)
    qat = keras_qat.quantize_model(keras.Model(x, AddsZeros()(layers.Flatten()(x))))
    for use in (keras_qat.calibrate, keras_qat.simulate):
        with pytest.raises(ValueError, match="needs batches of 8 examples, not 4"):
            use(qat, X[:12])
        keras_qat.calibrate(qat, X[:16])
