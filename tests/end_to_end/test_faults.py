"""Models on which something went wrong once: each one is exported, and computes what it says."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat import recipes
from keras_qat.frontend import graph as graph_lib
from keras_qat.frontend.keras2.backend import keras
from keras_qat.integer_graph.resolve import resolve, resolve_in_graph
from tests.comparison import KERNELS, assert_identical
from tests.helpers import images, observe
from tests.networks.small import layers

constant = keras.initializers.Constant


def model_of(build: Any, shape: tuple[int, ...] = (6, 6, 4), dtype: str = "float32") -> Any:
    keras.utils.set_random_seed(3)
    x = keras.Input(shape, dtype=dtype)
    return keras.Model(x, build(x))


def inputs_of(model: Any, count: int = 32) -> np.ndarray:
    """Normally distributed numbers, or small integers."""
    (value,) = model.inputs
    if value.dtype.is_floating:
        return images(count, tuple(value.shape[1:]))
    numbers = np.random.default_rng(0).integers(0, 9, (count, *value.shape[1:]))
    return numbers.astype(value.dtype.as_numpy_dtype)


def check(model: Any, x: Any = None, recipe: Any = "int8", reloaded: Any = None) -> None:
    """Asserts that file, model and simulation agree on all values."""
    x = inputs_of(model) if x is None else x
    qat = observe(keras_qat.quantize_model(model, recipe), x)
    if reloaded is not None:
        qat.save(reloaded / "qat.keras")
        qat = keras.models.load_model(reloaded / "qat.keras")
    contents = keras_qat.export_tflite(qat)
    report = keras_qat.verify(qat, contents, x, per_layer=True)
    assert report.identical == 1
    assert report.differing == ()
    for kernels in KERNELS:
        if "elu" not in str(keras_qat.resolve(qat)) or kernels == "xnnpack":
            assert_identical(qat, x, kernels, contents)


READ_TOO = {
    "float": lambda x: [layers.LayerNormalization()(x), x],
    "transposed": lambda x: [layers.Conv2DTranspose(3, 3)(x), x],
    "elu": lambda x: [layers.ELU()(x), x],
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", READ_TOO)
def test_outputs_that_other_layers_read(kind):
    check(model_of(lambda x: READ_TOO[kind](layers.ReLU()(x))))


CONSTANTS = {
    "array": lambda x: x * np.float32([1, 2, 3]),
    "sum": lambda x: x + np.float32([1, 2, 3]),
    "tensor": lambda x: x * tf.constant([1.0, 2.0, 3.0]),
    "list": lambda x: tf.add(x, [1.0, 2.0, 3.0]),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", CONSTANTS)
def test_constants_in_models_that_were_loaded(kind, tmp_path):
    check(model_of(lambda x: CONSTANTS[kind](layers.Dense(3)(x)), (6,)), reloaded=tmp_path)


def real(x: Any) -> Any:
    return layers.Dense(3)(tf.cast(x, tf.float32))


OF_INTEGERS = {
    "rescaling": ("uint8", lambda x: layers.Conv2D(3, 3)(layers.Rescaling(1 / 255)(x))),
    "normalization": ("int32", lambda x: real(layers.Normalization(mean=3.0, variance=2.0)(x))),
    "resizing": ("uint8", lambda x: real(layers.Resizing(3, 3)(x))),
    "pooling": ("uint8", lambda x: real(layers.MaxPooling2D()(x))),
    "pixels": ("uint8", lambda x: real(layers.UpSampling2D()(x))),
    "sum": ("int32", lambda x: real(tf.reduce_sum(x, 1))),
    "largest": ("int32", lambda x: real(tf.reduce_max(x, 1))),
    "argmax": ("int32", lambda x: real(tf.argmax(x, 1))),
    "arithmetic": ("int32", lambda x: [real(2 * x + 1), x]),
    "movement": ("int64", lambda x: real(layers.Permute((2, 1, 3))(x[:, 1:3]))),
    "dense": ("int64", lambda x: layers.Dense(4)(layers.Dense(3)(x))),
    "one_hot": ("int32", lambda x: layers.Dense(3)(tf.one_hot(x, 9))),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", OF_INTEGERS)
def test_what_reads_integers(kind):
    """Arithmetic on them is no int8 kernel's."""
    dtype, build = OF_INTEGERS[kind]
    check(model_of(build, dtype=dtype))


