"""Tests stripping to a float model: values, names, and loading with Keras alone."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.helpers import (
    assert_all_equal,
    images,
    keras,
    moved,
    observe,
    rng,
    save_and_load,
    scramble,
)
from tests.networks.small import functional, layers, residual_net, tiny_net

pytestmark = pytest.mark.legacy
X = images(16, (8, 8, 1))


def without_quantization(qat):
    """Returns the outputs of the quantization-aware model in float."""
    keras_qat.set_quantization(qat, False)
    return lambda *x: qat.predict(x[0] if len(x) == 1 else list(x), verbose=0)


def signature(model):
    return [
        (layer.name, type(layer).__name__, layer.trainable, [w.shape for w in layer.weights])
        for layer in model._flatten_layers(include_self=False)
    ]


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["int8", "contrib"])
@pytest.mark.parametrize("folded", [False, True])
def test_computes_what_was_trained(recipe, folded):
    model = scramble(residual_net())
    model.get_layer("stem").trainable = False
    qat = moved(keras_qat.quantize_model(model, recipe))
    plain = keras_qat.strip_quantization(qat, folded=folded)
    kinds = {type(layer).__name__ for layer in plain.layers}
    assert ("BatchNormalization" in kinds) is not folded
    if not folded:
        assert signature(plain) == signature(model)
        trained = qat.get_layer("quant_logits").layer.get_weights()
        assert_all_equal(plain.get_layer("logits").get_weights(), trained)
    assert plain.output_names == model.output_names
    assert plain.input_names == model.input_names
    expected = without_quantization(qat)(X)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(plain.predict(X, verbose=0), expected, atol=1e-5 * scale)
    assert np.abs(model.predict(X, verbose=0) - expected).max() > 1e-3 * scale


def mixed(x):
    """Applies layers that lowering splits, a nested model, a shared layer, and operations."""
    inner = keras.Sequential(
        [keras.Input((8, 8, 6)), layers.Conv2D(6, 3, padding="same", activation="swish")],
        name="inner",
    )
    shared = layers.Conv2D(6, 1, name="shared")
    x = layers.SeparableConv2D(6, 3, padding="same", use_bias=False, name="separable")(x)
    x = layers.BatchNormalization(name="bn")(x)
    x = x * keras_qat.keras.activations.relu(x + 3.0, max_value=6.0) / 6.0
    x = shared(inner(shared(x)))
    x = layers.Add(name="three")([x, x, layers.Conv2D(6, 1, activation="relu", name="c")(x)])
    x = layers.Normalization(mean=[0.5] * 6, variance=[2.0] * 6)(x)
    return layers.Dense(3, name="y")(layers.GlobalAveragePooling2D()(x))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("folded", [False, True])
def test_structures_come_back(folded):
    model = scramble(functional((8, 8, 1), build=mixed, name="mixed"))
    model.get_layer("inner").trainable = False
    qat = moved(keras_qat.quantize_model(model))
    plain = keras_qat.strip_quantization(qat, folded=folded)
    if not folded:
        assert signature(plain) == signature(model)
        model.set_weights(plain.get_weights())
        np.testing.assert_array_equal(model.predict(X), plain.predict(X))
    expected = without_quantization(qat)(X)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(plain.predict(X, verbose=0), expected, atol=2e-5 * scale)


def test_flags_are_those_of_the_quantized_model():
    model = scramble(tiny_net())
    model.trainable = False
    qat = keras_qat.quantize_model(model)
    qat.get_layer("quant_logits").trainable = True
    plain = keras_qat.strip_quantization(qat)
    assert [w.name for w in plain.trainable_weights] == ["logits/kernel:0", "logits/bias:0"]


@pytest.mark.parametrize(
    ("kind", "folded"),
    [
        ("plain.keras", True),
        pytest.param("plain.keras", False, marks=pytest.mark.slow),
        pytest.param("plain.h5", False, marks=pytest.mark.slow),
        pytest.param("plain", False, marks=pytest.mark.slow),
    ],
)
def test_keras_alone_loads_it(kind, folded, tmp_path, fresh_process):
    qat = keras_qat.quantize_model(scramble(functional((8, 8, 1), build=mixed)))
    plain = keras_qat.strip_quantization(qat, folded=folded)
    path = str(tmp_path / kind)
    plain.save(path)
    printed = fresh_process(
        f"""
