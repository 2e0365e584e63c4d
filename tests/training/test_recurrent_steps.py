"""Tests that a recurrent layer's fused steps have the gradients and ranges of a plain loop."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.training import recurrent
from tests.helpers import keras, layers, rng


def run_in_plain_loop(step, multiply, weights, values, states, unroll):
    """Runs the steps one by one. TensorFlow differentiates each operation."""
    results, observed = [], []
    for index in range(values[next(iter(weights))].shape[0]):
        of_step = {name: x[index] for name, x in values.items()}
        states, seen = step(
            lambda part, x: multiply(part, x, *weights[part]), of_step, tuple(states)
        )
        results.append(states)
        observed.append(seen)
    return tuple(
        tf.nest.map_structure(lambda *x: tf.stack(x), *items) for items in (results, observed)
    )


def make(kind, **options):
    return lambda x: kind(4, **options)(x)


def make_masked(kind, **options):
    return lambda x: kind(4, **options)(layers.Masking(0.0)(x))


def make_for_images(**options):
    return lambda x: layers.ConvLSTM1D(2, 3, **options)(x[..., None])


FORMS = {
    "gru": make(layers.GRU, return_sequences=True),
    "gru, reset before": make(layers.GRU, reset_after=False, unroll=True),
    "gru, hard": make(layers.GRU, recurrent_activation="hard_sigmoid", bias_initializer="uniform"),
    "gru, backwards": make(layers.GRU, go_backwards=True, return_sequences=True),
    "gru, dropout": make(layers.GRU, dropout=0.3, recurrent_dropout=0.3),
    "gru, masked": make_masked(layers.GRU, return_sequences=True),
    "both ways": lambda x: layers.Bidirectional(layers.GRU(4, return_sequences=True))(
        layers.Masking(0.0)(x)
    ),
    "gru, given state": lambda x: layers.GRU(4)(x, initial_state=layers.Dense(4, "tanh")(x[:, 0])),
    "lstm": make(layers.LSTM, return_sequences=True),
    "lstm, dropout": make(layers.LSTM, recurrent_dropout=0.3, implementation=1, unroll=True),
    "lstm, masked": make_masked(layers.LSTM),
    "simple": make(layers.SimpleRNN, recurrent_dropout=0.3),
    "simple, relu": make(layers.SimpleRNN, activation="relu", return_sequences=True),
    "conv": make_for_images(recurrent_dropout=0.3, return_sequences=True),
    "conv, hard": make_for_images(strides=2, recurrent_activation="hard_sigmoid", dropout=0.3),
}


def make_model(form):
    inputs = keras.Input((3, 3))
    outputs = layers.Dense(2)(layers.Flatten()(FORMS[form](inputs)))
    qat = keras_qat.quantize_model(keras.Model(inputs, outputs))
    x = np.float32(2 * rng().normal(size=(32, 3, 3)))
    x[rng().random((32, 3)) < 0.3] = 0.0
    keras_qat.calibrate(qat, 0.3 * x)  # Some values are outside of the ranges.
    return qat, tf.constant(x)


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", FORMS)
def test_gradients_and_ranges_are_those_of_a_plain_loop(form, monkeypatch):
    qat, x = make_model(form)
    before = qat.get_weights()

    def step():
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_mean((qat(x, training=True) - 0.1) ** 2)
        return loss, *tape.gradient(loss, [x, *qat.trainable_variables])

    results = []
    for run in (recurrent.run_steps, run_in_plain_loop):
        monkeypatch.setattr(recurrent, "run_steps", run)
        qat.set_weights(before)
        keras.utils.set_random_seed(0)
        gradients = tf.function(step)()
        results.append([*map(np.asarray, gradients), *qat.get_weights()])
    assert any(np.any(new != old) for new, old in zip(qat.get_weights(), before, strict=True))
    for together, plain in zip(*results, strict=True):
        largest = np.max(np.abs(plain[np.isfinite(plain)]), initial=0.0)
        np.testing.assert_allclose(together, plain, rtol=1e-5, atol=2e-5 * largest)


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"jit_compile": True}], ids=str)
def test_training_computes_the_same_eagerly_and_in_xla(options):
    weights = []
    for own in ({}, options):
        keras.utils.set_random_seed(0)
        qat, x = make_model("gru, reset before")
        qat.compile(keras.optimizers.SGD(0.1), "mse", **own)
        qat.fit(x, tf.ones([32, 2]), 16, 2, verbose=0, shuffle=False)
        weights.append(qat.get_weights())
    for plain, other in zip(*weights, strict=True):
        np.testing.assert_allclose(plain, other, atol=1e-3)


@pytest.mark.sample(2)
@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("kind", [layers.GRU, layers.SimpleRNN])
def test_the_first_training_batch_is_rounded_to_its_own_ranges(kind, stateful):
    inputs = keras.Input((5, 3), 8)
    model = keras.Model(inputs, kind(4, stateful=stateful)(inputs))
    x = tf.constant(rng().normal(size=(8, 5, 3)), tf.float32)
    expected = model(x)
    qat = keras_qat.quantize_model(model)
    qat.compile(keras.optimizers.SGD(0.0), "mse")
    assert qat.train_on_batch(x, expected) < 1e-3 * np.mean(np.square(expected))