def test_a_layer_that_reads_integers_says_so():
    model = model_of(layers.Rescaling(1 / 255), dtype="uint8")
    (reason,) = keras_qat.plan(model).float_layers.values()
    assert reason == "no int8 rule for Rescaling: reads uint8"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "recipe",
    [
        recipes.contrib(),
        recipes.contrib().override("dense", quantize=False),
        recipes.int8().override("*", quantize=False),
    ],
    ids=["contrib", "contrib_overridden", "int8_overridden"],
)
def test_models_with_nothing_to_quantize(recipe):
    layer = layers.ReLU() if not recipe.overrides else layers.Dense(6, name="dense")
    model = model_of(layer, (6,))
    x = images(16, (6,))
    told = pytest.warns(match="quantizes nothing") if recipe.name == "contrib" else nullcontext()
    with told:
        qat = keras_qat.quantize_model(model, recipe)
    np.testing.assert_array_equal(qat.predict(x, verbose=0), model.predict(x, verbose=0))
    qat.compile("sgd", "mse")
    qat.fit(x, x, verbose=0)
    qat.evaluate(x, x, verbose=0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("size", [1e30, 1e-15, 1e-30])
@pytest.mark.parametrize("what", ["inputs", "variance", "weights"])
def test_sizes_far_from_one(what, size):
    """The interpreter ended the process."""
    norm = layers.BatchNormalization()
    model = model_of(lambda x: layers.Conv2D(3, 3)(norm(layers.Conv2D(4, 3)(x))))
    x = inputs_of(model)
    if what == "inputs":
        x *= np.float32(size)
    elif what == "variance":
        norm.moving_variance.assign(np.full(4, size))
    else:
        model.layers[1].kernel.assign(model.layers[1].kernel * size)
    check(model, x)


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
    check(model, x, recipe)


def test_batches_of_one_example():
    model = model_of(lambda x: layers.BatchNormalization()(layers.Dense(3)(x)), (6,))
    x = images(5, (6,))
    qat = keras_qat.quantize_model(model)
    qat.compile("sgd", "mse")
    qat.fit(x, x[:, :3], batch_size=1, verbose=0)
    keras_qat.calibrate(qat, x, batch_size=1)  # Ranges of five steps are the first one's.
    contents = keras_qat.export_tflite(qat)
    assert keras_qat.verify(qat, contents, x[:1], batch_size=1).identical == 1
    assert_identical(qat, x[:1], "xnnpack", contents)


def test_tensors_without_elements():
    """TFLite's converter ended the process."""
    model = model_of(lambda x: layers.Concatenate()([layers.Dense(0)(x), x]), (6,))
    for verb in (keras_qat.plan, keras_qat.quantize_model):
        with pytest.raises(ValueError, match=r"tensors without elements.*: dense"):
            verb(model)


def test_gelu_in_16_bits():
    check(model_of(lambda x: layers.Activation("gelu")(layers.Dense(4)(x)), (6,)), recipe="int16x8")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "build",
    [lambda x: tf.clip_by_value(x, -1.0, 1.0), lambda x: x * tf.nn.relu6(x + 3) / 6],
    ids=["clip", "hard_swish"],
)
def test_whole_models_of_16_bits(build):
    """The model's clip was not the file's."""
    check(model_of(build, (6,)), images(512, (6,)), recipe="int16x8")


def test_a_table_in_16_bits():
    model = model_of(lambda x: layers.Dense(3)(layers.Embedding(10, 4)(x)), (6,), "int32")
    check(model, recipe="int16x8")