import sys
from {keras.__name__.replace("keras.api._v2.", "tensorflow.")} import models
model = models.load_model({path!r})
assert "keras_qat" not in sys.modules
result = model.predict(arrays["x"], verbose=0)
""",
        x=X,
    )
    np.testing.assert_allclose(printed, plain.predict(X, verbose=0), rtol=1e-6, atol=1e-6)


def test_after_saving_and_loading(tmp_path):
    qat = moved(keras_qat.quantize_model(scramble(residual_net())))
    path = str(tmp_path / "qat.keras")
    qat.save(path)
    expected = keras_qat.strip_quantization(qat)
    result = keras_qat.strip_quantization(keras.models.load_model(path))
    assert result.get_config() == expected.get_config()
    np.testing.assert_array_equal(result.predict(X), expected.predict(X))


def test_several_inputs_and_outputs_in_dicts():
    inputs = {"b": keras.Input((4,), name="b"), "a": keras.Input((4,), name="a")}
    total = layers.Add()([inputs["a"], inputs["b"]])
    model = keras.Model(inputs, {"y": layers.Dense(3, name="y")(total), "z": total})
    plain = keras_qat.strip_quantization(keras_qat.quantize_model(model))
    x = {"a": images(5, (4,), 1), "b": images(5, (4,), 2)}
    predicted, expected = plain.predict(x, verbose=0), model.predict(x, verbose=0)
    assert predicted.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(predicted[name], expected[name])


class Doubled(layers.Layer):
    """A custom layer that is not registered."""

    def call(self, inputs):
        return 2 * inputs


def test_custom_and_lambda_layers_of_this_process():
    model = functional(
        (4,), build=lambda x: layers.Lambda(lambda x: x - 1)(Doubled()(layers.Dense(3)(x)))
    )
    plain = keras_qat.strip_quantization(keras_qat.quantize_model(model))
    x = rng(1).normal(size=(5, 4))
    np.testing.assert_array_equal(plain.predict(x), model.predict(x))


@keras.saving.register_keras_serializable("tests_strip")
class Nameless(layers.Layer):
    """A layer as in tutorials: its constructor accepts no name, and it contains a `Sequential`."""

    def __init__(self, units):
        super().__init__()
        self.units = units
        self.parts = keras.Sequential([layers.Dense(3, activation="relu"), layers.Dense(units)])

    def call(self, inputs):
        return tf.tanh(self.parts(inputs))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("opened", [True, False])
def test_layers_whose_constructor_takes_no_name(opened, tmp_path):
    inner = keras.Sequential([keras.Input((4,)), Nameless(5)])
    model = functional((4,), build=lambda x: Nameless(3)(inner(Nameless(4)(x))))
    recipe = keras_qat.recipes.int8().override("Nameless", open=opened)
    qat = keras_qat.quantize_model(model, recipe)
    qat.save(tmp_path / "qat.keras")
    x = images(5, (4,))
    for quantized in (qat, keras.models.load_model(tmp_path / "qat.keras")):
        plain = keras_qat.strip_quantization(quantized)
        assert [layer.name for layer in plain.layers] == [layer.name for layer in model.layers]
        np.testing.assert_array_equal(plain.predict(x, verbose=0), model.predict(x, verbose=0))
    observe(qat, x)
    loaded = save_and_load(qat, tmp_path / "qat.keras")
    assert keras_qat.export_tflite(loaded) == keras_qat.export_tflite(qat)


def test_refuses_other_models():
    with pytest.raises(ValueError, match=r"'tiny' was not made by keras_qat\.quantize_model"):
        keras_qat.strip_quantization(tiny_net())


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["qat.keras", "qat.h5", "qat"])
def test_a_python_lambda_of_a_file_that_is_trusted(name, tmp_path):
    model = keras.Sequential([keras.Input((6,)), layers.Lambda(lambda x: 2 * x), layers.Dense(3)])
    x = images(8, (6,))
    qat = observe(keras_qat.quantize_model(model), x)
    qat.save(tmp_path / name)
    with pytest.raises(ValueError, match="safe_mode=False"):
        keras_qat.strip_quantization(keras.models.load_model(tmp_path / name))
    trusted = keras.models.load_model(tmp_path / name, safe_mode=False)
    stripped = keras_qat.strip_quantization(trusted)
    np.testing.assert_array_equal(stripped.predict(x, verbose=0), model.predict(x, verbose=0))


class Holds(layers.Layer):
    """Holds a weight and a layer that its output does not depend on."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.read, self.ignored = layers.Dense(4), layers.Dense(3)

    def build(self, shape):
        self.unused = self.add_weight("unused", (4,))
        super().build(shape)

    def call(self, x):
        self.ignored(x)
        return self.read(x)


