"""Tests delays, exact to the step. Each test compares with an equivalent training."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.callbacks import FreezeBatchNorm, FreezeRanges, QuantDelay
from keras_qat.training import phase_graphs
from keras_qat.training.phase_graphs import get_phase_finder
from keras_qat.training.schedule import list_scheduled_layers
from keras_qat.training.scheduled_layer import assuming
from tests.helpers import assert_all_close, images, keras, rng, scramble, train
from tests.networks.small import tiny_net

X = images(80, (6, 6, 2))


FILES = ("model.keras", "model.h5", "model", "weights.h5")


def quantized(seed: int = 0):
    return keras_qat.quantize_model(scramble(tiny_net(), seed))


def reloaded(qat, path):
    """Returns the model loaded from a file, or a new model with weights from a file."""
    if "weights" in path.name:
        qat.save_weights(str(path))
        loaded = quantized(seed=9)
        loaded.load_weights(str(path))
        return loaded
    qat.save(str(path))
    return keras.models.load_model(str(path))


class PlainLoop:
    """A training loop that switches phases manually, with one graph for all steps."""

    def __init__(self):
        self.qat = quantized()
        self.start = self.qat.get_weights()
        self.optimizer = keras.optimizers.SGD(0.01)
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.loss(y, self.qat(x, training=True))
        weights = self.qat.trainable_variables
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))

    def run(self, steps: int, quantize_from: int, freeze_from: int, *callbacks) -> list[np.ndarray]:
        self.qat.set_weights(self.start)
        for callback in callbacks:
            callback.set_model(self.qat)
            callback.on_train_begin()
        labels = rng(5).integers(0, 3, steps * 8)
        for number in range(1, steps + 1):
            if not callbacks:
                keras_qat.set_quantization(self.qat, number >= quantize_from)
                keras_qat.freeze_batch_norm(self.qat, number >= freeze_from)
            batch = slice((number - 1) * 8, number * 8)
            self.step(tf.constant(X[batch]), tf.constant(labels[batch]))
        return numbers(self.qat)


@functools.cache
def plain_loop() -> PlainLoop:
    return PlainLoop()


def reference(steps: int, quantize_from: int, freeze_from: int) -> list[np.ndarray]:
    """Returns weights and ranges after some steps."""
    return plain_loop().run(steps, quantize_from, freeze_from)


def numbers(qat) -> list[np.ndarray]:
    """Returns float weights and ranges, without counters."""
    return [weight.numpy() for weight in qat.weights if weight.dtype == tf.float32]


def assert_same(one, other) -> None:
    assert_all_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.sample(1)
@pytest.mark.legacy
@pytest.mark.parametrize(("quantize_from", "freeze_from"), [(4, 99), (3, 6), (0, 1)])
def test_delays_are_exact_to_the_step(quantize_from, freeze_from):
    qat = quantized()
    train(qat, X, 8, callbacks=[QuantDelay(quantize_from), FreezeBatchNorm(freeze_from)])
    assert_same(numbers(qat), reference(8, quantize_from, freeze_from))


def test_delays_in_a_custom_loop_are_exact_to_the_step():
    """The loop's graph compares counters with the delays in each step."""
    callbacks = QuantDelay(4), FreezeBatchNorm(6)
    assert_same(plain_loop().run(8, 4, 6, *callbacks), reference(8, 4, 6))


@pytest.mark.sample(1)
@pytest.mark.legacy
@pytest.mark.parametrize("delay", [3, 4, 5])
def test_exact_with_several_steps_per_execution(delay):
    qat = quantized()
    train(qat, X, 8, steps_per_execution=4, callbacks=[QuantDelay(delay), FreezeBatchNorm(delay)])
    assert_same(numbers(qat), reference(8, delay, delay))