ACTIVATIONS = {
    **{name: layers.Activation(name) for name in ("sigmoid", "softmax", "tanh", "hard_sigmoid")},
    "leaky_relu": layers.LeakyReLU(),
    "vector": lambda x: x + np.float32([1, 2, -3, 0.5, 1]),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("bits", [2, 5])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_of_few_bits(kind, bits):
    model = model_of(lambda x: layers.Dense(3)(ACTIVATIONS[kind](layers.Dense(5)(x))), (6,))
    check(model, recipe=recipes.int8(activation_bits=bits))


def test_compiled_by_xla():
    def build(x):
        x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(8, 3)(x)))
        return layers.Conv2D(3, 3)(x)

    x = images(256, (6, 6, 2))
    qat = observe(keras_qat.quantize_model(model_of(build, (6, 6, 2))), x)
    qat.compile("sgd", "mse", jit_compile=True)
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), x).identical == 1
    calls = graph_lib.read(qat)
    for one, other in zip(resolve(qat).nodes, resolve_in_graph(calls, None).nodes, strict=True):
        if one.weights is not None:
            np.testing.assert_array_equal(one.weights.scale, other.weights.scale)


INT8 = {
    "hard_sigmoid": (
        "float32",
        lambda x: layers.Concatenate()([layers.Activation("hard_sigmoid")(layers.Dense(4)(x)), x]),
    ),
    "relu6": ("int32", lambda x: layers.ReLU(6.0)(layers.Embedding(10, 4)(x))),
}


@pytest.mark.parametrize("kind", INT8)
def test_int8_where_the_plan_says_so(kind):
    dtype, build = INT8[kind]
    model = model_of(build, (6,), dtype)
    assert not keras_qat.plan(model).float_layers
    check(model)


small = partial(keras.initializers.RandomNormal, stddev=0.01)
ONE_BIAS = {
    "conv": partial(layers.Conv2D, 6, 1, kernel_initializer=small(seed=1)),
    "dense": partial(layers.Dense, 6, kernel_initializer=small(seed=2)),
    "separable": partial(layers.SeparableConv2D, 6, 1, pointwise_initializer=small(seed=3)),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ONE_BIAS)
def test_one_bias_of_all_channels(kind):
    """As heads of detectors begin with, in more bits than float32 has."""
    layer = ONE_BIAS[kind](bias_initializer=constant(-4.6))
    check(model_of(layer), images(32, (6, 6, 4)) * np.float32(0.1))


def test_an_output_that_is_next_to_nothing():
    """XNNPACK takes multipliers below 256."""

    def build(x):
        y = layers.GlobalAveragePooling2D(keepdims=True)(x)
        y = layers.Conv2D(4, 1, activation="relu", bias_initializer=constant(-10.0))(y)
        y = layers.Conv2D(4, 1, activation="sigmoid", bias_initializer=constant(1e-6))(y)
        return layers.Multiply()([x, y])

    check(model_of(build))


def test_a_range_that_is_next_to_nothing():
    tiny = keras.initializers.RandomUniform(-1e-7, 1e-7)
    check(model_of(lambda x: layers.Add()([x, layers.Conv2D(4, 1, kernel_initializer=tiny)(x)])))


def test_outputs_that_are_integers():
    """`verify` divided them by a share of their range."""
    check(model_of(lambda x: [tf.argmax(x, -1), tf.argmin(x, -1)]))


def test_hard_swish_of_numbers_far_below_zero():
    """TFLite's kernel refuses an output that is that much finer than its input."""
    x = np.minimum(images(32, (6, 6, 4)) * np.float32(100), np.float32(0.5))
    check(model_of(lambda x: x * tf.nn.relu6(x + 3) / 6), x)


@pytest.mark.parametrize("recipe", ["int8", "int16x8"])
def test_a_difference_that_is_next_to_nothing(recipe):
    """TFLite's kernel of sums ended the process."""
    model = model_of(lambda x: tf.subtract(x * 1.0000002, x), (4,))
    check(model, recipe=recipe)


def test_softmax_of_next_to_nothing():
    """TFLite's reference kernel ended the process."""
    check(model_of(layers.Softmax(), (4,)), images(32, (4,)) * np.float32(1e-7))


@pytest.mark.parametrize("recipe", ["int8", "int16x8"])
def test_relu6_of_next_to_nothing(recipe):
    """TFLite's kernels refuse a 6 that 32 bits do not hold."""
    tiny = keras.initializers.RandomUniform(-1e-9, 1e-9, seed=1)
    merged = lambda x: layers.ReLU(6.0)(layers.Dense(3, kernel_initializer=tiny)(x))  # noqa: E731
    check(model_of(lambda x: [merged(x), layers.ReLU(6.0)(x * 1e-9)], (6,)), recipe=recipe)


