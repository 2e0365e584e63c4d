"""Tests that faster variants of training compute the same."""

import math

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.arithmetic import fake_quant, plain_operations
from keras_qat.layers import QuantizeWrapper
from keras_qat.training.batch_norm import contrib_correction
from keras_qat.training.fake_quantization import activation_quantizer
from keras_qat.training.steps import recompute
from tests.helpers import assert_all_close, assert_all_equal, images, keras, rng
from tests.networks.small import tiny_net

pytestmark = pytest.mark.legacy

ACTIVATIONS = {
    "relu": keras.layers.ReLU,
    "relu6": lambda: keras.layers.ReLU(6.0),
    "relu_n": lambda: keras.layers.ReLU(1.5),
    "activation": lambda: keras.layers.Activation("relu"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("quantizing", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_merged_activation_equals_the_separate_one(activation, quantizing):
    """Compares outputs, gradients and ranges over several training steps."""

    def wrapper() -> QuantizeWrapper:
        keras.utils.set_random_seed(3)
        inputs = keras.Input((6, 6, 3))
        x = keras.layers.Conv2D(8, 3, kernel_initializer=keras.initializers.RandomNormal())(inputs)
        qat = keras_qat.quantize_model(keras.Model(inputs, ACTIVATIONS[activation]()(x)))
        keras_qat.set_quantization(qat, quantizing)
        (result,) = (layer for layer in qat.layers if isinstance(layer, QuantizeWrapper))
        return result

    merged, separate = wrapper(), wrapper()
    assert merged.ceiling == {"relu6": 6.0, "relu_n": 1.5}.get(activation, math.inf)
    separate.ceiling = None
    for seed in range(3):
        x = tf.constant(rng(seed).normal(size=(4, 6, 6, 3)) * 20, tf.float32)
        upstream = tf.constant(rng(seed + 9).normal(size=(4, 4, 4, 8)), tf.float32)
        results = []
        for layer in (merged, separate):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x, training=True)
                loss = tf.reduce_sum(y * upstream)
            weights = layer.trainable_weights
            gradients = tape.gradient(loss, [x, *weights])
            results.append([y, *gradients, *layer.output_quantizer.current_range()])
        for one, other in zip(*results, strict=True):
            np.testing.assert_array_equal(one, other)
        assert np.min(results[0][0]) == 0.0


@pytest.mark.sample(1)
@pytest.mark.parametrize("ceiling", [None, 6.0, math.inf, 2.0])
@pytest.mark.parametrize("applies", [True, False])
@pytest.mark.parametrize("on_gpu", [True, False])
def test_branches_at_run_time_equal_those_while_tracing(applies, ceiling, on_gpu, monkeypatch):
    monkeypatch.setattr(plain_operations, "has_gpu", lambda: on_gpu)
    x = tf.constant(rng().normal(size=(50, 8)) * 4, tf.float32)
    limits = tf.constant(0.0 if ceiling else -3.0), tf.constant(2.0)

    @tf.function
    def compute(applies):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = fake_quant.fake_quantize_if(applies, x, *limits, ceiling=ceiling)
        return y, tape.gradient(y, x)

    assert_all_equal(compute(applies), compute(tf.constant(applies)))


@pytest.mark.sample(12)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("maximum", [2.0, 6.0, 9.0])
@pytest.mark.parametrize("ceiling", [None, 6.0, math.inf])
@pytest.mark.parametrize("on_gpu", [True, False])
def test_gradient_is_that_of_tensorflows_operations(ceiling, maximum, dtype, on_gpu, monkeypatch):
    """Includes the ends of the range, which count as inside, except the zero of a ReLU.

    A GPU treats the end of a ReLU6 as the end of the range, which is never larger.
    """
    monkeypatch.setattr(plain_operations, "has_gpu", lambda: on_gpu)
    if on_gpu and ceiling and maximum > ceiling:
        pytest.skip("A range behind a ReLU ends where that does.")
    minimum = 0.0 if ceiling else -3.0
    low, high = plain_operations.nudged_range(tf.constant(minimum), tf.constant(maximum))
    least = maximum * 2.0**-25  # A GPU treats smaller values as zero.
    x = np.concatenate([rng().normal(size=500) * 5, [0.0, low, high, least, 1e3]])
    x, upstream = tf.constant(x, dtype), tf.constant(rng(1).normal(size=505), dtype)
    relu = {None: tf.identity, 6.0: tf.nn.relu6, math.inf: tf.nn.relu}[ceiling]
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = fake_quant.fake_quantize_if(True, x, minimum, maximum, ceiling=ceiling)
        wanted = fake_quant.fake_quantize(tf.cast(relu(x), tf.float32), minimum, maximum)
    gradients = tape.gradient(y, x, upstream)
    expected = tape.gradient(wanted, x, tf.cast(upstream, tf.float32))
    compared = x != ceiling if on_gpu and ceiling else slice(None)
    np.testing.assert_array_equal(gradients[compared], expected[compared])


def test_gradient_passes_where_a_range_is_of_zeros():
    x = tf.zeros([3])  # As after a BatchNormalization that starts with gamma = 0.
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = fake_quant.fake_quantize_if(True, x, tf.constant(0.0), tf.constant(0.0))
    np.testing.assert_array_equal(tape.gradient(y, x), [1, 1, 1])


@pytest.mark.sample(1)
@pytest.mark.parametrize("activation", ["relu", "relu6", "operation", "concatenated"])
def test_quantizer_behind_a_merge_computes_the_relu(activation):
    """In graphs in training, as eagerly, where the ReLU is computed separately."""
    inputs = keras.Input((6, 6, 3))
    x = keras.layers.Conv2D(4, 3, padding="same")(inputs)
    y = keras.layers.add([x, keras.layers.Conv2D(4, 1)(inputs)])
    if activation == "operation":
        y = tf.nn.relu(y)
    else:
        y = keras.layers.ReLU(6.0 if activation == "relu6" else None)(y)
    if activation == "concatenated":
        y = keras.layers.concatenate([y, keras.layers.ReLU()(keras.layers.subtract([x, y]))])
    outputs = keras.layers.Conv2D(2, 3)(y)
    qat = keras_qat.quantize_model(keras.Model(inputs, outputs))
    images = rng().uniform(-9, 9, (8, 6, 6, 3)).astype(np.float32)
    start = qat.get_weights()

    def step(images):
        with tf.GradientTape() as tape:
            outputs = qat(images, training=True)
            loss = tf.reduce_mean(outputs**2)
        return outputs, tape.gradient(loss, qat.trainable_variables)

    def steps(function):
        qat.set_weights(start)
        results = [function(images / (2 - index)) for index in range(2)]
        return results, qat.get_weights()

    separate, merged = steps(step), steps(tf.function(step))
    assert_all_close(tf.nest.flatten(separate), tf.nest.flatten(merged), rtol=1e-5, atol=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("verb", "step"), [("fit", "train_step"), ("evaluate", "test_step")])
def test_steps_are_traced_once(verb, step, monkeypatch):
    """Optimizer and metrics create their variables late, which would cause a second trace."""
    x, y = images(48, (6, 6, 2)), rng(1).integers(0, 3, 48)
    qat = keras_qat.quantize_model(tiny_net())
    traces = []
    original = getattr(qat, step)
    monkeypatch.setattr(qat, step, lambda data: traces.append(step) or original(data))
    qat.compile(keras.optimizers.Adam(), "mse", metrics=["accuracy"])
    getattr(qat, verb)(x, y, batch_size=8, verbose=0)
    assert traces == [step]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "strides", [pytest.param(1, id="expansion"), pytest.param(2, id="strided expansion")]
)
def test_statistics_of_contrib_equal_those_of_a_second_convolution(strides, monkeypatch):
    """Expansions compute them from the covariance of the inputs."""
    inputs = keras.Input((7, 7, 3))
    x = keras.layers.Conv2D(12, 1, strides, use_bias=False)(inputs)
    x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
    qat = keras_qat.quantize_model(keras.Model(inputs, x), "contrib")
    images = rng().normal(2, 3, (8, 7, 7, 3)).astype(np.float32)
    qat.set_weights([weight + 0.1 * (weight.ndim == 1) for weight in qat.get_weights()])
    start = qat.get_weights()

    def step():
        qat.set_weights(start)
        images_in = tf.constant(images)
        with tf.GradientTape() as tape:
            tape.watch(images_in)
            outputs = qat(images_in, training=True)
            loss = tf.reduce_mean(outputs**2)
        gradients = tape.gradient(loss, [images_in, *qat.trainable_variables])
        return outputs, gradients, qat.get_weights()

    assert contrib_correction.is_covariance_faster(qat.layers[-1].layer, images)
    quick = step()
    monkeypatch.setattr(contrib_correction, "is_covariance_faster", lambda *_: False)
    plain = step()
    assert_all_close(tf.nest.flatten(quick), tf.nest.flatten(plain), rtol=2e-5, atol=2e-6)


GATED = {
    "swish": lambda x: keras.activations.swish(x),
    "swish twice": lambda x: keras.activations.swish(keras.activations.swish(x)),
    "other way round": lambda x: keras.layers.multiply([tf.sigmoid(x), x]),
    "square": lambda x: x * x,
    "factor": lambda x: x * tf.reshape(tf.range(4.0) - 2.0, [1, 1, 1, 4]),
    "excite": lambda x: keras.layers.multiply(
        [x, tf.sigmoid(keras.layers.GlobalAveragePooling2D(keepdims=True)(x))]
    ),
    "relu": lambda x: tf.nn.relu(x * tf.sigmoid(x)),
}


@pytest.mark.slow
@pytest.mark.parametrize("gate", GATED)
def test_products_that_are_computed_again_equal_those_that_are_kept(gate, monkeypatch):
    """Over several training steps, the last with frozen ranges: losses and weights."""

    def trained(again):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((6, 6, 3))
        x = keras.layers.Conv2D(4, 3, use_bias=False)(inputs)
        x = GATED[gate](keras.layers.BatchNormalization()(x))
        qat = keras_qat.quantize_model(keras.Model(inputs, keras.layers.Conv2D(2, 1)(x)))
        result = []
        with monkeypatch.context() as context:
            context.setattr(
                activation_quantizer, "find_source", lambda x: result.append(x) or again(x)
            )
            qat.compile(keras.optimizers.SGD(0.1), "mse")
            numbers = rng(2)
            for step in range(4):
                if step == 2:
                    keras_qat.freeze_ranges(qat)
                images, labels = (
                    numbers.normal(size=size) for size in ((4, 6, 6, 3), (4, 4, 4, 2))
                )
                qat.train_on_batch(images, labels)
        assert result
        return qat.get_weights()

    assert_all_close(trained(recompute.find_source), trained(lambda x: None), rtol=1e-6, atol=1e-7)