class Half(layers.Bidirectional):
    """Returns the steps of one direction only."""

    def call(self, x, **options):
        return super().call(x, **options)[..., :3]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [Holds, Half])
def test_weights_that_nothing_reads_are_no_obstacle(kind):
    inputs = keras.Input((6, 5))
    layer = Half(layers.GRU(3, return_sequences=True)) if kind is Half else Holds()
    qat = moved(keras_qat.quantize_model(scramble(keras.Model(inputs, layer(inputs)))))
    with keras.utils.custom_object_scope({"Holds": Holds, "Half": Half}):
        plain = keras_qat.strip_quantization(qat)
    x = images(4, (6, 5))
    np.testing.assert_allclose(plain(x), without_quantization(qat)(x), atol=1e-5)


def test_a_weight_that_is_read_and_not_found_is_an_error(monkeypatch):
    qat = keras_qat.quantize_model(tiny_net())
    monkeypatch.setattr(qat.layers[-1], "_name", "of another name")
    with pytest.raises(ValueError, match="the float model has no counterpart for"):
        keras_qat.strip_quantization(qat)


def stacks():
    norm = layers.Normalization(mean=[0.5] * 4, variance=[2.0] * 4)
    inner = keras.Sequential([keras.Input((6,)), layers.Dense(4, "relu")], name="inner")
    return {
        "with an input": [keras.Input((6,), name="x"), layers.Dense(4), layers.Dropout(0.1)],
        "with a shape": [layers.Dense(4, input_shape=(6,)), layers.BatchNormalization()],
        "nested": [keras.Input((6,)), inner, norm, layers.Softmax()],
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["with an input", "with a shape", "nested"])
def test_a_sequential_model_comes_back_as_one(name, tmp_path):
    model, x = scramble(keras.Sequential(stacks()[name], name="stack")), rng().normal(size=(8, 6))
    qat = moved(keras_qat.quantize_model(model))
    qat.save(tmp_path / "qat.keras")
    expected = without_quantization(qat)(x)
    for trained in (qat, keras.models.load_model(tmp_path / "qat.keras")):
        plain = keras_qat.strip_quantization(trained)
        assert type(plain) is keras.Sequential
        assert plain.name == "stack"
        assert plain.input_names == model.input_names
        assert signature(plain) == signature(model)
        shapes = [[w.shape for w in layer.get_weights()] for layer in model.layers]
        assert [[w.shape for w in layer.get_weights()] for layer in plain.layers] == shapes
        np.testing.assert_allclose(plain.predict(x, verbose=0), expected, atol=1e-5)
    plain.pop()
    plain.add(layers.Dense(2))
    plain.save(tmp_path / "plain.keras")
    assert keras.models.load_model(tmp_path / "plain.keras").output_shape == (None, 2)


def test_a_sequential_model_with_an_added_loss_comes_back():
    model = scramble(keras.Sequential([keras.Input((6,)), layers.Dense(4)]))
    model.add_loss(tf.reduce_mean(tf.square(model.output)))
    plain = keras_qat.strip_quantization(moved(keras_qat.quantize_model(model)))
    assert len(plain.losses) == 1
