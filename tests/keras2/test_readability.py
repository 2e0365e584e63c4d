"""Tests models that cannot be read: they are refused with a message that says what to do."""

import pytest
import tensorflow as tf

import keras_qat
from keras_qat.keras2.backend import keras
from tests.networks.small import layers

pytestmark = pytest.mark.legacy


def test_unbuilt_sequential():
    model = keras.Sequential([layers.Dense(2)], name="unbuilt")
    with pytest.raises(ValueError, match=r"'unbuilt' has no input shape yet.*keras\.Input"):
        keras_qat.quantize_model(model)
    model.build((None, 3))
    keras_qat.quantize_model(model)


def lookups():
    words = layers.StringLookup(output_mode="one_hot", name="words")
    words.adapt(["a", "b"])
    numbers = layers.IntegerLookup(name="numbers")
    numbers.adapt([3, 5])
    return words, numbers


@pytest.mark.parametrize("index", [0, 1])
def test_adapted_vocabularies(index):
    lookup = lookups()[index]
    x = keras.Input((1,), dtype=("string", "int64")[index])
    rest = keras.Sequential([layers.Dense(2)])
    model = keras.Model(x, rest(tf.cast(lookup(x), tf.float32)))
    message = rf"'{lookup.name}' .* no operation for {type(lookup).__name__}.*input pipeline"
    for verb in (keras_qat.plan, keras_qat.quantize_model):
        with pytest.raises(ValueError, match=message):
            verb(model)
    with pytest.raises(ValueError, match=message):  # Also inside of another model.
        keras_qat.plan(keras.Sequential([model, layers.ReLU()]))


@pytest.mark.parametrize("model", [None, "model.h5", layers.Dense(2)])
def test_no_model(model):
    with pytest.raises(ValueError, match=r"Expected a Keras model, got \w+"):
        keras_qat.quantize_model(model)


def test_a_model_that_only_trains_others():
    class GAN(keras.Model):
        def __init__(self):
            super().__init__()
            self.generator = keras.Sequential([keras.Input((4,)), layers.Dense(3)])

    with pytest.raises(ValueError, match=r"GAN.*no call.*Quantize the models that it trains"):
        keras_qat.quantize_model(GAN())
