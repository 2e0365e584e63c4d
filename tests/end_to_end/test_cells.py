"""Recurrent layers whose steps are calls of their cell: custom cells, states of an LSTM."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.helpers import images, keras, layers
from tests.networks.forms.cells_and_convolutions import MODELS, SHAPE, Minimal

pytestmark = pytest.mark.legacy


@keras.utils.register_keras_serializable("cells")
class Branching(Minimal):
    """A cell that cannot be traced."""

    def call(self, inputs, states):
        return super().call(inputs if tf.reduce_max(inputs) > 0 else -inputs, states)


def model_of(name, shape=SHAPE):
    keras.utils.set_random_seed(3)
    x = keras.Input(shape, name="x")
    return keras.Model(x, MODELS[name](x))


@pytest.mark.slow
def test_dropout_is_the_same_for_all_steps():
    """Each example loses whole channels of its sequence, in training alone."""
    x = keras.Input((4, 6))
    y, _, state = layers.LSTM(3, dropout=0.5, return_sequences=True, return_state=True)(x)
    model = keras.Model(x, [y, state])
    qat = keras_qat.quantize_model(model, strict=True)
    (dropout,) = [layer for layer in qat.layers if layer.name.endswith("dropout")]
    dropped = dropout(np.ones((64, 4, 6), np.float32), training=True).numpy()
    assert set(np.unique(dropped)) == {0.0, 2.0} and np.all(dropped == dropped[:, :1])
    keras_qat.set_quantization(qat, False)
    data = images(8, (4, 6))
    np.testing.assert_allclose(qat(data)[1], model(data)[1], atol=1e-5)
    assert np.any(qat(data, training=True)[1] != model(data)[1])


def reason_of(model, **options):
    (reason,) = keras_qat.plan(model, **options).float_layers.values()
    return reason


@pytest.mark.slow
def test_other_layers_stay_whole():
    assert "it has more than 32 steps" in reason_of(model_of("custom cell", (33, 4)))
    assert "or an unknown number" in reason_of(model_of("custom cell", (None, 4)))
    for layer in (
        layers.RNN(layers.LSTMCell(3, dropout=0.5)),
        layers.GRU(3, "relu", recurrent_dropout=0.5),
    ):
        x = keras.Input(SHAPE)
        assert reason_of(keras.Model(x, layer(x)))
    x = keras.Input(SHAPE)
    model = keras.Model(x, layers.RNN(Branching(3), name="rnn")(x))
    with pytest.warns(UserWarning, match="rnn: .*reduce_max"):
        qat = keras_qat.quantize_model(model)
    assert len(qat.layers) == len(model.layers) + 2
    recipe = keras_qat.recipes.int8().override("rnn", quantize=False)
    assert reason_of(model_of("custom cell"), recipe=recipe)
