"""Tests that `recipes.power_of_two()` has power-of-two scales in training, inference and files."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat import recipes, specs
from keras_qat.arithmetic import fake_quant
from keras_qat.tflite.reader import FileGraph
from tests.helpers import images, keras, observe, save_and_load, scramble
from tests.networks.small import functional, layers

X = images(16, (8, 8, 3))


def build(x):
    x = layers.Conv2D(8, 3, padding="same", use_bias=False)(x)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    y = layers.DepthwiseConv2D(3, padding="same")(x)
    x = layers.Add()([x, layers.Activation("tanh")(y)])
    x = layers.Concatenate()([x, layers.Activation("sigmoid")(layers.Multiply()([x, y]))])
    x = layers.AveragePooling2D()(layers.MaxPooling2D()(x))
    x = layers.Conv2DTranspose(4, 2, strides=2)(layers.BatchNormalization()(x))
    return layers.Softmax()(layers.Dense(5)(layers.GlobalAveragePooling2D()(x)))


@pytest.fixture(scope="module")
def qat():
    keras.utils.set_random_seed(0)
    model = scramble(functional((8, 8, 3), build=build))
    return observe(keras_qat.quantize_model(model, recipes.power_of_two()), X)


def is_power(scales):
    fractions, _ = np.frexp(np.asarray(scales, np.float64))
    return bool(np.all(fractions == 0.5))


def test_powers_are_exact():
    scales = np.float32([0, 1, 1.0000001, 0.9999999, 3, 2**-20, 1e-9, 0.0078125, 0.00784])
    expected = [0, 1, 2, 1, 4, 2**-20, 2.0**-29, 0.0078125, 0.015625]
    np.testing.assert_array_equal(fake_quant.power_of_two(tf.constant(scales)), expected)
    assert np.isnan(fake_quant.power_of_two(tf.constant(np.nan)))


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_ranges_are_widened_to_the_next_power_of_two(bits):
    steps, half = 2**bits - 1, 2 ** (bits - 1)
    for width, scale in ((steps, 1), (steps + 0.5, 2), (steps - 0.5, 1), (steps / 2, 0.5)):
        end = tf.constant(width / 2)
        ends = fake_quant.power_of_two_range(-end, end, bits)
        np.testing.assert_array_equal(ends, [-half * scale, (half - 1) * scale])
    limits = fake_quant.power_of_two_limits(tf.constant([half - 1, half - 0.5, half - 1.2]), bits)
    np.testing.assert_array_equal(limits, (half - 1) * np.array([1, 2, 1]))


def test_all_scales_are_powers_of_two(qat):
    """TFLite's softmax and sigmoid have another zero point, which a QUANTIZE changes to 0."""
    tensors = [
        tensor
        for tensor in FileGraph(keras_qat.export_tflite(qat)).tensors
        if tensor.type == "int8" and tensor.scale and not tensor.name.endswith("/unclipped")
    ]
    assert len(tensors) > 20
    assert is_power([tensor.scale for tensor in tensors])
    assert {tensor.zero_point for tensor in tensors} == {0}


@pytest.mark.slow
def test_the_file_computes_what_the_model_does(qat):
    for kernels in ("xnnpack", "reference"):
        qat.kernels = kernels
        contents = keras_qat.export_tflite(qat)
        assert keras_qat.verify(qat, contents, X, kernels=kernels).identical == 1
    qat.kernels = "xnnpack"


@pytest.mark.slow
def test_scales_stay_powers_of_two_in_training(qat):
    keras.utils.set_random_seed(0)
    trained = keras.models.clone_model(qat)
    trained.set_weights(qat.get_weights())
    trained.compile("sgd", "mse")
    trained.fit(1.7 * X, np.zeros((len(X), 5)), epochs=2, verbose=0)
    quantizers = keras_qat.quantizers(trained)
    before = {q.name: q.maximum for q in keras_qat.quantizers(qat)}
    assert any(np.any(before[q.name] != q.maximum) for q in quantizers)
    for quantizer in quantizers:
        levels = 254 if getattr(quantizer.spec, "narrow_range", False) else 255
        scale = (np.float64(quantizer.maximum) - quantizer.minimum) / levels
        assert is_power(scale), quantizer.name


@pytest.mark.parametrize("layer", [layers.GRU, layers.SimpleRNN])
def test_weights_of_recurrent_layers(layer):
    """Files had weights with other scales than in training."""
    keras.utils.set_random_seed(0)
    model = scramble(functional((4, 3), build=layer(3)))
    qat = observe(keras_qat.quantize_model(model, recipes.power_of_two()), images(16, (4, 3)))
    (weights,) = (node.weights for node in keras_qat.resolve(qat).nodes if node.weights)
    cell = model.layers[-1].cell
    for part, kernel in ((weights, cell.kernel), (weights.recurrent, cell.recurrent_kernel)):
        (listed,) = (x for x in keras_qat.quantizers(qat) if x.name.endswith(f"/{part.name}"))
        assert is_power(part.scale)
        np.testing.assert_allclose(part.scale, [[listed.maximum[0] / 127]])
        np.testing.assert_array_equal(part.q, np.round(kernel.numpy() / part.scale))


def test_the_recipe_survives_saving(qat, tmp_path):
    loaded = save_and_load(qat, tmp_path / "model.keras")
    assert loaded.recipe == recipes.power_of_two()
    assert keras_qat.export_tflite(loaded) == keras_qat.export_tflite(qat)


@pytest.mark.parametrize(
    "options", [{}, {"symmetric": True, "per_channel": True}, {"observer": "learned"}]
)
def test_other_ranges_are_refused(options):
    with pytest.raises(ValueError, match=r"recipes.power_of_two\(\) has such specs"):
        specs.QuantSpec(power_of_two=True, **options)


def test_mse_chooses_among_powers():
    """One outlier does not double the step of all others."""
    model = functional((8,), build=lambda x: layers.Dense(3)(x))
    qat = keras_qat.quantize_model(model, recipes.power_of_two())
    x = np.random.default_rng(0).normal(size=(4096, 8)).astype(np.float32)
    x[0, 0] = 9.0
    steps = {}
    for method in ("minmax", "mse"):
        keras_qat.calibrate(qat, x, method=method)
        (tensor,) = keras_qat.resolve(qat).inputs.values()
        steps[method] = float(tensor.params.scale)
    assert is_power(list(steps.values()))
    assert steps["mse"] < steps["minmax"]
