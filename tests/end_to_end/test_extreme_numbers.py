"""Tests values that are huge, tiny, near a tie or not finite: files compute the same as models."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.end_to_end.exact import assert_agreement, inputs_of, model_of
from tests.helpers import export_exact, images, keras, layers, observe, quantize_on
from tests.networks.small import functional

constant = keras.initializers.Constant


@pytest.mark.sample(2)
@pytest.mark.parametrize("size", [1e30, 1e-15, 1e-30])
@pytest.mark.parametrize("what", ["inputs", "variance", "weights"])
def test_sizes_far_from_one(what, size):
    """The interpreter crashed."""
    norm = layers.BatchNormalization()
    model = model_of(lambda x: layers.Conv2D(3, 3)(norm(layers.Conv2D(4, 3)(x))))
    x = inputs_of(model)
    if what == "inputs":
        x *= np.float32(size)
    elif what == "variance":
        norm.moving_variance.assign(np.full(4, size))
    else:
        model.layers[1].kernel.assign(model.layers[1].kernel * size)
    assert_agreement(model, x)


SAYING_NOTHING = {"zeros": 0.0, "denormal": 1e-40}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [*SAYING_NOTHING, "constant"])
@pytest.mark.parametrize(
    "recipe",
    ["int8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("int4_weights", "int16x8"))],
)
def test_inputs_that_say_nothing(kind, recipe):
    model = model_of(lambda x: layers.BatchNormalization()(layers.Conv2D(4, 3)(x)))
    x = np.ones_like(inputs_of(model)) * np.float32(SAYING_NOTHING.get(kind, 3.0))
    assert_agreement(model, x, recipe)


small = partial(keras.initializers.RandomNormal, stddev=0.01)
ONE_BIAS = {
    "conv": partial(layers.Conv2D, 6, 1, kernel_initializer=small(seed=1)),
    "dense": partial(layers.Dense, 6, kernel_initializer=small(seed=2)),
    "separable": partial(layers.SeparableConv2D, 6, 1, pointwise_initializer=small(seed=3)),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ONE_BIAS)
def test_one_bias_of_all_channels(kind):
    """Heads of detectors start with such a bias, which needs more bits than float32 has."""
    layer = ONE_BIAS[kind](bias_initializer=constant(-4.6))
    assert_agreement(model_of(layer), images(32, (6, 6, 4)) * np.float32(0.1))


def make_tiny(limit, seed=None):
    return keras.initializers.RandomUniform(-limit, limit, seed=seed)


def gate_with_nothing(x):
    """XNNPACK only supports multipliers below 256."""
    y = layers.GlobalAveragePooling2D(keepdims=True)(x)
    y = layers.Conv2D(4, 1, activation="relu", bias_initializer=constant(-10.0))(y)
    y = layers.Conv2D(4, 1, activation="sigmoid", bias_initializer=constant(1e-6))(y)
    return layers.Multiply()([x, y])


def cut_nothing(x):
    """TFLite's kernels refuse a 6 that does not fit 32 bits."""
    merged = layers.ReLU(6.0)(layers.Dense(3, kernel_initializer=make_tiny(1e-9, 1))(x))
    return [merged, layers.ReLU(6.0)(x * 1e-9)]


