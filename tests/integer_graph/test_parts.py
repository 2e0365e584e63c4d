"""Tests models built from layers of quantization-aware models: cut, extended, nested."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat import messages
from tests.helpers import build_model, images, keras, observe, quantize_on, save_and_load, scramble
from tests.networks.small import layers, residual_net


@pytest.fixture(scope="module")
def qat():
    return observe(keras_qat.quantize_model(scramble(residual_net())), images(96, (8, 8, 1)))


def cut(qat):
    return keras.Model(qat.input, qat.get_layer("quant_pool").output)


def embedding(qat):
    return keras.Model(qat.inputs, qat.get_layer("quant_project").output)


def sequential(qat):
    return keras.Sequential([qat, layers.Softmax()])


def with_a_head(qat):
    features = qat.get_layer("quant_flatten").output
    return keras.Model(qat.input, layers.Softmax()(layers.Dense(4, name="head")(features)))


def inside(qat):
    return build_model((8, 8, 1), lambda x: layers.Reshape((1, 3))(qat(2.0 * x)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", [cut, embedding, sequential, with_a_head, inside])
@pytest.mark.parametrize("kernels", ["xnnpack", "reference"])
def test_parts_are_exported_and_simulated(qat, part, kernels):
    model, x = part(qat), images(64, (8, 8, 1))
    names = list(model.output_names)
    if part is not cut and part is not with_a_head:
        assert file_equals(model, x)
    assert model.output_names == names
    contents = keras_qat.export_tflite(model)
    assert keras_qat.read_metadata(contents)["recipe"]["name"] == "int8"
    simulated = keras_qat.simulate(model, x, kernels)
    file = keras_qat.tflite.interpreter.FileInterpreter(contents, kernels)
    outputs = file.run({model.input_names[0]: x})
    for name, output in simulated.outputs.items():
        codes = getattr(output, "codes", output)
        np.testing.assert_allclose(outputs[name], codes, atol=1e-6)
    model.kernels = kernels
    assert keras_qat.verify(model, contents, x, kernels=kernels).identical == 1


def file_equals(model, x):
    values = keras_qat.TFLiteModel(keras_qat.export_tflite(model)).predict(x)
    return np.array_equal(values, model.predict(x, verbose=0))


def test_an_output_has_the_range_of_its_quantizer(qat):
    """The mean of an image has a smaller range than the image, and the model uses it."""
    x, image = images(64, (8, 8, 1)), keras.Input((8, 8, 1))
    conv = layers.Conv2D(8, 3, activation="relu")(image)
    mean = layers.GlobalAveragePooling2D(name="mean")(conv)
    whole = quantize_on(keras.Model(image, layers.Dense(2)(mean)), x)
    model = keras.Model(whole.inputs, whole.get_layer("quant_mean").output)
    (known,) = keras_qat.quantizers(whole)["mean"]
    (tensor,) = keras_qat.resolve(model).outputs.values()
    assert 255 * tensor.params.scale == pytest.approx(known.maximum, rel=0.01)
    assert file_equals(model, x)


@pytest.mark.slow
def test_a_copy_of_a_part_is_exact_from_the_start(qat, monkeypatch, caplog, tmp_path):
    """Keras' model simulates, which the log reports once. The copy computes the file's values."""
    monkeypatch.setattr(messages, "_SHOWN", set())
    model, x = embedding(qat), images(64, (8, 8, 1))
    simulated = model.predict(x, verbose=0)
    model(x)
    (line,) = [record.message for record in caplog.records if record.name == "keras_qat"]
    assert f"Keras built '{model.name}'" in line and f"quantize_model({model.name})" in line
    loaded = save_and_load(model, tmp_path / "part.keras")
    values = [keras_qat.quantize_model(part).predict(x, verbose=0) for part in (model, loaded)]
    np.testing.assert_array_equal(values[0], values[1])
    np.testing.assert_allclose(values[0], simulated, atol=0.05)
    contents = keras_qat.export_tflite(keras_qat.quantize_model(embedding(qat)))
    np.testing.assert_array_equal(keras_qat.TFLiteModel(contents).predict(x), values[0])


def test_a_part_is_for_the_kernels_of_its_model(qat):
    copy = keras_qat.quantize_model(qat)
    copy.kernels = "reference"
    part = embedding(copy)
    keras_qat.resolve(part)
    assert part.kernels == "reference"
    assert part.recipe == qat.recipe


@pytest.mark.slow
def test_a_part_of_a_loaded_part_is_exact(qat, tmp_path):
    """If Keras saved the model, recipe and kernels are unknown."""
    qat.save(tmp_path / "qat.keras")
    part = cut(keras.models.load_model(tmp_path / "qat.keras"))
    loaded = save_and_load(part, tmp_path / "part.keras")
    x = images(64, (8, 8, 1))
    assert file_equals(loaded, x)
    again = save_and_load(loaded, tmp_path / "exact.keras")
    np.testing.assert_array_equal(again.predict(x, verbose=0), loaded.predict(x, verbose=0))


class Normalized(keras.Model):
    def __init__(self, inner):
        super().__init__(name="normalized")
        self.inner = inner

    def call(self, x):
        return tf.nn.l2_normalize(self.inner(x), -1)


def test_code_around_a_quantized_model_is_refused(qat):
    model, image = Normalized(qat), keras.Input((8, 8, 1))
    model(images(2, (8, 8, 1)))
    for refused in (model, keras.Model(image, Normalized(qat)(image))):
        with pytest.raises(ValueError, match=r"'normalized' calls .* by a functional model"):
            keras_qat.export_tflite(refused)


def test_outputs_of_a_model_that_is_quantized_already_are_refused(qat):
    with pytest.raises(ValueError, match=r"outputs= is for float models.*keras.Model\(qat"):
        keras_qat.quantize_model(qat, outputs=["pool"])


def test_the_graph_can_be_read(qat):
    text = str(keras_qat.resolve(qat))
    assert "quant_stem: conv" in text and "merged ReLU up to inf" in text
    assert "weights [3, 3, 1, 6] of 8 bits per channel, bias" in text
    assert text.startswith("inputs: image [None, 8, 8, 1] (int8 x 0.0")


def test_a_layer_on_what_has_no_range_computes_in_float(qat):
    x, layer = keras.Input((8, 8, 1)), qat.get_layer("quant_stem")
    model, data = keras.Model(x, layer(x)), images(8, (8, 8, 1))
    assert [*keras_qat.summary(model).float_layers.values()] == ["its input has no quantizer"]
    file = keras_qat.TFLiteModel(keras_qat.export_tflite(model))
    np.testing.assert_allclose(file.predict(data), model.predict(data, verbose=0), atol=1e-5)


def test_biases_are_rounded_to_the_nearest_step(qat):
    (node,) = (node for node in keras_qat.resolve(qat).nodes if node.name == "quant_stem")
    step = node.inputs[0].params.scale * node.weights.scale.reshape(-1)
    weights = {
        weight.name.split("/")[-1].split(":")[0]: weight.numpy().astype(np.float64)
        for weight in qat.get_layer("quant_stem").weights
    }
    deviation = np.sqrt(weights["moving_variance"] + 1e-3)
    bias = weights["beta"] - weights["moving_mean"] * weights["gamma"] / deviation
    assert np.abs(node.weights.bias - bias / step).max() <= 0.51
