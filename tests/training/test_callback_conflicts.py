"""Tests callbacks that contradict each other, or compare float with quantized epochs."""

import dataclasses
import warnings

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.callbacks import FreezeBatchNorm, FreezeRanges, QuantDelay
from keras_qat.training.schedule import steps_done
from tests.helpers import Trainer, images, keras
from tests.networks.small import functional, layers

X = images(40, (6,))
Y = X[:, :3]
KINDS = [
    QuantDelay,
    *(pytest.param(item, marks=pytest.mark.slow) for item in (FreezeBatchNorm, FreezeRanges)),
]
STEPS = 5
"""Steps of an epoch, in batches of 8."""


def quantized(name: str = "net"):
    model = functional((6,), build=lambda x: layers.Dense(3)(layers.Dense(4, "relu")(x)))
    model._name = name
    qat = keras_qat.quantize_model(model)
    qat.compile("sgd", "mse")
    return qat


def fit(model, *callbacks, epochs=4, x=X, y=Y, **kwargs):
    """Returns the warnings of training."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        size = None if isinstance(x, tf.data.Dataset) else 8
        model.fit(x, y, size, epochs, verbose=0, callbacks=list(callbacks), **kwargs)
    return [str(warning.message) for warning in told]


def stop(**kwargs):
    return keras.callbacks.EarlyStopping("loss", restore_best_weights=True, **kwargs)


def test_early_stopping_may_restore_a_float_epoch():
    qat = quantized()
    (told,) = fit(qat, QuantDelay(12), stop())
    assert told.startswith(
        "EarlyStopping compares float epochs of 'net', before QuantDelay(12), with quantized "
        "epochs, and may restore weights"
    )
    assert "Pass start_from_epoch=3 to EarlyStopping. Or" in told
    (told,) = fit(quantized(), QuantDelay(STEPS + 1), stop())  # The first epoch is in float.
    assert "Pass start_from_epoch=1 to" in told
    assert fit(quantized(), QuantDelay(STEPS), stop()) == []


def test_the_epoch_counts_from_where_training_goes_on():
    qat = quantized()
    delay = QuantDelay(17)
    fit(qat, delay, epochs=2)
    assert steps_done(qat) == 2 * STEPS
    (told,) = fit(qat, delay, stop(), epochs=8, initial_epoch=2)
    assert "start_from_epoch=4 " in told
    assert fit(qat, delay, stop()) == []  # The delay is over.


def test_callbacks_that_keep_the_best_or_wait_for_better(tmp_path):
    keep = keras.callbacks.ModelCheckpoint(f"{tmp_path}/best.keras", "loss", save_best_only=True)
    last = keras.callbacks.ModelCheckpoint(f"{tmp_path}/last.keras")
    lower = keras.callbacks.ReduceLROnPlateau("loss")
    ends = keras.callbacks.EarlyStopping("loss")
    told = fit(quantized(), keep, last, lower, ends, QuantDelay(7))
    assert len(told) == 3
    for text, name, harm in zip(
        told,
        ("ModelCheckpoint", "ReduceLROnPlateau", "EarlyStopping"),
        ("keep weights", "lower the learning rate", "stop training"),
        strict=True,
    ):
        assert text.startswith(name)
        assert harm in text
    assert "Call fit without it up to epoch 2, and then again with it. Or" in told[0]


def test_derived_callbacks_and_data_of_unknown_length():
    class Mine(keras.callbacks.EarlyStopping):
        pass

    def batches():
        for start in range(0, 40, 8):
            yield X[start : start + 8], Y[start : start + 8]

    shapes = tuple(tf.TensorSpec((None, size)) for size in (6, 3))
    data = tf.data.Dataset.from_generator(batches, output_signature=shapes)
    (told,) = fit(quantized(), QuantDelay(12), Mine("loss"), x=data, y=None)
    assert "Pass start_from_epoch=the first epoch after that to Mine" in told


def test_other_models_that_train_one():
    qat = quantized()
    trainer = Trainer(qat)
    trainer.compile("sgd", "mse")
    (told,) = fit(trainer, QuantDelay(12, model=qat), stop())
    assert "start_from_epoch=3 " in told
    with pytest.raises(
        ValueError, match=r"QuantDelay\(3\) and QuantDelay\(4\) of 'net' contradict"
    ):
        fit(trainer, QuantDelay(3, model=qat), QuantDelay(4, model=qat))


def test_a_delay_that_outlasts_training(caplog):
    qat = quantized("outlasted")
    assert fit(qat, QuantDelay(21), stop()) == []
    assert "'outlasted' trains in float until fit ends, at step 20: QuantDelay(21)" in caplog.text
    caplog.clear()
    assert len(fit(quantized("reached"), QuantDelay(20), stop())) == 1
    assert "reached" not in caplog.text


@pytest.mark.parametrize("callback", KINDS)
def test_two_of_a_kind(callback):
    qat = quantized()
    before = qat.get_weights()
    name = callback.__name__
    with pytest.raises(ValueError, match=rf"{name}\(2\) and {name}\(9\) of 'net' contradict each"):
        fit(qat, callback(2), callback(9))
    for weight, now in zip(before, qat.get_weights(), strict=True):
        if np.ndim(weight):
            np.testing.assert_array_equal(weight, now)
    fit(qat, callback(2), callback(2), epochs=1)


@pytest.mark.parametrize("callback", KINDS)
def test_a_callback_of_another_model(callback):
    qat, other = quantized(), quantized("other")
    with pytest.raises(ValueError, match=r"\(9, model='other'\) is for another model: fit trains"):
        fit(qat, callback(9, model=other))
    fit(qat, callback(9, model=qat), epochs=1)


class TestFrozenWithoutData:
    MESSAGE = "The ranges of 'net' are frozen from the first step on, but have seen no data. Call"

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("callbacks", [(), (QuantDelay(3),)])
    def test_by_a_callback(self, callbacks):
        qat = quantized()
        with pytest.raises(ValueError, match=self.MESSAGE):
            fit(qat, FreezeRanges(1), *callbacks)
        assert steps_done(qat) == 0
        keras_qat.calibrate(qat, X)
        before = [(item.minimum, item.maximum) for item in keras_qat.quantizers(qat)[::2]]
        fit(qat, FreezeRanges(1), *callbacks, epochs=1)
        after = [(item.minimum, item.maximum) for item in keras_qat.quantizers(qat)[::2]]
        assert before == after

    def test_at_once(self):
        qat = quantized()
        keras_qat.freeze_ranges(qat)
        with pytest.raises(ValueError, match=self.MESSAGE):
            qat.train_on_batch(X, Y)

    def test_one_range_without_data(self):
        """A dead ReLU must not keep other layers from quantizing after the delay, in any graph."""
        recipe = keras_qat.recipes.int8()
        last = dataclasses.replace(recipe.activations, observer="last_value")
        recipe = dataclasses.replace(recipe, activations=last)
        model = functional((6,), build=lambda x: layers.Dense(3)(layers.Dense(4, "relu")(x)))
        model.layers[1].set_weights([np.zeros((6, 4)), np.full(4, -1.0)])
        qat = keras_qat.quantize_model(model, recipe)
        qat.compile("sgd", "mse")
        qat(X, training=True)
        assert [item.calibrated for item in keras_qat.quantizers(qat)].count(False) == 2
        fit(qat, FreezeRanges(1), QuantDelay(4), epochs=1)
        assert steps_done(qat) == 1 + STEPS


class TestOptimizers:
    def test_one_of_the_float_model(self):
        model = functional((6,), build=lambda x: layers.Dense(3)(x))
        optimizer = keras.optimizers.Adam(0.02)
        model.compile(optimizer, "mse")
        model.fit(X, Y, verbose=0)
        qat = keras_qat.quantize_model(model)
        qat.compile(optimizer, "mse")
        message = r"The optimizer of '\w+' \(Adam\) has already updated other weights.* optimizer"
        with pytest.raises(ValueError, match=message) as caught:
            qat.fit(X, Y, verbose=0)
        assert len(str(caught.value)) < 300
        qat.compile(keras.optimizers.Adam.from_config(optimizer.get_config()), "mse")
        qat.fit(X, Y, verbose=0)
        qat.fit(X, Y, verbose=0, callbacks=[QuantDelay(0)])
        assert float(qat.optimizer.learning_rate) == pytest.approx(0.02)

    def test_one_that_knows_all_weights(self):
        """An optimizer for two models that train in turn has the weights of both."""
        first, second = quantized("first"), quantized("second")
        optimizer = keras.optimizers.Adam()
        optimizer.build(first.trainable_variables + second.trainable_variables)
        for qat in (first, second):
            qat.compile(optimizer, "mse")
            qat.fit(X, Y, verbose=0)
