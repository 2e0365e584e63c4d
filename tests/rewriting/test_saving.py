"""Tests saving and loading in every format. Models are loaded in a new process.

That process imports keras_qat and loads the file without custom objects. For a `.keras` file, it
does not even import keras_qat.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.helpers import (
    assert_all_equal,
    images,
    keras,
    observe,
    quantize_on,
    rng,
    save_and_load,
    scramble,
    train,
)
from tests.networks.small import functional, layers, tiny_net

X = images(64, (6, 6, 2))
LABELS = rng(5).integers(0, 3, 32)

RANGES = """
def ranges(model):
    return np.concatenate([
        np.ravel([limits.minimum, limits.maximum]) for limits in keras_qat.quantizers(model)
    ])
"""

IMPORTS = {
    "keras_qat": "from keras_qat import keras",
    "keras": "import tf_keras as keras"
    if keras.__name__ == "tf_keras"
    else "from tensorflow import keras",
}

IN_FRESH_PROCESS = """
import sys
{imports}
assert ("keras_qat" in sys.modules) == ("keras_qat" in {imports!r})
model = keras.models.load_model({path!r})
import keras_qat
assert type(model) is sys.modules["keras_qat.rewriting.quantized_model"].QuantizedModel
{ranges}
outputs, before = model.predict(arrays["x"], verbose=0), ranges(model)
frozen = [layer.trainable for layer in model.layers]
model.fit(arrays["x"][:32], arrays["labels"], batch_size=8, shuffle=False, verbose=0)
result = np.concatenate([outputs.ravel(), before, frozen, ranges(model)])
"""


def ranges(model) -> np.ndarray:
    return np.concatenate([np.ravel([q.minimum, q.maximum]) for q in keras_qat.quantizers(model)])


def trained():
    """Returns a partly trained model with one frozen layer."""
    model = scramble(tiny_net())
    model.get_layer("logits").trainable = False
    return train(keras_qat.quantize_model(model), X, steps=3)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("qat.keras", marks=pytest.mark.legacy),
        pytest.param("qat.h5", marks=pytest.mark.slow),
        pytest.param("qat", marks=pytest.mark.slow),
    ],
)
def test_fresh_process_goes_on_where_training_was(kind, tmp_path, fresh_process):
    qat = trained()
    path = str(tmp_path / kind)
    qat.save(path)
    imports = IMPORTS["keras" if kind == "qat.keras" else "keras_qat"]
    program = IN_FRESH_PROCESS.format(ranges=RANGES, path=path, imports=imports)
    printed = fresh_process(program, x=X, labels=LABELS)
    outputs, before = qat.predict(X, verbose=0).ravel(), ranges(qat)
    flags = [layer.trainable for layer in qat.layers]
    qat.fit(X[:32], LABELS, batch_size=8, shuffle=False, verbose=0)
    for expected in (outputs, before, flags):
        part, printed = np.split(printed, [len(expected)])
        np.testing.assert_array_equal(part, np.asarray(expected, part.dtype))
    # The ranges depend on trained weights, so training must be bit-exact.
    np.testing.assert_allclose(printed, ranges(qat), rtol=1e-6)
    assert (ranges(qat) != before).any()


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["qat.weights.h5", "checkpoint"])
def test_weights_only(kind, tmp_path):
    qat = trained()
    path = str(tmp_path / kind)
    qat.save_weights(path)
    other = keras_qat.quantize_model(tiny_net())
    other.load_weights(path)
    np.testing.assert_array_equal(other.predict(X, verbose=0), qat.predict(X, verbose=0))
    np.testing.assert_array_equal(ranges(other), ranges(qat))


@pytest.mark.sample(1)
@pytest.mark.legacy
@pytest.mark.parametrize("kind", ["qat.keras", "qat.h5"])
def test_loaded_model_is_equal(kind, tmp_path):
    qat = trained()
    path = str(tmp_path / kind)
    loaded = save_and_load(qat, path)
    assert type(loaded) is type(qat)
    # As JSON, because some versions of Keras load tuples as lists.
    assert json.dumps(loaded.get_config()) == json.dumps(qat.get_config())
    assert loaded.output_names == qat.output_names
    assert_all_equal(loaded.weights, qat.weights)
    inner = loaded.get_layer("quant_logits").layer
    assert not inner.trainable
    assert len(loaded.trainable_weights) == len(qat.trainable_weights)


@keras.utils.register_keras_serializable("test")
class InTwoSteps(layers.Layer):
    """Stays in float, because it computes differently in training. Keras names its inner layers."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first, self.rest = layers.Dense(4), [layers.Dense(3)]

    def call(self, x, training=None):
        return self.rest[0](self.first(x)) * (2.0 if training else 1.0)