NEXT_TO_NOTHING = {
    "output": (gate_with_nothing, "int8"),
    "range": (
        lambda x: layers.Add()([x, layers.Conv2D(4, 1, kernel_initializer=make_tiny(1e-7))(x)]),
        "int8",
    ),
    "relu6": (cut_nothing, "int8"),
    "relu6, 16 bits": (cut_nothing, "int16x8"),
    # TFLite's kernel of sums crashed.
    "difference": (lambda x: tf.subtract(x * 1.0000002, x), "int8"),
    "difference, 16 bits": (lambda x: tf.subtract(x * 1.0000002, x), "int16x8"),
    # TFLite's reference kernel crashed.
    "softmax": (lambda x: layers.Softmax()(1e-7 * x), "int8"),
    # TFLite's kernel refuses an output with a much smaller scale than its input.
    "hard swish": (lambda x: x * tf.nn.relu6(x + 3) / 6, "int8"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", NEXT_TO_NOTHING)
def test_values_next_to_nothing(kind):
    build, recipe = NEXT_TO_NOTHING[kind]
    model = model_of(build)
    x = inputs_of(model)
    if kind == "hard swish":
        x = np.minimum(x * np.float32(100), np.float32(0.5))
    assert_agreement(model, x, recipe)


def test_weights_past_127_in_contrib_are_as_large_in_files():
    """Quantized values of one-sided weights go up to 255. Files halve them and double the scale."""
    model = model_of(layers.Dense(4), (6,))
    kernel = np.linspace(0, 1, 24, dtype=np.float32).reshape(6, 4)
    model.set_weights([kernel, np.zeros(4)])
    qat = observe(keras_qat.quantize_model(model, "contrib"), images(32, (6,)))
    graph = keras_qat.resolve(qat, input_range=(-4.0, 4.0))
    (weights,) = [node.weights for node in graph.nodes if node.weights is not None]
    np.testing.assert_allclose(weights.q * weights.scale, kernel, atol=1 / 127)


def test_biases_of_weights_of_zeros_in_contrib():
    """The file rounded them to multiples of the input's scale."""
    layer = layers.Dense(3, kernel_initializer="zeros", bias_initializer=small(seed=1))
    x = 1000 * images(32, (6,))
    qat = observe(keras_qat.quantize_model(model_of(layer, (6,)), "contrib"), x)
    export_exact(qat, x, input_range=(-4000.0, 4000.0))


@pytest.mark.sample(1)
@pytest.mark.parametrize("factor", [6, 14])
def test_products_whose_ratio_graph_optimization_takes_first(factor):
    """(x * y) * ratio differs from (x * ratio) * y, especially if the ratio is near 1 / 6."""
    x, y = keras.Input((16,)), keras.Input((16,))
    model = keras.Model([x, y], layers.Multiply()([x, y]))
    product = 2.55 * factor  # Inputs have the scale 0.1, and their product 0.01 * factor.
    ends = [[25.5, 0.0, product / 25.5, 0.0], [0.0, 25.5, 25.5, 0.0]]
    qat = quantize_on(model, [np.repeat(np.float32(end)[:, None], 16, 1) for end in ends])
    steps = np.float32(0.1) * np.arange(256, dtype=np.float32)
    given = [grid.reshape(-1, 16) for grid in np.meshgrid(steps, steps)]
    contents = export_exact(qat, given)
    predicted = qat.predict(given, 64, 0)
    np.testing.assert_array_equal(predicted, keras_qat.TFLiteModel(contents).predict(given))


X = images(8, (6, 6, 2))
Y = np.arange(8) % 3


def calibrated_model() -> keras_qat.QuantizedModel:
    """Returns a model with lookup tables: swish and softmax."""
    model = keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.Conv2D(4, 3, activation="swish", name="conv"),
            layers.Flatten(),
            layers.Dense(3, activation="softmax"),
        ]
    )
    qat = quantize_on(model, X)
    qat.compile("sgd", "sparse_categorical_crossentropy")
    return qat


@pytest.mark.sample(1)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite(value):
    qat = calibrated_model()
    (kernel,) = (w for w in qat.weights if "conv/kernel" in w.name)
    healthy, loss = kernel.numpy(), qat.evaluate(X, Y, verbose=0)
    kernel.assign(np.full(kernel.shape, value))
    assert np.isnan(qat.evaluate(X, Y, verbose=0))
    assert np.isnan(qat.predict(X, verbose=0)).all()
    kernel.assign(healthy)
    assert qat.evaluate(X, Y, verbose=0) == loss


def test_nan_in_predict():
    model = functional((4,), build=lambda x: layers.Activation("sigmoid")(layers.Dense(3)(x)))
    x = images(16, (4,))
    qat = observe(keras_qat.quantize_model(model), x)
    x[3, 1] = np.nan
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"Input input_\d+ of .* holds NaN"):
        qat.predict(x, verbose=0)
    x[3, 1] = np.inf
    assert np.all(np.isfinite(qat.predict(x, verbose=0)))
