"""Tests weights that change after training: their values, in models and files."""

import sys

import numpy as np
import pytest

import keras_qat
from keras_qat import recipes
from keras_qat.arithmetic import fake_quant
from keras_qat.training.weight_limits import find_least_squares_limits, round_weights
from tests.helpers import assert_all_equal, export_exact, images, keras, rng, scramble
from tests.networks.small import functional, layers, residual_net, tiny_net

pytestmark = pytest.mark.legacy
X = images(48, (8, 8, 1))


def calibrated(recipe="int4_weights", model=None, x=X, **options):
    qat = keras_qat.quantize_model(model or scramble(residual_net()), recipe)
    keras_qat.calibrate(qat, x, **options)
    return qat


def of_float(qat, x=X):
    keras_qat.set_quantization(qat, False)
    y = qat.predict(x, verbose=0)
    keras_qat.set_quantization(qat, True)
    return y


def error(qat, wanted, x=X):
    return float(np.mean((qat.predict(x, verbose=0) - wanted) ** 2))


@pytest.mark.parametrize("bits", [2, 4])
def test_limits_have_the_least_error(bits):
    """Compares with a finer search for each channel."""
    weights = rng().laplace(size=(3, 3, 5, 4)).astype(np.float32)
    weights[..., 2] = 0
    limits = find_least_squares_limits(weights, (-1,), bits)
    assert limits.shape == (1, 1, 1, 4)
    assert limits[0, 0, 0, 2] == 1
    for channel in (0, 1, 3):
        kernel = weights[..., channel]

        def off(limit, kernel=kernel):
            return np.sum((round_weights(kernel, np.float32(limit), bits) - kernel) ** 2)

        best = min(map(off, np.linspace(0.05, 1, 400) * np.abs(kernel).max()))
        assert off(limits[0, 0, 0, channel]) <= 1.03 * best
        assert bits == 4 or off(limits[0, 0, 0, channel]) < 0.9 * off(np.abs(kernel).max())


def test_weights_are_clipped_where_asked():
    plain, clipped = calibrated(), calibrated(weights="mse")
    for one, other in zip(plain.trainable_weights, clipped.trainable_weights, strict=True):
        if "kernel" not in one.name:
            np.testing.assert_array_equal(one, other)
    kernels = [item.get_layer("quant_stem").layer.kernel.numpy() for item in (plain, clipped)]
    limits = find_least_squares_limits(kernels[0], (-1,), 4)
    np.testing.assert_array_equal(kernels[1], np.clip(kernels[0], -limits, limits))
    with pytest.raises(ValueError, match="weights='best': use 'minmax' or 'mse'"):
        keras_qat.calibrate(plain, X, weights="best")


def test_bias_correction_takes_back_the_mean():
    """After correction, the mean of a layer's outputs is the float model's."""
    model = functional((16,), build=layers.Dense(5, name="y"))
    x = np.abs(images(64, (16,)))
    qat = calibrated(recipes.int8(weight_bits=3), model, x)
    wanted = model.predict(x, verbose=0).mean(0)
    before = np.abs(qat.predict(x, verbose=0).mean(0) - wanted).max()
    keras_qat.bias_correction(qat, x)
    after = np.abs(qat.predict(x, verbose=0).mean(0) - wanted).max()
    assert before > 0.1
    assert after < 0.02


def test_bias_correction_leaves_channels_of_which_the_halves_disagree():
    """The error of a Dense layer changes its sign with the input, so no shift fits both halves."""
    x = np.abs(images(64, (16,)))
    x[32:] *= -0.5
    qat = calibrated(recipes.int8(weight_bits=3), functional((16,), build=layers.Dense(5)), x)
    before = qat.get_weights()
    keras_qat.bias_correction(qat, x)
    assert_all_equal(before, qat.get_weights())


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "norm",
    [{"center": False}, *(pytest.param(item, marks=SLOW) for item in ({}, {"scale": False}, None))],
)
def test_bias_correction_of_normalized_layers(norm):
    def build(x):
        y = layers.Conv2D(6, 3, use_bias=norm is None, name="conv")(x)
        return y if norm is None else layers.BatchNormalization(**norm)(y)

    model = functional((8, 8, 1), build=build)
    x = np.abs(X)
    qat = calibrated(recipes.int8(weight_bits=2), model, x)
    wanted = model.predict(x, verbose=0).mean((0, 1, 2))
    before = np.abs(qat.predict(x, verbose=0).mean((0, 1, 2)) - wanted).max()
    keras_qat.bias_correction(qat, x, batch_size=7)
    after = np.abs(qat.predict(x, verbose=0).mean((0, 1, 2)) - wanted).max()
    assert after < 0.1 * before


@pytest.fixture(scope="module")
def learned():
    """Returns a model with learned rounding, one without, and the weights before."""
    plain, qat = calibrated(), calibrated()
    keras_qat.learn_rounding(qat, X, iterations=40, verbose=1)
    return plain, qat


def test_learned_rounding_is_nearer_to_float(learned):
    plain, qat = learned
    wanted = of_float(plain)
    assert error(qat, wanted) < 0.7 * error(plain, wanted)