@pytest.mark.slow
@pytest.mark.parametrize("kind", FILES)
def test_delay_goes_on_after_saving_and_loading(kind, tmp_path):
    labels = rng(5).integers(0, 3, 64)
    callbacks = [QuantDelay(5), FreezeBatchNorm(6)]

    def fit(qat, part):
        qat.compile(
            keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
        qat.fit(X[part], labels[part], batch_size=8, verbose=0, shuffle=False, callbacks=callbacks)

    qat = quantized()
    fit(qat, slice(0, 24))
    loaded = reloaded(qat, tmp_path / kind)
    fit(loaded, slice(24, 64))
    assert_same(numbers(loaded), reference(8, 5, 6))


def test_delay_holds_in_inference_until_it_is_over():
    """Between steps, a model computes like the last step: in float, or quantized."""
    qat = quantized()
    train(qat, X, 4, callbacks=[QuantDelay(5)])
    before = qat.predict(X, verbose=0)
    keras_qat.set_quantization(qat, False)
    np.testing.assert_array_equal(qat.predict(X, verbose=0), before)
    train(qat, X, 1, callbacks=[QuantDelay(5)])
    logits = keras_qat.quantizers(qat)[-1]
    codes = qat.predict(X, verbose=0) / ((logits.maximum - logits.minimum) / 255)
    np.testing.assert_allclose(codes, np.round(codes), atol=1e-3)


@pytest.mark.legacy
def test_frozen_batch_norm_keeps_its_statistics_and_trains_gamma_and_beta():
    qat = quantized()
    norm = qat.get_layer("quant_conv").batch_norm
    before = [weight.numpy() for weight in norm.weights]
    keras_qat.freeze_batch_norm(qat)
    train(qat, X, 3)
    gamma, beta, mean, variance = (
        (weight.numpy() != value).any() for weight, value in zip(norm.weights, before, strict=True)
    )
    assert gamma
    assert beta
    assert not mean
    assert not variance
    keras_qat.freeze_batch_norm(qat, False)
    train(qat, X, 1)
    assert (norm.moving_mean.numpy() != before[2]).any()


def test_frozen_batch_norm_normalizes_with_its_statistics_in_training():
    qat = quantized()
    keras_qat.freeze_batch_norm(qat)
    keras_qat.set_quantization(qat, False)
    np.testing.assert_allclose(
        qat(X[:8], training=True), qat(X[:8], training=False), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("callback", [QuantDelay, FreezeBatchNorm, FreezeRanges])
@pytest.mark.parametrize("steps", [-1, 1.5, "10", True])
def test_bad_steps(callback, steps):
    with pytest.raises(ValueError, match=r"steps=.*: pass an integer of at least 0"):
        callback(steps)


def activation_ranges(qat):
    """Returns the ends of ranges, and how many batches they average."""
    observers = [
        observer
        for layer in list_scheduled_layers(qat)
        for q in layer.quantizers
        for observer in q.observers
    ]
    return np.array([[v.numpy() for v in observer.variables] for observer in observers])


@pytest.mark.sample(1)
@pytest.mark.legacy
@pytest.mark.parametrize("steps_per_execution", [1, 4])
@pytest.mark.parametrize("recipe", ["int8", pytest.param("contrib", marks=pytest.mark.slow)])
def test_ranges_freeze_exactly_at_their_step(recipe, steps_per_execution):
    """Weights keep training, and ranges are exactly those of the step before."""
    shorter = keras_qat.quantize_model(scramble(tiny_net()), recipe)
    train(shorter, X, 5)
    qat = keras_qat.quantize_model(scramble(tiny_net()), recipe)
    train(qat, X, 8, steps_per_execution=steps_per_execution, callbacks=[FreezeRanges(6)])
    np.testing.assert_array_equal(activation_ranges(qat), activation_ranges(shorter))
    kernels = [variant.get_layer("quant_conv").layer.kernel.numpy() for variant in (qat, shorter)]
    assert (kernels[0] != kernels[1]).any()
    train(qat, X, 1, callbacks=[FreezeRanges(99)])
    assert (activation_ranges(qat) != activation_ranges(shorter)).any()


def test_frozen_ranges_compute_what_observed_ones_do():
    """A step that quantizes with the same ranges has the same results."""
    qat = quantized()
    train(qat, X, 3)
    keras_qat.freeze_ranges(qat)
    with tf.GradientTape(persistent=True) as tape:
        eager = qat(X[:8], training=True)
    weight = qat.get_layer("quant_conv").layer.kernel
    phase = get_phase_finder(qat)(True)
    assert phase == (True, True, False, True, True, 1)
    with assuming(phase, list(list_scheduled_layers(qat))), tf.GradientTape() as other:
        known = qat(X[:8], training=True)
    np.testing.assert_array_equal(eager, known)
    one, two = tape.gradient(eager, weight), other.gradient(known, weight)
    np.testing.assert_allclose(one, two, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The data for input")  # The dead ReLU differs.
@pytest.mark.parametrize("first_steps", [0, 3, 300])
@pytest.mark.parametrize("is_dead", [False, True])
def test_steps_are_the_same_in_any_graph(first_steps, is_dead, monkeypatch):
    """Whether a step for one phase is traced at once, soon, or never."""

    def trained(first_steps):
        monkeypatch.setattr(phase_graphs, "FIRST_STEPS", first_steps)
        qat = quantized()
        biases = qat.get_layer("quant_conv").batch_norm.beta
        if is_dead:  # Its ReLU, which has an empty range.
            biases.assign(tf.fill(biases.shape, -100.0))
        callbacks = [QuantDelay(2), FreezeBatchNorm(4), FreezeRanges(6)]
        train(qat, X, 8, callbacks=callbacks)
        biases.assign(tf.zeros_like(biases))  # It is alive again, with the range of an empty range.
        train(qat, X, 3, callbacks=callbacks)
        return numbers(qat)

    assert_same(trained(first_steps), trained(0))


@pytest.mark.slow
@pytest.mark.parametrize("kind", FILES)
def test_frozen_ranges_stay_so_after_saving_and_loading(kind, tmp_path):
    qat = quantized()
    train(qat, X, 4, callbacks=[FreezeRanges(5)])
    loaded = reloaded(qat, tmp_path / kind)
    before = activation_ranges(qat)
    train(loaded, X, 3)
    np.testing.assert_array_equal(activation_ranges(loaded), before)
