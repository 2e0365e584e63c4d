"""Tests that traced models are saved and loaded without the custom code, or refused."""

import enum
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.helpers import images, keras, layers, save_and_load
from tests.lowering.test_opening import model_of, quantized
from tests.networks.closed import CLOSED
from tests.networks.custom import Steep

pytestmark = pytest.mark.legacy


@pytest.mark.parametrize("activation", [Steep(2.0), partial(tf.nn.leaky_relu, alpha=0.1)])
def test_activations_that_keras_cannot_save(activation, tmp_path):
    """Such activations are traced, so the model can be saved, unlike the float model."""
    model, data = model_of(lambda x: layers.Conv2D(4, 3, activation=activation)(x)), images(32)
    qat = quantized(model)
    keras_qat.calibrate(qat, data)
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), data).identical == 1
    loaded = save_and_load(qat, tmp_path / "qat.keras")
    assert keras_qat.export_tflite(loaded) == keras_qat.export_tflite(qat)
    with pytest.raises(ValueError, match="cannot be converted back to float"):
        keras_qat.strip_quantization(qat)


class WithoutConfig(layers.Layer):
    """A layer with an argument that its configuration lacks."""

    def __init__(self, other):
        super().__init__()
        self.other = other

    def call(self, inputs):
        return self.other(inputs)


def test_classes_without_get_config_are_opened(tmp_path):
    model = model_of(lambda x: WithoutConfig(layers.Conv2D(3, 1))(x))
    qat = quantized(model)
    qat(images(4), training=True)
    loaded = save_and_load(qat, tmp_path / "qat.keras")
    assert keras_qat.export_tflite(loaded) == keras_qat.export_tflite(qat)
    with pytest.raises(ValueError, match="without get_config"):
        keras_qat.strip_quantization(qat)
    closed = model_of(lambda x: WithoutConfig(closed_function)(x))
    with pytest.raises(ValueError, match=r"WithoutConfig has no get_config.*traced: "):
        keras_qat.quantize_model(closed)


class Doubled(layers.Layer):
    """A layer whose get_config forgets that `dict.update` returns None."""

    def call(self, inputs, training=None):
        return 2 * inputs

    def get_config(self):
        return super().get_config().update({"factor": 2})


class TwoPhases(WithoutConfig):
    """A layer with an argument `training` that it passes to an inner layer."""

    def call(self, inputs, training=None):
        return self.other(inputs, training=training)


def test_configuration_of_a_layer_without_weights_is_not_needed():
    assert not keras_qat.plan(model_of(TwoPhases(Doubled()))).float_layers


class Sharpened(layers.Layer):
    """A layer with default arguments, and gains that no configuration can hold."""

    def __init__(self, width=3, gains=None, **kwargs):
        super().__init__(**kwargs)
        self.gains, self.dense = gains, layers.Dense(width)

    def call(self, inputs):
        return self.dense(inputs) * self.gains


class Conditional(Sharpened):
    """A layer that stays in float."""

    def call(self, inputs):
        return tf.cond(
            tf.reduce_mean(inputs) > 0, lambda: self.dense(inputs), lambda: -inputs[..., :3]
        )


GAINS = np.ones(3, np.float32)
NO_CONFIG = "has no get_config that returns the arguments of its __init__"


def test_plan_says_that_a_float_layer_cannot_be_copied():
    model = model_of(lambda x: Conditional(gains=GAINS)(x))
    (reason,) = keras_qat.plan(model).float_layers.values()
    assert reason.endswith(f"quantize_model cannot copy it either, as Conditional {NO_CONFIG}")
    with pytest.raises(ValueError, match=rf"'conditional.*' cannot be copied, .* {NO_CONFIG}"):
        keras_qat.quantize_model(model)


class Amplified(layers.Dense):
    """A layer that inherits a configuration without its gain. A copy would have the default."""

    def __init__(self, units, gain=3.0, **kwargs):
        super().__init__(units, **kwargs)
        self.gain = gain

    def call(self, inputs):
        return self.gain * super().call(inputs)


class Resized(layers.Layer):
    """A layer with a configuration without its width."""

    def __init__(self, width=4, **kwargs):
        super().__init__(**kwargs)
        self.width = width
        self.dense = layers.Dense(width)

    def call(self, inputs):
        return self.dense(inputs)

    def get_config(self):
        return {"name": self.name, "dtype": self.dtype}


@pytest.mark.parametrize("layer", [lambda: Amplified(3, 7.0), lambda: Resized(5)])
def test_arguments_that_a_configuration_lacks_are_not_lost(layer):
    model = model_of(lambda x: layer()(x))
    keras_qat.quantize_model(model)  # It is traced.
    name = type(model.layers[1]).__name__
    recipe = keras_qat.recipes.int8().override(name, open=False)
    with pytest.raises(ValueError, match=rf"{name} has no get_config that returns the arguments"):
        keras_qat.quantize_model(model, recipe)


