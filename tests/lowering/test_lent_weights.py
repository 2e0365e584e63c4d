"""Tests weights that several layers read, that objects hold, or that kernels are computed from."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.helpers import build_model, export_exact, images, keras, layers, quantize_on
from tests.networks.computed_kernels import COMPUTED
from tests.networks.forms.weights import ROWS, Held, HoldsNumbers, Module, X
from tests.networks.lent_weights import TiedHead, language_model


class Counting(layers.Conv2D):
    """Changes its kernel differently in each call."""

    def call(self, x):
        self.kernel.assign(self.kernel * 0.5)
        return super().call(x)


class Remembering(layers.Dense):
    """Stores a tensor that depends on its input."""

    def call(self, x):
        self.bias.assign(tf.reduce_mean(x, 0)[:4])
        return super().call(x)


@pytest.mark.parametrize(
    ("layer", "shape", "reason"),
    [
        (Counting(2, 3), (8, 8, 1), "it assigns another value to a weight in each call"),
        (Remembering(4), (6,), "it assigns a value that depends on its input to a weight"),
    ],
)
def test_other_assignments_stay_whole(layer, shape, reason):
    model = build_model(shape, lambda inputs: layers.Flatten()(layer(inputs)))
    kernel = layer.kernel.numpy()
    assert reason in keras_qat.plan(model).float_layers[layer.name]
    np.testing.assert_array_equal(layer.kernel, kernel)


def test_what_stays_whole_keeps_its_weights():
    """An untraced layer keeps its weights, because two layers would otherwise train copies."""
    model, _ = language_model(TiedHead)
    recipe = keras_qat.recipes.int8().override("table", open=False)
    (reason,) = keras_qat.plan(model, recipe).float_layers.values()
    assert "it reads table/embeddings:0, a weight of another layer" in reason


def test_stripping_says_what_keras_cannot_copy():
    """The Lambda of a copy would read the first model's table."""
    table = layers.Embedding(20, 8, name="table")
    tokens = keras.Input((6,), dtype="int32")
    tied = layers.Lambda(lambda x: tf.matmul(x, table.embeddings, transpose_b=True))
    qat = keras_qat.quantize_model(keras.Model(tokens, tied(table(tokens))))
    with pytest.raises(ValueError, match="Keras cannot copy the float model"):
        keras_qat.strip_quantization(qat)


def test_stripping_names_a_call_that_keras_reads_wrongly():
    """Keras' copy of a tf.einsum with three tensors has no tensors, and cannot be loaded."""
    x, y = keras.Input((2, 3)), keras.Input((3, 2))
    model = keras.Model([x, y], tf.einsum("bij,bjk,bij->bik", x, y, x))
    reason = "cannot copy the float model: Exception .* layer 'tf.einsum.*: Got 0 inputs.*own code"
    with pytest.raises(ValueError, match=reason):
        keras_qat.strip_quantization(keras_qat.quantize_model(model))


def test_training_objects_in_layers():
    model = build_model((4,), Held(Module, name="held"))
    qat = keras_qat.quantize_model(model)
    qat.compile("sgd", "mse")
    before = model.layers[1].first.kernel.numpy()
    qat.fit(ROWS, np.zeros((16, 3)), verbose=0)
    np.testing.assert_array_equal(model.layers[1].first.kernel, before)
    with keras.utils.custom_object_scope({"Held": Held}):
        stripped = keras_qat.strip_quantization(qat)
    assert not np.allclose(stripped.layers[1].first.kernel, before)
    np.testing.assert_allclose(qat(ROWS), stripped(ROWS), atol=0.3)


def test_real_numbers_that_do_not_train_are_weights():
    inputs = keras.Input((5, 4))
    model = keras.Model(inputs, layers.Dense(3)(HoldsNumbers("real numbers")(inputs)))
    qat = quantize_on(model, X)
    np.testing.assert_allclose(qat(X), model(X), atol=0.1)
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), X).identical == 1


SHAPE = (8, 8, 4)


@pytest.mark.legacy
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", COMPUTED)
def test_computed_kernels_are_kernels_in_the_file(name):
    plan = keras_qat.plan(build_model(SHAPE, COMPUTED[name]))
    assert "WeightTensor" not in str(plan) and not plan.float_layers


@pytest.mark.slow
@pytest.mark.legacy
def test_rounding_is_learned_for_variables_only():
    """Learned rounding cannot assign a computed kernel."""
    x = keras.Input(SHAPE)
    model = keras.Model(x, layers.Conv2D(3, 1, name="last")(COMPUTED["normalized weights"](x)))
    data = images(8)
    qat = keras_qat.quantize_model(model, "int4_weights")
    keras_qat.calibrate(qat, data, method="mse")
    keras_qat.learn_rounding(qat, data, iterations=2)
    export_exact(qat, data)
