"""16x8: int16 activations and int8 weights, run by the interpreter and compared in int16 steps."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.lite.python import schema_py_generated as schema

import keras_qat
from keras_qat import recipes, specs
from keras_qat.interpreter import TFLiteModel
from keras_qat.keras2.backend import keras
from keras_qat.tflite.read import FileGraph
from tests.helpers import images, observe, scramble, train
from tests.networks import convolutional, single_layers
from tests.networks.small import functional, layers, residual_net

X = images(96, (8, 8, 1))


def export(model, *inputs, recipe="int16x8"):
    qat = observe(keras_qat.quantize_model(scramble(model), recipe), *inputs)
    contents = keras_qat.export_tflite(qat)
    report = keras_qat.verify(qat, contents, list(inputs) if len(inputs) > 1 else inputs[0])
    return qat, TFLiteModel(contents), report


def floats(file):
    return {
        op for op, reads, writes in file.operations() if any(t.kind == "f" for t in reads + writes)
    }


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("conv", marks=pytest.mark.legacy),
        pytest.param("depthwise", marks=pytest.mark.legacy),
        "add_then_relu",
        "concatenations",
    ],
)
def test_structures(family):
    inputs = convolutional.family_inputs(family)
    _, file, report = export(convolutional.family_model(family), *inputs)
    assert not floats(file)
    assert {each["dtype"] for each in file.inputs.values()} == {np.int16}
    assert {each["dtype"] for each in file.outputs.values()} == {np.int16}
    assert report.max_difference <= 1
    assert report.identical >= 0.999


@pytest.mark.legacy
@pytest.mark.parametrize("family", ["other_rounding"])
def test_what_has_no_int16_kernel_is_in_float(family):
    inputs = single_layers.family_inputs(family)
    model = single_layers.family_model(family)
    plan = keras_qat.plan(model, "int16x8")
    _, file, report = export(model, *inputs)
    assert floats(file) - {"QUANTIZE", "DEQUANTIZE"} <= {"PRELU"}
    assert any("no int16 kernel" in reason for reason in plan.float_layers.values())
    assert report.max_difference <= 1
    assert report.identical >= 0.999


@pytest.mark.legacy
def test_trained_model(tmp_path):
    qat = train(keras_qat.quantize_model(residual_net(), "int16x8"), X, steps=24)
    contents = keras_qat.export_tflite(qat)
    report = keras_qat.verify(qat, contents, X)
    assert report.outputs[0].argmax_agreement == 1
    assert report.identical >= 0.99
    assert report.max_difference <= 1
    keras_qat.export_saved_model(qat, tmp_path / "model")
    serve = tf.saved_model.load(str(tmp_path / "model")).signatures["serving_default"]
    output = keras_qat.quantizers(qat)[-1]
    step = (output.maximum - output.minimum) / 65535
    expected = qat.predict(X, verbose=0)
    assert np.abs(serve(image=tf.constant(X))["logits"] - expected).max() <= 3 * step


@pytest.fixture(scope="module")
def trained():
    """A trained model and its file."""
    qat = train(keras_qat.quantize_model(residual_net(), "int16x8"), X, steps=24)
    return qat, keras_qat.export_tflite(qat)


@pytest.mark.parametrize("kernels", ["xnnpack", "reference"])
def test_layer_by_layer(trained, kernels):
    report = keras_qat.verify(*trained, X, per_layer=True, kernels=kernels)
    assert {"image", "stem", "depthwise", "project", "merge_relu", "logits"} <= {
        each.name for each in report.tensors
    }
    for each in report.tensors:
        assert each.scale_ulps == 0, each
        assert each.zero_point == each.file_zero_point == 0, each
        assert each.simulated == 1, each
        assert each.agrees, each
    assert not report.findings()
    assert "Every layer computes what was trained." in str(report)


def test_kernels_multiply_without_an_error(trained):
    """Of the multiplier that follows from a file's scales, kernels take 15 bits: all it has."""
    graph = FileGraph(trained[1])
    found = 0
    for tensor in graph.tensors:
        operation = graph.producers.get(tensor.index)
        if operation is None or operation.kernel not in ("CONV_2D", "DEPTHWISE_CONV_2D"):
            continue
        x = graph.tensors[operation.inputs[0]]
        kernel = graph._graph.tensors[operation.inputs[1]]
        scales = np.asarray(kernel.quantization.scale, np.float32).astype(np.float64)
        fraction, _ = np.frexp(x.scale * scales / tensor.scale)
        off = fraction * 2**15 - np.round(fraction * 2**15)
        assert np.abs(off).max() < 2**15 * 1e-7
        assert graph._graph.tensors[operation.inputs[2]].type == schema.TensorType.INT64
        found += 1
    assert found == 4


def test_eager_and_reloaded_models_compute_the_same(trained, tmp_path):
    qat, _ = trained
    expected = qat.predict(X, verbose=0)
    np.testing.assert_array_equal(qat(X, training=False), expected)
    qat.save(tmp_path / "qat.keras")
    loaded = keras.models.load_model(tmp_path / "qat.keras")
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), expected)


def test_inference_has_the_gradient_of_training(trained):
    qat, _ = trained
    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(qat(x, training=False) ** 2)
    assert np.count_nonzero(tape.gradient(y, x)) > 0.5 * X.size


