"""Distillation: the student comes nearer to its teacher, with labels and without."""

import numpy as np
import pytest

import keras_qat
from keras_qat import recipes
from keras_qat.training.distillation import DISTANCES
from tests.helpers import assert_all_equal, images, keras, quantize_on, rng, save_and_load, scramble
from tests.networks.small import functional, layers, tiny_net

pytestmark = pytest.mark.legacy
X = images(64, (6, 6, 2))


@pytest.fixture
def pair():
    teacher = scramble(tiny_net())
    qat = quantize_on(scramble(tiny_net(), seed=5), X, "int4_weights")
    return teacher, qat


def test_student_comes_nearer(pair, tmp_path):
    teacher, qat = pair
    kept, wanted = teacher.get_weights(), teacher.predict(X, verbose=0)
    before = np.mean((qat.predict(X, verbose=0) - wanted) ** 2)
    distiller = keras_qat.Distiller(qat, teacher, distance="squared")
    distiller.compile(keras.optimizers.Adam(1e-2))
    callbacks = [keras_qat.callbacks.FreezeBatchNorm(0), keras_qat.callbacks.QuantDelay(1)]
    history = distiller.fit(X, epochs=4, batch_size=16, verbose=0, callbacks=callbacks).history
    assert set(history) == {"loss", "distance"}
    after = np.mean((qat.predict(X, verbose=0) - wanted) ** 2)
    assert after < 0.7 * before
    assert int(qat.get_layer("quant_conv").quantize_from.numpy()) == 1
    assert_all_equal(teacher.get_weights(), kept)
    again = save_and_load(distiller, tmp_path / "student.keras")
    np.testing.assert_array_equal(again.predict(X, verbose=0), qat.predict(X, verbose=0))
    assert len(distiller.trainable_weights) == len(qat.trainable_weights)


def test_distances_by_hand():
    exact, array = rng().normal(size=(2, 6, 4)).astype(np.float32)
    one, other = (np.exp(item) / np.exp(item).sum(-1, keepdims=True) for item in (exact, array))
    expected = np.mean(np.sum(one * np.log(one / other), -1))
    assert float(DISTANCES["logits"](exact, array)) == pytest.approx(expected, rel=1e-4)
    assert float(DISTANCES["probabilities"](one, other)) == pytest.approx(expected, rel=1e-4)
    assert float(DISTANCES["logits"](exact, exact)) == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_several_outputs_and_learned_ranges():
    def build(x):
        return [layers.Dense(2)(x), layers.Dense(3)(x)]

    x, model = images(32, (5,)), functional((5,), build=build)
    qat = keras_qat.quantize_model(model, recipes.low_bits())
    distiller = keras_qat.Distiller(qat, model, distance=lambda one, other: (one - other)[0, 0])
    distiller.compile("sgd")
    with pytest.raises(ValueError, match=r"learned ranges? without an initial value"):
        distiller.fit(x, verbose=0)
    keras_qat.calibrate(qat, x)
    distiller.fit(x, verbose=0)


def test_bad_input(pair):
    teacher, qat = pair
    with pytest.raises(ValueError, match="not quantization-aware"):
        keras_qat.Distiller(teacher, teacher)
    with pytest.raises(ValueError, match="distance='kl': use one of 'logits'"):
        keras_qat.Distiller(qat, teacher, distance="kl")
    with pytest.raises(ValueError, match=r"temperature=0\.5"):
        keras_qat.Distiller(qat, teacher, temperature=0.5)