def test_arguments_with_their_defaults_need_no_configuration():
    model = model_of(lambda x: Amplified(3)(x))
    recipe = keras_qat.recipes.int8().override("Amplified", open=False)
    qat = keras_qat.quantize_model(model, recipe)
    x = images(4)
    expected, computed = (m.predict(x, verbose=0) for m in (model, qat))
    np.testing.assert_allclose(computed, expected, atol=0.02 * np.abs(expected).max())


class TakenTwice(layers.Dense):
    """A layer that passes an argument twice, explicitly and from its configuration."""

    def __init__(self, units, **kwargs):
        super().__init__(units, kernel_initializer="he_normal", **kwargs)

    def call(self, inputs):
        return closed_function(super().call(inputs))


def test_classes_that_do_not_take_their_config_are_named():
    model = model_of(lambda x: TakenTwice(3, name="own")(x))
    with pytest.raises(ValueError, match=r"'own' cannot be copied, because TakenTwice .* either: "):
        keras_qat.quantize_model(model)


def closed_function(x):
    return tf.ensure_shape(tf.numpy_function(np.abs, [x], tf.float32), x.shape)


class Kind(enum.Enum):
    CLIPPED = 1


class OfKind(keras.constraints.Constraint):
    """A constraint with a configuration that Keras cannot save, as in TensorFlow Lattice."""

    def __call__(self, weight):
        return tf.clip_by_value(weight, -0.1, 0.1)

    def get_config(self):
        return {"kind": Kind.CLIPPED}


UNSAVED = {
    "a constraint": (
        lambda x: layers.Conv2D(2, 1, kernel_constraint=OfKind())(x),
        "Keras cannot save the OfKind of a weight: Cannot serialize object Kind.CLIPPED",
    ),
    "a class": (lambda x: CLOSED["numpy"][0]()(x), "InNumpy is not registered"),
    "a function": (
        lambda x: layers.Activation(closed_function)(x),
        "closed_function is not registered",
    ),
    "a lambda": (
        lambda x: layers.Conv2D(2, 1, activation=lambda y: closed_function(y))(x),
        "cannot load an activation that is a lambda",
    ),
    "an object": (
        lambda x: layers.Activation(partial(closed_function))(x),
        "an activation that is a partial",
    ),
    "an Ellipsis": (lambda x: x[..., :2], "cannot store an Ellipsis"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", UNSAVED)
def test_what_keras_cannot_save_is_said(name, tmp_path):
    build, reason = UNSAVED[name]
    recipe = "contrib" if name == "an Ellipsis" else "int8"
    with pytest.warns(UserWarning, match=f"(?s)cannot be saved and loaded again.*{reason}"):
        qat = keras_qat.quantize_model(model_of(build), recipe)
    with pytest.raises((TypeError, ValueError)):  # As Keras finds it.
        save_and_load(qat, tmp_path / "qat.keras")


class Prior(keras.initializers.Initializer):
    def __call__(self, shape, dtype=None, **options):
        return tf.fill(shape, -2.0)


def test_initializers_of_ones_own_are_not_needed_again(tmp_path):
    model = model_of(lambda x: layers.Conv2D(2, 3, bias_initializer=Prior())(x))
    qat = keras_qat.quantize_model(model)
    loaded = save_and_load(qat, tmp_path / "qat.keras")
    np.testing.assert_array_equal(loaded.get_weights()[0], qat.get_weights()[0])
    assert keras_qat.strip_quantization(qat).layers[1].get_config()["bias_initializer"] != "zeros"


def test_what_keras_finds_by_its_name_is_no_matter(tmp_path):
    make, _ = CLOSED["numpy"]
    with keras.utils.custom_object_scope({"InNumpy": type(make())}):
        with pytest.warns(UserWarning, match="(?s)^(?!.*cannot be saved).*cannot be traced"):
            qat = keras_qat.quantize_model(model_of(lambda x: make()(x)))
        save_and_load(qat, tmp_path / "qat.keras")


def a_third(shape, dtype=None):
    return tf.fill(shape, tf.constant(1 / 3, dtype or tf.float32))


class Averages(keras.Model):
    def __init__(self):
        super().__init__()
        self.mixer = layers.Dense(3, kernel_initializer=a_third)

    def call(self, x):
        return self.mixer(x)


def test_functions_that_initialize_need_no_registration():
    model, data = Averages(), images(4)
    expected = model.predict(data, verbose=0)
    qat = keras_qat.quantize_model(model)  # Keras warns of functions whenever it copies a layer.
    keras_qat.calibrate(qat, data)
    np.testing.assert_allclose(qat.predict(data, verbose=0), expected, atol=0.05)