@pytest.mark.filterwarnings("ignore:These layers compute in float")
def test_a_loaded_layer_in_float_gives_the_same_bytes(tmp_path):
    """Keras numbers layers anew in every copy. Names of tensors must not depend on that."""
    qat = observe(keras_qat.quantize_model(functional((6,), build=InTwoSteps())), images(8, (6,)))
    loaded = save_and_load(qat, tmp_path / "qat.keras")
    inside = [model.layers[2].first.name for model in (qat, loaded)]
    assert inside[0] != inside[1]
    assert keras_qat.export_tflite(loaded) == keras_qat.export_tflite(qat)


@keras.utils.register_keras_serializable("test")
class Doubled(layers.Layer):
    """Keras checks for `**kwargs` by name to find out whether the constructor accepts a name."""

    def __init__(self, **options):
        super().__init__(**options)

    def call(self, x, training=None):
        return x * (2.0 if training else 1.0)


@pytest.mark.filterwarnings("ignore:These layers compute in float")
def test_a_layer_in_float_without_a_name_in_its_configuration_is_loaded(tmp_path):
    model = functional((6,), build=lambda x: Doubled(trainable=False)(layers.Dense(4)(x)))
    qat = observe(keras_qat.quantize_model(model), images(8, (6,)))
    loaded = save_and_load(qat, tmp_path / "qat.keras")
    assert [layer.name for layer in loaded.layers] == [layer.name for layer in qat.layers]
    assert [layer.trainable for layer in loaded.layers] == [layer.trainable for layer in qat.layers]
    assert keras_qat.export_tflite(loaded) == keras_qat.export_tflite(qat)


class Activated(layers.Layer):
    """A layer whose configuration holds objects, which Keras saves."""

    def __init__(self, activation, **options):
        super().__init__(**options)
        self.activation = keras.activations.get(activation)

    def build(self, input_shape):
        self.scale = self.add_weight("scale", (), initializer="ones")

    def call(self, x):
        return tf.ensure_shape(
            tf.numpy_function(self.activation, [self.scale * x], tf.float32), x.shape
        )


@pytest.mark.filterwarnings("ignore:These layers compute in float")
def test_a_layer_in_float_that_makes_a_function_of_a_name_is_saved(tmp_path):
    qat = keras_qat.quantize_model(functional((6,), build=Activated("relu")))
    qat.save(tmp_path / "qat.keras")
    with keras.utils.custom_object_scope({"Activated": Activated}):
        loaded = keras.models.load_model(tmp_path / "qat.keras")
    np.testing.assert_array_equal(loaded(images(8, (6,))), qat(images(8, (6,))))
    with pytest.raises(ValueError, match="the class Activated, which is not registered"):
        keras.models.load_model(tmp_path / "qat.keras")

    class Renamed(Activated):
        def __init__(self, function):
            super().__init__(function)

    scope = keras.utils.custom_object_scope({"Activated": Renamed})
    with scope, pytest.raises(ValueError, match="from_config of Renamed accepts"):
        keras.models.load_model(tmp_path / "qat.keras")


def test_a_model_class_with_another_save(tmp_path):
    class Writes(keras.Model):
        def train_step(self, data):
            return super().train_step(data)

        def save(self, model_dir):
            raise AssertionError

        def save_weights(self, model_dir):
            raise AssertionError

    inputs = keras.Input((6,))
    qat = keras_qat.quantize_model(Writes(inputs, layers.Dense(3)(inputs)))
    assert isinstance(qat, Writes)
    qat.save_weights(tmp_path / "qat.h5")
    qat.save(tmp_path / "qat.keras")
    loaded = keras.models.load_model(tmp_path / "qat.keras", custom_objects={"Writes": Writes})
    loaded.load_weights(tmp_path / "qat.h5")
    np.testing.assert_array_equal(loaded(images(8, (6,))), qat(images(8, (6,))))