def test_nothing_changes_while_quantization_is_off(trained):
    qat = keras_qat.quantize_model(residual_net(), "int16x8")
    qat.set_weights(trained[0].get_weights())
    keras_qat.set_quantization(qat, enabled=False)
    plain = keras_qat.strip_quantization(qat)
    found, expected = qat.predict(X, verbose=0), plain.predict(X, verbose=0)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_channels_without_weights(bits):
    """All that is left is a bias, which a multiplier of 15 bits and a shift have to reach."""
    model = functional((6, 6, 2), build=layers.Conv2D(4, 3, name="conv"))
    kernel, _ = scramble(model).get_layer("conv").get_weights()
    kernel[..., 1], kernel[..., 2] = 0, 1e-12
    model.get_layer("conv").set_weights([kernel, np.array([0.1, 1.5, -2.5, 0.0])])
    x = images(64, (6, 6, 2))
    qat = observe(keras_qat.quantize_model(model, recipes.int16x8(weight_bits=bits)), x)
    contents = keras_qat.export_tflite(qat)
    report = keras_qat.verify(qat, contents, x)
    assert report.identical >= 0.999
    assert report.max_difference <= 1
    (codes,) = TFLiteModel(contents).run({qat.input_names[0]: x}).values()
    scale = TFLiteModel(contents).outputs[qat.output_names[0]]["quantization"][0]
    np.testing.assert_allclose(codes[..., 1] * scale, 1.5, atol=scale)
    np.testing.assert_allclose(codes[..., 2] * scale, -2.5, atol=scale)


def test_finer_than_int8():
    """What the bits are for: the error against the float model falls by far."""
    errors = {}
    for recipe in ("int8", "int16x8"):
        model = scramble(functional((64,), build=layers.Dense(8)), seed=5)
        # Weights on their levels, so that what is left is the error of the activations.
        kernel = np.round(np.clip(model.layers[1].kernel.numpy(), -1, 1) * 127) / 127
        kernel[0] = 1
        model.layers[1].kernel.assign(kernel)
        x = images(256, (64,))
        qat, file, _ = export_as_is(model, x, recipe)
        (detail,) = file.outputs.values()
        (codes,) = file.run({qat.input_names[0]: x}).values()
        values = (codes.astype(np.float64) - detail["quantization"][1]) * detail["quantization"][0]
        errors[recipe] = np.sqrt(np.mean((values - model.predict(x, verbose=0)) ** 2))
    assert errors["int16x8"] < errors["int8"] / 50


def export_as_is(model, x, recipe):
    qat = observe(keras_qat.quantize_model(model, recipe), x, batches=1)
    contents = keras_qat.export_tflite(qat)
    return qat, TFLiteModel(contents), contents


def test_sums_that_need_64_bits():
    """Full-scale inputs times full-scale weights, added up 9 * 256 times: more than 2^31."""
    model = functional((4, 4, 256), build=layers.Conv2D(2, 3, name="conv"))
    model.get_layer("conv").set_weights([np.ones((3, 3, 256, 2)), np.array([3.0, -2.0])])
    x = np.ones((8, 4, 4, 256), np.float32)
    qat, file, _ = export_as_is(model, x, "int16x8")
    (codes,) = file.run({qat.input_names[0]: x}).values()
    (detail,) = file.outputs.values()
    expected = 9 * 256 + np.array([3.0, -2.0])
    np.testing.assert_allclose(codes[0, 0, 0] * detail["quantization"][0], expected, rtol=1e-4)


@pytest.mark.parametrize("output_dtype", ["int16", "float32"])
@pytest.mark.parametrize("input_dtype", ["int16", "float32"])
def test_types_of_the_ends(input_dtype, output_dtype):
    model = scramble(functional((6,), build=layers.Dense(4, name="y")))
    x = images(64, (6,))
    qat = observe(keras_qat.quantize_model(model, "int16x8"), x)
    contents = keras_qat.export_tflite(qat, input_dtype=input_dtype, output_dtype=output_dtype)
    file = TFLiteModel(contents)
    assert [each["dtype"] for each in file.inputs.values()] == [np.dtype(input_dtype)]
    assert [each["dtype"] for each in file.outputs.values()] == [np.dtype(output_dtype)]
    assert keras_qat.verify(qat, contents, x).max_difference <= 1.01
    for wrong in ("int8", "uint8"):
        with pytest.raises(ValueError, match=f"input_dtype='{wrong}': use 'int16' or 'float32'"):
            keras_qat.export_tflite(qat, input_dtype=wrong)


@pytest.mark.legacy
def test_settings_that_are_refused():
    with pytest.raises(ValueError, match=r"symmetric.*int16x8"):
        specs.QuantSpec(16)
    with pytest.raises(ValueError, match="from 2 to 8"):
        specs.QuantSpec(12, symmetric=True)
    with pytest.raises(ValueError, match="from 2 to 8"):
        recipes.int16x8(weight_bits=16)
    with pytest.raises(ValueError, match="no mixture"):
        recipes.int16x8().override("Dense", activation_bits=8)
    recipe = recipes.int16x8().override("head", quantize=False)
    assert recipes.Recipe.from_config(recipe.to_config()) == recipe


def test_float_layers_stay_as_they_are():
    """A layer that the recipe leaves in float keeps its weights and bias."""
    model = scramble(
        functional((6,), build=lambda x: layers.Dense(3, name="y")(layers.Dense(5, name="x")(x)))
    )
    x = images(64, (6,))
    qat = observe(
        keras_qat.quantize_model(model, recipes.int16x8().override("x", quantize=False)), x
    )
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), x)
    assert report.identical >= 0.98  # What follows a float layer is rounded from float32.
    assert report.max_difference <= 1