def test_learned_rounding_ends_on_the_levels(learned):
    """Each weight is rounded up or down from its float value."""
    plain, qat = learned
    for name in ("stem", "depthwise", "project", "logits"):
        layer = qat.get_layer(f"quant_{name}")
        ((weight, quantizer),) = layer.weight_quantizers.items()
        value, axes = getattr(layer.layer, weight).numpy(), quantizer.channel_axes
        bits = quantizer.spec.bits
        most = 2 ** (bits - 1) - 1
        limits = fake_quant.channel_limits(value, axes)
        computed = fake_quant.fake_quantize_channels(value, limits, bits).numpy()
        np.testing.assert_allclose(computed, value, rtol=1e-5, atol=1e-7)
        before = getattr(plain.get_layer(f"quant_{name}").layer, weight).numpy()
        limits = find_least_squares_limits(before, axes, bits)
        steps = np.clip(before, -limits, limits) * most / limits
        assert np.all(np.abs(value * most / limits - steps) < 1 + 1e-4)


def test_learned_rounding_is_what_the_file_computes(learned):
    _, qat = learned
    export_exact(qat, X)


@SLOW
def test_rounding_is_learned_of_weights_with_one_scale():
    recipe = recipes.int4_weights(per_channel=False).override("stem", weight_bits=3)
    plain, qat = calibrated(recipe), calibrated(recipe)
    wanted = of_float(plain)
    keras_qat.learn_rounding(qat, X, iterations=40)
    assert error(qat, wanted) < 0.7 * error(plain, wanted)
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), X).identical == 1


@SLOW
def test_learned_rounding_keeps_zeros():
    model = scramble(residual_net())
    layer = model.get_layer("stem")
    kernel = np.where(rng().random(layer.kernel.shape) < 0.7, 0, layer.kernel.numpy())
    layer.kernel.assign(kernel)
    qat = calibrated(recipes.int4_weights().preserve("zeros"), model)
    keras_qat.learn_rounding(qat, X, iterations=20)
    computed = qat.get_layer("quant_stem").layer.kernel.numpy()
    assert not np.any(computed[kernel == 0])
    assert np.any(computed)


@SLOW
def test_layers_called_twice_stay():
    def build(x):
        shared = layers.Dense(6, name="shared")
        return layers.Dense(2, name="y")(shared(shared(x)))

    qat = calibrated(model=functional((6,), build=build), x=images(32, (6,)))
    kernels = [qat.get_layer(f"quant_{name}").layer.kernel for name in ("shared", "y")]
    before = [kernel.numpy() for kernel in kernels]
    keras_qat.learn_rounding(qat, images(32, (6,)), iterations=5, weights="minmax")
    keras_qat.bias_correction(qat, images(32, (6,)))
    np.testing.assert_array_equal(kernels[0], before[0])
    assert np.any(kernels[1].numpy() != before[1])


def test_what_cannot_be_learned():
    qat = keras_qat.quantize_model(tiny_net(), "int4_weights")
    with pytest.raises(ValueError, match="3 quantizers have seen no data yet in 'tiny': call"):
        keras_qat.learn_rounding(qat, images(4, (6, 6, 2)))
    with pytest.raises(ValueError, match="not quantization-aware"):
        keras_qat.bias_correction(tiny_net(), images(4, (6, 6, 2)))
    contrib = keras_qat.quantize_model(tiny_net(), "contrib")
    with pytest.raises(ValueError, match="'contrib' sets the ranges of weights in training"):
        keras_qat.learn_rounding(contrib, images(4, (6, 6, 2)))
    with pytest.raises(ValueError, match="weights='max': use"):
        keras_qat.learn_rounding(qat, images(4, (6, 6, 2)), weights="max")


@pytest.mark.sample(1)
@pytest.mark.parametrize("change", [keras_qat.learn_rounding, keras_qat.bias_correction])
def test_masked_recurrent_layers(change):
    """The layers' masks are inputs, too."""
    words = rng().integers(0, 9, (8, 5)).astype(np.int32)
    inputs = keras.Input((5,), dtype="int32")
    x = layers.Embedding(9, 4, mask_zero=True)(inputs)
    model = keras.Model(inputs, layers.Dense(3)(layers.GRU(4)(x)))
    qat = calibrated(model=model, x=words)
    change(qat, words, **({"iterations": 2} if change is keras_qat.learn_rounding else {}))
    assert np.isfinite(qat.predict(words, verbose=0)).all()


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("verb", [keras_qat.bias_correction, keras_qat.learn_rounding])
def test_interrupted_work_leaves_the_weights(verb, monkeypatch):
    qat = calibrated()
    before, changed = qat.get_weights(), []
    module = sys.modules["keras_qat.training.post_training.bias_correction"]
    shift = module.shift_output

    def interrupt_the_second(wrapper, by):
        changed.append(wrapper)
        if len(changed) == 2:
            raise KeyboardInterrupt
        shift(wrapper, by)

    monkeypatch.setattr(module, "shift_output", interrupt_the_second)
    with pytest.raises(KeyboardInterrupt):
        verb(qat, X)
    for weight, value in zip(qat.weights, before, strict=True):
        np.testing.assert_array_equal(weight, value, weight.name)
