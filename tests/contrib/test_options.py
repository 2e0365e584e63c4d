"""Tests every option of `recipes.contrib` against NumPy."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.layers import Quantize, QuantizeWrapper
from keras_qat.specs import QuantSpec
from tests.helpers import images, keras, rng
from tests.networks.contrib import conv, image, layers, relu

pytestmark = pytest.mark.legacy

contrib = keras_qat.recipes.contrib
FIRST, SECOND = np.float32([-1, 1]), np.float32([0, 0])


def network(batch_norm: bool = True) -> keras.Model:
    """Returns convolution, BatchNormalization or bias, ReLU, Add with the input, convolution."""
    keras.utils.set_random_seed(13)
    inputs = x = image()
    x = conv(x, "layer", use_bias=not batch_norm)
    if batch_norm:
        x = layers.BatchNormalization(name="bn")(x)
    x = layers.Add(name="add")([relu(x), inputs])
    return keras.Model(inputs, conv(x, "last"))


def wrapper(model: keras.Model, name: str) -> QuantizeWrapper:
    return model.get_layer(f"quant_{name}")


def ranges(model: keras.Model) -> dict[str, tuple[float, float]]:
    """Returns tensor -> its range."""
    return {
        quantizer.quantizes[0]: (float(quantizer.minimum), float(quantizer.maximum))
        for quantizer in keras_qat.quantizers(model)
    }


def debiased(values: list[float], decay: float) -> float:
    """Returns a moving average that starts at zero, divided by the sum of its weights."""
    average = 0.0
    for value in values:
        average = decay * average + (1 - decay) * value
    return average / (1 - decay ** len(values))


def levels(x: np.ndarray, low: float, high: float, bits: int, narrow: bool) -> np.ndarray:
    """Rounds `x` to the levels of a range, in double precision."""
    steps = 2**bits - (2 if narrow else 1)
    scale = (high - low) / steps
    low = -np.round(-low / scale) * scale
    return np.clip(np.round((x - low) / scale), 0, steps) * scale + low


# Single quantizers, as in the original's tests of its operations.


def observed(spec: QuantSpec, *batches: np.ndarray) -> tuple[float, float]:
    layer = Quantize(spec)
    for batch in batches:
        layer(batch, training=True)
    return layer.quantizer.current_range()


@pytest.mark.parametrize(
    ("symmetric", "narrow_range", "batch", "expected"),
    [
        (False, False, [-1, 1], (-1, 1)),
        (True, False, [-1, 127 / 128], (-1, 127 / 128)),
        (True, False, [-1, 0.5], (-1, 127 / 128)),
        (True, False, [-0.5, 127 / 128], (-1, 127 / 128)),
        (True, True, [-1, 0.5], (-1, 1)),
        (True, True, [-0.5, 1], (-1, 1)),
        (False, False, [0.5, 1], (0, 1)),
        (False, False, [-1, -0.5], (-1, 0)),
    ],
)
def test_last_value(symmetric, narrow_range, batch, expected):
    spec = QuantSpec(symmetric=symmetric, narrow_range=narrow_range, observer="last_value")
    assert observed(spec, np.float32([-3, 5]), np.float32(batch)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("symmetric", "narrow_range", "first", "expected"),
    [
        (False, False, [-1, 1], (-0.5, 0.5)),
        (True, False, [-1, 127 / 128], (-0.5, 0.5 * 127 / 128)),
        (True, False, [-1, 0.5], (-0.5, 0.5 * 127 / 128)),
        (True, True, [-1, 0.5], (-0.5, 0.5)),
    ],
)
def test_moving_average(symmetric, narrow_range, first, expected):
    spec = QuantSpec(symmetric=symmetric, narrow_range=narrow_range)
    assert observed(spec, np.float32(first), SECOND) == pytest.approx(expected, abs=1e-3)


def test_unknown_number_of_axes():
    """Ranges per tensor need no shape."""
    layer = Quantize(QuantSpec())
    layer.build(None)

    @tf.function(input_signature=[tf.TensorSpec(None)])
    def train(batch):
        return layer(batch, training=True)

    for batch in (FIRST, SECOND):
        train(batch)
    assert layer.quantizer.current_range() == pytest.approx((-0.5, 0.5), abs=1e-3)


def test_ranges_are_weights_that_do_not_train():
    model = keras_qat.quantize_model(network(), "contrib")
    names = [weight.name.split("/")[-1] for weight in model.non_trainable_weights]
    assert sum(name.startswith(("kernel_min:", "output_min:")) for name in names) >= 4
    assert len(model.trainable_weights) == len(network().trainable_weights)
    assert len(model.weights) > len(network().weights)


# The recipe.


@pytest.mark.sample(4)
@pytest.mark.parametrize("weight_bits", [2, 4, 8])
@pytest.mark.parametrize("activation_bits", [2, 4, 8])
def test_bits(weight_bits, activation_bits):
    model = keras_qat.quantize_model(network(), contrib(weight_bits, activation_bits))
    for quantizer in keras_qat.quantizers(model):
        is_weight = "/" in quantizer.quantizes[0]
        assert quantizer.spec.bits == (weight_bits if is_weight else activation_bits)
    values = np.unique(model(images(4, (6, 6, 4)), training=True))
    assert len(values) <= 2**activation_bits


@pytest.mark.parametrize("bits", [1, 9, 4.0, True])
def test_impossible_bits(bits):
    with pytest.raises(ValueError, match="from 2 to 8"):
        contrib(weight_bits=bits)


def test_symmetric():
    """All ranges are symmetric, except after Add and Multiply."""
    recipe = contrib(symmetric=True)
    model = keras_qat.quantize_model(network(), recipe)
    for seed in range(3):
        model(images(8, (6, 6, 4), seed), training=True)
    result = ranges(model)
    for tensor in ("layer/kernel", "last/kernel"):
        assert result[tensor][0] == -result[tensor][1]
    for tensor in ("relu", "add", "last"):
        assert result[tensor][1] == pytest.approx(-result[tensor][0] * 127 / 128)

    inputs = image()
    y = relu(conv(inputs, "layer"))
    merged = keras.Model(inputs, layers.Multiply(name="multiply")([y, inputs]))
    specs = {row.tensor: row.spec for row in keras_qat.plan(merged, recipe).rows if row.spec}
    assert specs["relu"].symmetric
    assert not specs["multiply"].symmetric


@pytest.mark.parametrize("narrow", [True, False])
def test_weight_narrow_range(narrow):
    """With 4 bits, the narrow range has 15 levels, and the wide range 16, in the same range."""
    model = network(batch_norm=False)
    kernel = model.get_layer("last").kernel.numpy()
    quantized = keras_qat.quantize_model(model, contrib(4, weight_narrow_range=narrow))
    quantized(images(4, (6, 6, 4)), training=True)
    assert ranges(quantized)["last/kernel"] == (kernel.min(), kernel.max())

    last = wrapper(quantized, "last")
    last.output_quantizer = None
    x = images(4, (6, 6, 4))
    (spec,) = [weight_quantizer.spec for weight_quantizer in last.weight_quantizers.values()]
    assert spec.narrow_range is narrow
    expected = keras.layers.Conv2D(4, 3, padding="same")
    expected.build(x.shape)
    on_levels = levels(kernel.astype(np.float64), kernel.min(), kernel.max(), 4, narrow)
    expected.set_weights([on_levels, model.get_layer("last").bias])
    np.testing.assert_allclose(last(x), expected(x), atol=1e-5)


def folded_kernel(model: keras.Model) -> np.ndarray:
    """Returns the kernel of `layer`, folded with the current moving variance."""
    wrapped = wrapper(model, "layer")
    norm = wrapped.batch_norm
    factor = norm.gamma.numpy() / np.sqrt(norm.moving_variance.numpy() + norm.epsilon)
    return wrapped.layer.kernel.numpy() * factor


@pytest.mark.parametrize("use_ema", [False, True])
def test_quantize_folded_weights_use_ema(use_ema):
    """The range of folded weights is a moving average, or the range of the last step."""
    recipe = contrib(quantize_folded_weights_use_ema=use_ema, ema_decay=0.9)
    model = keras_qat.quantize_model(network(), recipe)
    minima, maxima = [], []
    for seed in range(4):
        # Other statistics in each step change the folded kernel, but not the unfolded kernel.
        variance = rng(seed).uniform(0.1, 4, 4)
        wrapper(model, "layer").batch_norm.moving_variance.assign(variance)
        folded = folded_kernel(model)
        minima.append(folded.min())
        maxima.append(folded.max())
        model(images(4, (6, 6, 4)), training=True)
    expected = (minima[-1], maxima[-1])
    if use_ema:
        expected = (debiased(minima, 0.9), debiased(maxima, 0.9))
    result = ranges(model)
    assert result["layer/kernel"] == pytest.approx(expected, rel=1e-4)
    # Weights without BatchNormalization always have the range of the last step.
    kernel = wrapper(model, "last").layer.kernel.numpy()
    assert result["last/kernel"] == pytest.approx((kernel.min(), kernel.max()))


@pytest.mark.parametrize("use_ema", [False, True])
@pytest.mark.parametrize("delay_weights", [False, True])
def test_delay_weights(delay_weights, use_ema):
    """Before the delay, weights are only quantized without `delay_weights` and moving averages."""
    recipe = contrib(
        2, quant_delay=1000, delay_weights=delay_weights, quantize_folded_weights_use_ema=use_ema
    )
    model = keras_qat.quantize_model(network(), recipe)
    x = images(4, (6, 6, 4))

    def weights_in_use(layer: QuantizeWrapper) -> int:
        """Returns the number of different values in the kernel that the layer computes with."""
        (quantizer,) = layer.weight_quantizers.values()
        seen = []
        original = quantizer.__class__.__call__

        def spy(self, weights, phase):
            seen.append(original(self, weights, phase).numpy())
            return seen[-1]

        layer.weight_quantizers = {"kernel": lambda *args: spy(quantizer, *args)}
        layer(x, training=True)
        return len(np.unique(seen[-1]))

    assert (weights_in_use(wrapper(model, "last")) <= 4) is not delay_weights
    delayed = delay_weights or use_ema
    assert (weights_in_use(wrapper(model, "layer")) <= 4) is not delayed


def test_quant_delay_gates_the_result_only():
    """Step n is the first quantized step. Ranges are observed from the first step on."""
    model = keras_qat.quantize_model(network(), contrib(2, 2, quant_delay=3))
    floating = keras_qat.quantize_model(network(), contrib(2, 2, quant_delay=1000))
    x = images(4, (6, 6, 4))
    for step in (1, 2, 3):
        outputs = [variant(x, training=True).numpy() for variant in (model, floating)]
        assert np.array_equal(*outputs) is (step < 3), step
        assert ranges(model)["relu"] != (0, 6)
        assert ranges(model)["last"] == ranges(floating)["last"] or step == 3


@pytest.mark.slow
def test_options_of_the_recipe_do_what_the_callbacks_do():
    x, y = images(40, (6, 6, 4)), np.zeros((40, 6, 6, 4))
    recipe = contrib(4, 4, quant_delay=2, freeze_bn_delay=4)
    by_recipe = keras_qat.quantize_model(network(), recipe)
    by_callbacks = keras_qat.quantize_model(network(), contrib(4, 4))
    callbacks = [keras_qat.callbacks.QuantDelay(2), keras_qat.callbacks.FreezeBatchNorm(4)]
    for model, used in ((by_recipe, []), (by_callbacks, callbacks)):
        model.compile("sgd", "mse")
        model.fit(x, y, 8, shuffle=False, verbose=0, callbacks=used)
    for one, other in zip(by_recipe.weights, by_callbacks.weights, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=one.name)


def test_counter_counts_training_steps_once():
    """Each layer counts each training step once, however often it is called, and no inference."""
    model = keras_qat.quantize_model(network(), contrib(quant_delay=2, freeze_bn_delay=3))
    x = images(4, (6, 6, 4))
    for step in range(1, 4):
        model(x, training=True)
        model(x, training=False)
        assert {int(layer.step) for layer in model.layers if hasattr(layer, "step")} == {step}


def test_inference_changes_nothing():
    """Inference assigns nothing: ranges, averages, statistics and the counter stay the same."""
    model = keras_qat.quantize_model(network(), "contrib")
    model(images(4, (6, 6, 4)), training=True)
    before = [weight.numpy() for weight in model.weights]
    first = model(images(4, (6, 6, 4), 5), training=False)
    second = model(images(4, (6, 6, 4), 5), training=False)
    np.testing.assert_array_equal(first, second)
    for old, new in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(old, new, err_msg=new.name)