def test_a_table_as_the_whole_model():
    """The file did not name the layer."""
    check(model_of(layers.Activation("selu"), (6,)))


def test_weights_of_zeros_in_contrib():
    """The file held what is no number."""
    model = model_of(layers.Dense(3, kernel_initializer="zeros"), (6,))
    x = images(32, (6,))
    qat = observe(keras_qat.quantize_model(model, "contrib"), x)
    assert_identical(qat, x, "xnnpack", input_range=(-4.0, 4.0))


def test_biases_of_weights_of_zeros_in_contrib():
    """The file rounded them to what inputs are quantized to."""
    layer = layers.Dense(3, kernel_initializer="zeros", bias_initializer=small(seed=1))
    x = 1000 * images(32, (6,))
    qat = observe(keras_qat.quantize_model(model_of(layer, (6,)), "contrib"), x)
    contents = keras_qat.export_tflite(qat, input_range=(-4000.0, 4000.0))
    assert keras_qat.verify(qat, contents, x).identical == 1


def test_equal_ranges_of_a_shared_layer_in_16_bits():
    """Model and file made scales of their own, where ranges of different calls were equal."""
    keras.utils.set_random_seed(3)
    inputs, shared = [keras.Input((6,)) for _ in range(2)], layers.Dense(32)
    model = keras.Model(inputs, [shared(each) for each in inputs])
    x = [images(512, (6,))] * 2
    qat = observe(keras_qat.quantize_model(model, "int16x8"), *x)
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), x).identical == 1
    calls = graph_lib.read(qat)
    for one, other in zip(resolve(qat).nodes, resolve_in_graph(calls, None).nodes, strict=True):
        if one.weights is not None:
            np.testing.assert_array_equal(one.weights.scale, other.weights.scale)


def test_an_input_layer_called_as_a_layer(tmp_path):
    """Keras writes such a model, and does not read it."""

    def build(x):
        x = layers.InputLayer((6,))(layers.Dense(6)(x))
        return [layers.Dense(3)(x), layers.InputLayer((6,))(inputs=x)]

    check(model_of(build, (6,)), reloaded=tmp_path)


class OwnNormalization(layers.GroupNormalization):
    """A class of a user's own, as `register_op` asks for to have it in integers."""


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:These layers compute in float")
@pytest.mark.parametrize("kind", [layers.GroupNormalization, OwnNormalization])
def test_group_normalization_in_float_and_classes_that_inherit_it(kind):
    """TFLite made a wrong broadcast of how Keras computes it, and refused images of more axes."""
    for shape in ((4, 5, 8), (2, 2, 3, 8)):
        model = model_of(kind(2), shape)
        qat = observe(keras_qat.quantize_model(model, "int16x8"), inputs_of(model))
        contents = keras_qat.export_tflite(qat)
        assert keras_qat.verify(qat, contents, inputs_of(model)).max_difference <= 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("factor", [6, 14])
def test_products_whose_ratio_graph_optimization_takes_first(factor):
    """(x * y) * ratio is not (x * ratio) * y, least where the ratio is near 1 / 6."""
    x, y = keras.Input((16,)), keras.Input((16,))
    model = keras.Model([x, y], layers.Multiply()([x, y]))
    product = 2.55 * factor  # Inputs have the scale 0.1, their product 0.01 * factor.
    ends = [[25.5, 0.0, product / 25.5, 0.0], [0.0, 25.5, 25.5, 0.0]]
    qat = keras_qat.quantize_model(model)
    keras_qat.calibrate(qat, [np.repeat(np.float32(each)[:, None], 16, 1) for each in ends])
    steps = np.float32(0.1) * np.arange(256, dtype=np.float32)
    given = [each.reshape(-1, 16) for each in np.meshgrid(steps, steps)]
    contents = keras_qat.export_tflite(qat)
    assert keras_qat.verify(qat, contents, given).identical == 1
    predicted = qat.predict(given, 64, 0)
    np.testing.assert_array_equal(predicted, keras_qat.TFLiteModel(contents).predict(given))