def test_functions_that_only_the_float_model_holds_are_no_matter(tmp_path):
    """Keras cannot save one of its functions in a `Lambda`, which is traced."""
    squeezed = layers.Lambda(keras.backend.squeeze, arguments={"axis": 1})
    model = functional((1, 6), build=lambda x: layers.Dense(3)(squeezed(x)))
    qat = observe(keras_qat.quantize_model(model), images(8, (1, 6)))
    loaded = save_and_load(qat, tmp_path / "qat.keras")
    assert keras_qat.export_tflite(loaded) == keras_qat.export_tflite(qat)
    with pytest.raises(ValueError, match="cannot be converted back to float"):
        keras_qat.strip_quantization(loaded)


@pytest.mark.parametrize("recipe", ["int8", "contrib"])
def test_synchronized_batch_normalization_stays_so(recipe, tmp_path):
    """Keras omits it from configurations."""

    def build(x):
        x = layers.BatchNormalization(synchronized=True)(layers.Conv2D(4, 3)(x))
        return layers.BatchNormalization(synchronized=True)(layers.Softmax(axis=1)(x))

    qat = keras_qat.quantize_model(functional((6, 6, 2), build=build), recipe)
    loaded = save_and_load(qat, tmp_path / "qat.keras")
    for model in (qat, loaded, keras_qat.strip_quantization(loaded)):
        norms = [layer for layer in model._flatten_layers() if "gamma" in vars(layer)]
        assert [norm.synchronized for norm in norms] == [True, True]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("make", "numbers"),
    [(np.float32, [0, 1, 2, 3]), (tf.constant, [1.0, 2.0, 3.0, 4.0]), (float, 2)],
)
def test_a_constant_on_the_left(make, numbers, tmp_path):
    """Keras saves `constant + x` as a list and a tensor, and cannot load that as a sum."""
    constant = make(numbers)

    class Anchors(layers.Layer):
        def call(self, x):
            return constant + x

    path = str(tmp_path / "qat.keras")
    inputs = keras.Input((4,))
    qat = quantize_on(keras.Model(inputs, Anchors()(layers.Dense(4)(inputs))), images(16, (4,)))
    qat.save(path)
    loaded = keras.models.load_model(path, custom_objects={"Anchors": Anchors})
    contents = keras_qat.export_tflite(qat)
    assert keras_qat.export_tflite(loaded) == contents
    assert keras_qat.verify(qat, contents, images(16, (4,))).outputs[0].identical == 1


def test_truth_values_on_the_left(tmp_path):
    """Keras loads them as a list of scalar tensors, which TensorFlow's operator refuses."""
    inputs, seen = keras.Input((4,)), np.array([[True, False, True, True]])
    x = tf.where(seen, layers.Dense(4)(inputs), inputs)
    x = x * tf.cast(tf.logical_and(seen, inputs > 0.5), tf.float32)
    qat = keras_qat.quantize_model(keras.Model(inputs, x))
    qat.save(tmp_path / "qat.keras")
    keras_qat.calibrate(qat, images(16, (4,)))
    loaded = keras.models.load_model(tmp_path / "qat.keras")
    loaded.set_weights(qat.get_weights())
    assert keras_qat.export_tflite(loaded) == keras_qat.export_tflite(qat)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["a name", "früh/ä", "层", "a;b", "-x"])
def test_names_that_are_no_scopes(name, tmp_path):
    """Keras accepts such names for inputs, but not for layers that compute."""
    x, inner = (keras.Input((4,), name=name) for _ in range(2))
    part = keras.Model(inner, layers.Dense(3)(inner), name="part")
    model = keras.Model(x, part(x))
    data = images(16, (4,))
    qat = observe(keras_qat.quantize_model(model), data)
    loaded = save_and_load(qat, tmp_path / "qat.keras")
    contents = keras_qat.export_tflite(loaded)
    assert keras_qat.verify(loaded, contents, data, per_layer=True).identical == 1


@pytest.mark.legacy
def test_a_full_disk_leaves_the_old_saved_model(tmp_path, exported, monkeypatch):
    path = tmp_path / "qat"
    keras.Sequential([keras.Input((2,)), layers.Dense(1)]).save(path)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}

    def save_half(model, path, *args, **kwargs):
        os.makedirs(path, exist_ok=True)
        (Path(path) / "saved_model.pb").write_bytes(b"half")
        raise tf.errors.ResourceExhaustedError(None, None, "variables; No space left on device")

    monkeypatch.setattr(keras.Model, "save", save_half)
    with pytest.raises(OSError, match=r"No space left.*is unchanged"):
        exported.model.save(path)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
