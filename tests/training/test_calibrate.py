"""Tests calibration: ranges from all kinds of data, and that nothing else changes."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.helpers import assert_all_equal, build_model, images, keras, quantize_on, scramble, train
from tests.networks.small import functional, layers, residual_net, tiny_net

pytestmark = pytest.mark.legacy
X = images(40, (8, 8, 1))


def ranges(qat):
    return {
        quantizer.name: (quantizer.minimum, quantizer.maximum)
        for quantizer in keras_qat.quantizers(qat)
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["int8", "contrib"])
def test_ranges_are_those_of_the_float_model(recipe):
    model = scramble(residual_net())
    qat = keras_qat.quantize_model(model, recipe)
    keras_qat.calibrate(qat, X, batch_size=8)
    tensors = {quantizer.quantizes[0]: quantizer for quantizer in keras_qat.quantizers(qat)}
    probe = keras.Model(model.input, [model.get_layer(n).output for n in ("stem_relu", "logits")])
    for name, values in zip(("stem_relu", "logits"), probe(X), strict=True):
        result = tensors[name]
        assert result.minimum == pytest.approx(min(0.0, float(tf.reduce_min(values))), rel=1e-4)
        assert result.maximum == pytest.approx(float(tf.reduce_max(values)), rel=1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["int8", "contrib"])
def test_nothing_but_ranges_changes(recipe):
    qat = train(keras_qat.quantize_model(scramble(residual_net()), recipe), X, steps=3)
    observed = ("_min", "_max", "_batches", "_biased", "_local_step")

    def others():
        return [w.numpy() for w in qat.weights if not w.name.split(":")[0].endswith(observed)]

    before, ranges_before = others(), ranges(qat)
    keras_qat.calibrate(qat, 3 * X)
    assert_all_equal(others(), before)
    assert ranges(qat) != ranges_before


def test_dropout_and_noise_are_off():
    def build(x):
        return layers.Dense(3, name="y")(layers.Dropout(0.9)(layers.GaussianNoise(9.0)(x)))

    model = functional((5,), build=build)
    x = images(32, (5,))
    qat = quantize_on(model, x)
    (output,) = (
        quantizer for quantizer in keras_qat.quantizers(qat) if quantizer.quantizes == ("y",)
    )
    assert output.maximum == pytest.approx(float(model.predict(x, verbose=0).max()), rel=1e-4)


def test_every_kind_of_data():
    model = functional((8, 8, 1), build=layers.Conv2D(2, 3))
    labels = np.zeros(40)
    batched = tf.data.Dataset.from_tensor_slices((X, labels)).batch(8)

    class Batches(keras.utils.Sequence):
        def __len__(self):
            return 5

        def __getitem__(self, index):
            return X[8 * index : 8 * index + 8], labels[:8]

    kinds = {
        "array": (X, {"batch_size": 8}),
        "double": (X.astype(np.float64), {"batch_size": 8}),
        "dataset": (batched, {}),
        "endless dataset": (batched.repeat(), {"steps": 5}),
        "generator": ((X[start : start + 8] for start in range(0, 40, 8)), {}),
        "sequence": (Batches(), {}),
    }
    result, qat = {}, keras_qat.quantize_model(model)
    for kind, (data, arguments) in kinds.items():
        keras_qat.calibrate(qat, data, **arguments)
        result[kind] = np.hstack([np.ravel(spec) for spec in ranges(qat).values()])
        np.testing.assert_allclose(result[kind], result["array"], rtol=1e-6, err_msg=kind)


def test_dict_inputs_of_other_types():
    inputs = {"b": keras.Input((4,), name="b"), "a": keras.Input((4,), name="a")}
    model = keras.Model(inputs, layers.Dense(3, name="y")(layers.Add()([inputs["a"], inputs["b"]])))
    qat = keras_qat.quantize_model(scramble(model))
    x = {"a": np.full((32, 4), 2, np.uint8), "b": np.full((32, 4), -5, np.int64)}
    keras_qat.calibrate(qat, x)
    result = {
        quantizer.quantizes: (quantizer.minimum, quantizer.maximum)
        for quantizer in keras_qat.quantizers(qat)
    }
    # The average is TensorFlow 1's, in float32. Ranges of inputs are wider, to avoid ties.
    assert result[("a",)] == pytest.approx((0, 2 + 2 / 1019), rel=1e-4)
    assert result[("b",)] == pytest.approx((-5, 5 / 1019), rel=1e-4)


class Doubles(keras.layers.Layer):
    """Branches on the values of a tensor, which AutoGraph converts to a condition in a graph."""

    def call(self, x):
        if tf.reduce_sum(x) > 0:
            x = 2.0 * x
        return x


def test_layers_in_float_may_branch_on_values():
    model = build_model((3,), lambda x: keras.layers.Dense(2)(Doubles()(x)))
    qat = keras_qat.quantize_model(model, keras_qat.recipes.int8().override("Doubles", open=False))
    data = np.random.default_rng(0).uniform(0.1, 1, (16, 3)).astype(np.float32)
    keras_qat.calibrate(qat, data)
    expected = model.predict(data, verbose=0)
    np.testing.assert_allclose(qat.predict(data, verbose=0), expected, atol=0.05)


def test_failed_calibration_leaves_the_model():
    qat = keras_qat.quantize_model(scramble(tiny_net()))
    before = qat.get_weights()
    x = images(8, (6, 6, 2))
    x[5] = np.nan
    batches = tf.data.Dataset.from_tensor_slices(x).batch(4)
    for data, message in (
        (batches, r"'image' .* contains NaN, first in example 1 in item 1 of the data"),
        (x, r"Input 'image' .* contains NaN"),
        (images(8, (5, 6, 2)), r"Input 'image' .* shape \(None, 6, 6, 2\), not \(8, 5, 6, 2\)"),
        (x[:0], "The data for .* is empty"),
        (batches.take(0), "empty"),
        (None, "The data for .* is None"),
    ):
        with pytest.raises(ValueError, match=message):
            keras_qat.calibrate(qat, data)
    assert_all_equal(qat.get_weights(), before)


def test_weights_that_are_no_numbers():
    qat = keras_qat.quantize_model(scramble(tiny_net()))
    bias = qat.get_layer("quant_logits").layer.bias
    bias.assign(bias + np.inf)
    with pytest.raises(
        ValueError, match=r"infinity from this data, first in the output of 'logits'"
    ):
        keras_qat.calibrate(qat, images(8, (6, 6, 2)))
    assert not any(
        quantizer.calibrated
        for quantizer in keras_qat.quantizers(qat)
        if quantizer.quantizes[0] == "image"
    )


CONTRIB = pytest.param("contrib", marks=pytest.mark.slow)
METHODS = ("minmax", "percentile", "mse")


def calibrated(data=X, recipe="int8", **options):
    qat = keras_qat.quantize_model(scramble(residual_net()), recipe)
    keras_qat.calibrate(qat, data, **options)
    return qat


def ends(qat):
    return np.hstack([np.ravel(item) for pair in ranges(qat).values() for item in pair])


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", ["minmax", "mse"])
def test_ranges_do_not_depend_on_batches_or_their_order(method):
    result = ends(calibrated(method=method))
    for data, size in ((X, 7), (X[::-1], 16)):
        again = ends(calibrated(data, method=method, batch_size=size))
        np.testing.assert_allclose(again, result, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["int8", CONTRIB])
def test_second_call_forgets_the_first(recipe):
    result = ends(calibrated(recipe=recipe))
    qat = calibrated(5 * X, recipe)
    keras_qat.calibrate(qat, X)
    np.testing.assert_array_equal(ends(qat), result)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["int8", CONTRIB])
def test_second_call_goes_on_from_the_first(recipe):
    """Counted in examples."""
    one, other = X[:30], 3 * X[30:]
    qat = calibrated(one, recipe)
    keras_qat.calibrate(qat, other, reset=False)
    parts = [activations(calibrated(part, recipe)) for part in (one, other)]
    expected = (30 * parts[0] + 10 * parts[1]) / 40
    np.testing.assert_allclose(activations(qat), expected, rtol=1e-5)


def activations(qat):
    quantizer = keras_qat.quantizers(qat)
    return np.array([(q.minimum, q.maximum) for q in quantizer if q.name.endswith("/output")])


@pytest.mark.parametrize("recipe", ["int8", CONTRIB])
def test_training_goes_on_from_there(recipe):
    """Training continues as if the examples had been batches of 32."""
    qat = calibrated(np.concatenate([X, X, X, X]), recipe)
    before = activations(qat)
    keras_qat.set_quantization(qat, False)
    keras_qat.freeze_batch_norm(qat)
    qat(2 * X[:8], training=True)
    batch = activations(calibrated(2 * X[:8], recipe))
    result, expected = activations(qat), before + (batch - before) / 6
    # The original does not fold BatchNormalization after a bias, so later ranges differ.
    some = 3 if recipe == "contrib" else len(result)
    np.testing.assert_allclose(result[:some], expected[:some], rtol=2e-3)


def test_percentile():
    x = np.random.default_rng(0).normal(size=(400, 6, 6, 2)).astype(np.float32)
    qat = keras_qat.quantize_model(scramble(tiny_net()))
    keras_qat.calibrate(qat, x, method="percentile", percentile=99.0)
    quantizer = keras_qat.quantizers(qat)[0]
    assert quantizer.minimum == pytest.approx(np.quantile(x, 0.01), rel=0.01)
    assert quantizer.maximum == pytest.approx(np.quantile(x, 0.99), rel=0.01)


@pytest.mark.sample(2)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_mse_finds_the_best_range(bits):
    """Compares with a search on the values themselves."""
    x = np.random.default_rng(0).laplace(size=(2000, 4)).astype(np.float32)
    model = functional((4,), build=layers.ReLU(name="y"))
    qat = keras_qat.quantize_model(model, keras_qat.recipes.int8(activation_bits=bits))
    keras_qat.calibrate(qat, x, method="mse")
    quantizer = keras_qat.quantizers(qat)[-1]
    y = np.maximum(x, 0)

    def error(maximum):
        step = maximum / (2**bits - 1)
        return np.mean((np.round(np.minimum(y, maximum) / step) * step - y) ** 2)

    assert quantizer.minimum == 0
    best = min(map(error, np.linspace(0.02, 1, 300) * y.max()))
    assert error(quantizer.maximum) < 1.02 * best
    assert bits == 8 or error(quantizer.maximum) < 0.9 * error(y.max())


def test_outlier_is_cut_off():
    """One value of 1000 among normally distributed values."""
    x = images(64, (28, 28, 1))
    x[5, 3, 3] = 1000
    qat = keras_qat.quantize_model(functional((28, 28, 1), build=layers.ReLU(name="y")))
    with pytest.warns(UserWarning, match="half of the examples .* 3.94, .* method='percentile'"):
        keras_qat.calibrate(qat, x)
    wider = (1000 - x.min()) / 1019  # Ranges of inputs avoid ties.
    assert keras_qat.quantizers(qat)[0].maximum == pytest.approx(1000 + wider)
    keras_qat.calibrate(qat, x, method="percentile")
    assert keras_qat.quantizers(qat)[0].maximum < 6


def test_outlier_is_cut_off_before_it_reaches_other_layers():
    """Unless the data can only be read once."""
    x = images(64, (8, 8, 1))
    broken = x.copy()
    broken[5, 3, 3] = 1000
    clean, result = (calibrated(item, method="percentile", percentile=99.9) for item in (x, broken))
    np.testing.assert_allclose(activations(result), activations(clean), rtol=0.2)
    keras_qat.calibrate(result, iter([broken]), method="percentile", percentile=99.9)
    assert activations(result).max() > 5 * activations(clean).max()


def test_pixels_keep_their_range():
    """Pixels lie on the steps of the full range. Any other range is worse, despite histograms."""
    x = np.random.default_rng(0).integers(0, 256, (64, 8, 8, 1)) / np.float32(255)
    qat = keras_qat.quantize_model(functional((8, 8, 1), build=layers.ReLU(name="y")))
    for method in METHODS:
        keras_qat.calibrate(qat, x, method=method)
        quantizer = keras_qat.quantizers(qat)[0]
        expected = pytest.approx((0, 1 + 1 / 1019), abs=1e-6)  # An input's is wider.
        assert (quantizer.minimum, quantizer.maximum) == expected, method


def test_very_large_values():
    x = 1e12 * np.random.default_rng(0).uniform(1, 2, (64, 8, 8, 1)).astype(np.float32)
    qat = keras_qat.quantize_model(functional((8, 8, 1), build=layers.ReLU(name="y")))
    for method in METHODS:
        keras_qat.calibrate(qat, x, method=method)
        assert keras_qat.quantizers(qat)[0].maximum == pytest.approx(2e12, rel=0.01), method


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "method"), [("int16x8", "mse"), ("contrib", "percentile")])
def test_methods_export_and_agree(recipe, method):
    qat = calibrated(recipe=recipe, method=method)
    contents = keras_qat.export_tflite(qat, input_range=(-4, 4))
    assert recipe == "contrib" or keras_qat.verify(qat, contents, X).identical == 1


def test_bad_method():
    qat = keras_qat.quantize_model(tiny_net())
    with pytest.raises(ValueError, match=r"'best': use one of 'minmax', 'percentile'"):
        keras_qat.calibrate(qat, images(4, (6, 6, 2)), method="best")
    with pytest.raises(ValueError, match=r"percentile=0\.9999: pass more than 50"):
        keras_qat.calibrate(qat, images(4, (6, 6, 2)), method="percentile", percentile=0.9999)


def test_labels_are_not_printed():
    qat = keras_qat.quantize_model(tiny_net())
    with pytest.raises(ValueError, match=r"steps is an array: pass .* Labels are not needed\.$"):
        keras_qat.calibrate(qat, images(8, (6, 6, 2)), np.arange(8))
