"""Tests half precision: which layers train in it, which use float32, and what files return."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.training.quantizers import list_activation_quantizers
from tests import helpers
from tests.comparison import assert_identical
from tests.helpers import assert_all_equal, build_model, keras, layers, rng, save_and_load, train
from tests.networks.small import residual_net, tiny_net

pytestmark = pytest.mark.legacy

POLICIES = {"mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}
PRODUCTS = (
    *("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter", "MatMul"),
    *("DepthwiseConv2dNative", "DepthwiseConv2dNativeBackpropInput"),
    "DepthwiseConv2dNativeBackpropFilter",
)


# XNNPACK of TensorFlow 2.15 and 2.16 refuses files with a loop, so TFLite's kernels run them.
FOR_LOOPS = "reference" if tf.__version__ < "2.17" else "xnnpack"


@pytest.fixture(params=POLICIES)
def policy(request):
    keras.mixed_precision.set_global_policy(request.param)
    yield request.param
    keras.mixed_precision.set_global_policy("float32")


@pytest.fixture
def float16():
    keras.mixed_precision.set_global_policy("mixed_float16")
    yield
    keras.mixed_precision.set_global_policy("float32")


def slow(recipe):
    return pytest.param(recipe, marks=pytest.mark.slow, id=getattr(recipe, "name", recipe))


CONTRIB = keras_qat.recipes.contrib(symmetric=True)


def images(count: int = 16) -> np.ndarray:
    return rng().uniform(-1, 1, (count, 8, 8, 3)).astype("float32")


def network():
    """Returns convolutions, operations, a nested model with a nested layer, and an LSTM."""
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, padding="same", use_bias=False)(inputs)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    x = tf.nn.relu(layers.Conv2D(4, 3, padding="same", activation="swish")(x) + x)
    inner = keras.Input((8, 32))
    step = layers.TimeDistributed(layers.Dense(5))(inner)
    step = layers.Bidirectional(layers.LSTM(3))(step)
    x = keras.Model(inner, step, name="inner")(layers.Reshape((8, 32))(x))
    return keras.Model(inputs, layers.Dense(3, dtype="float32")(x))


def gradient_operations(qat, x):
    """Returns the operations of a training step, by type, with the type that each computes in."""

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(qat(x, training=True))
        return tape.gradient(loss, qat.trainable_variables)

    result: dict[str, set[str]] = {}
    graph = step.get_concrete_function(x).graph.as_graph_def()
    inside = [node for function in graph.library.function for node in function.node_def]
    for item in [*graph.node, *inside]:
        if item.attr["T"].type:
            result.setdefault(item.op, set()).add(tf.as_dtype(item.attr["T"].type).name)
    return result


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["int8", "contrib"])
def test_products_are_in_half_precision_and_state_is_in_float32(policy, recipe):
    qat = keras_qat.quantize_model(residual_net(), recipe)
    operations = gradient_operations(qat, helpers.images(shape=(8, 8, 1)))
    for product in PRODUCTS:
        assert operations[product] == {POLICIES[policy]}, product
    assert {weight.dtype for weight in qat.weights} == {tf.float32, tf.int64}
    assert qat.output.dtype == tf.float32
    for layer in qat.layers:
        assert not hasattr(layer, "layer") or layer.layer.dtype_policy.name == policy


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "recipe", ["int8", *(slow(item) for item in ("int4_weights", "contrib", CONTRIB))]
)
def test_file_computes_what_the_model_predicts(policy, recipe, tmp_path):
    x = helpers.images(shape=(8, 8, 1))
    model = residual_net()
    qat = train(keras_qat.quantize_model(model, recipe), x, 2)
    is_scaled = isinstance(qat.optimizer, keras.mixed_precision.LossScaleOptimizer)
    assert is_scaled == (policy == "mixed_float16")
    contents = keras_qat.export_tflite(qat)
    exact = recipe in ("int8", "int4_weights")
    assert keras_qat.verify(qat, contents, x).max_difference <= (0 if exact else 2)
    assert_identical(qat, x, "xnnpack", contents)

    qat.save(tmp_path / "qat.keras")
    keras.mixed_precision.set_global_policy("float32")
    loaded = keras.models.load_model(tmp_path / "qat.keras")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), qat.predict(x, verbose=0))
    assert keras_qat.export_tflite(loaded) == contents
    assert loaded.dtype_policy.name == qat.dtype_policy.name
    policies = [[layer.dtype_policy.name for layer in m._flatten_layers()] for m in (qat, loaded)]
    assert policies[0] == policies[1]
    plain = keras_qat.strip_quantization(qat)
    assert plain.get_layer("stem").dtype_policy.name == policy
    for ours, theirs in zip(plain.layers, model.layers, strict=True):
        assert ours.get_config() == theirs.get_config()


@pytest.mark.slow
def test_layers_in_layers_operations_and_islands_in_float(policy, tmp_path):
    model, x = network(), images()
    qat = keras_qat.quantize_model(model, kernels=FOR_LOOPS)
    np.testing.assert_allclose(qat(x), model(x), atol=0.05)
    qat.compile("adam", "mse")
    qat.fit(x, np.ones((len(x), 3)), verbose=0)
    contents = keras_qat.export_tflite(qat)
    assert keras_qat.verify(qat, contents, x, kernels=FOR_LOOPS).max_difference <= 1
    reloaded = save_and_load(qat, tmp_path / "qat.keras")
    np.testing.assert_array_equal(reloaded.predict(x, verbose=0), qat.predict(x, verbose=0))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.usefixtures("policy")
def test_casts_halves_as_inputs_and_normalization():
    """Inputs and outputs of quantization-aware models are float32, like those of files."""
    x = helpers.images(shape=(6, 6, 2))
    normalization = layers.Normalization()
    normalization.adapt(x * 3 + 120)
    inputs = keras.Input((6, 6, 2), dtype="float16")
    y = layers.Conv2D(4, 3)(normalization(inputs))
    y = tf.cast(tf.nn.relu(tf.cast(y, tf.float32)), y.dtype)
    y = y + tf.constant([0.5, 1.0, 1.5, 2.0], y.dtype)
    model = keras.Model(inputs, layers.LayerNormalization()(y))
    qat = keras_qat.quantize_model(model)
    assert (qat.input.dtype, qat.output.dtype) == (tf.float32, tf.float32)
    x = x * 3 + 120
    qat.compile("sgd", "mse")
    qat.fit(x, np.zeros((len(x), 4, 4, 4)), verbose=0)
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), x)
    assert report.max_difference <= 1


@pytest.mark.slow
@pytest.mark.usefixtures("policy")
def test_calibration_is_that_of_the_model_in_float32():
    x = helpers.images(shape=(8, 8, 1))
    half = keras_qat.quantize_model(residual_net())
    keras.mixed_precision.set_global_policy("float32")
    full = keras_qat.quantize_model(residual_net())
    for variant in (half, full):
        keras_qat.calibrate(variant, x, batch_size=16)
    assert [(q.minimum, q.maximum) for q in list_activation_quantizers(half)] == [
        (q.minimum, q.maximum) for q in list_activation_quantizers(full)
    ]
    bias = next(weight for weight in half.trainable_weights if "bias" in weight.name)
    bias.assign(bias + np.inf)
    with pytest.raises(
        ValueError,
        match="computes NaN or infinity from this data, first in the output of 'project'",
    ):
        keras_qat.calibrate(half, x)


def ranges(qat):
    """Returns the ranges of activations after the input."""
    return [
        (quantizer.minimum, quantizer.maximum) for quantizer in list_activation_quantizers(qat)
    ][1:]


@pytest.mark.usefixtures("float16")
def test_ranges_take_in_nothing_of_a_step_that_overflows():
    """The optimizer also skips the step, and halves its scale."""
    inputs = keras.Input((6, 6, 2))
    normalized = layers.BatchNormalization()(layers.Conv2D(4, 3)(inputs))
    outputs = layers.Dense(3, dtype="float32")(layers.Flatten()(normalized))
    qat = keras_qat.quantize_model(keras.Model(inputs, outputs))
    qat.compile("sgd", "mse")
    x, y = helpers.images(8, (6, 6, 2)), np.zeros((8, 3))
    qat.train_on_batch(x, y)
    kernel = qat.layers[2].layer.kernel
    kernel.assign(tf.fill(kernel.shape, 6e4))
    before, weights = ranges(qat), helpers.values(qat.trainable_weights)
    scale = float(qat.optimizer.loss_scale)
    qat.train_on_batch(x, y)
    assert ranges(qat) == before
    assert float(qat.optimizer.loss_scale) == scale / 2
    assert_all_equal(weights, qat.trainable_weights)


@pytest.mark.usefixtures("float16")
def test_infinity_is_clipped_and_not_observed():
    """A convolution that overflows float16 returns the end of its range, and training continues."""
    qat = keras_qat.quantize_model(tiny_net())
    x, y = helpers.images(8, (6, 6, 2)), np.zeros((8, 3))
    qat.compile("sgd", "mse")
    keras_qat.freeze_batch_norm(qat)
    qat.train_on_batch(x, y)
    before = {quantizer.name: quantizer.maximum for quantizer in list_activation_quantizers(qat)}
    qat.get_layer("quant_conv").layer.kernel.assign_add(tf.fill([3, 3, 2, 4], 6e4))
    assert np.isfinite(qat.train_on_batch(x, y))
    after = {quantizer.name: quantizer.maximum for quantizer in list_activation_quantizers(qat)}
    assert after["quant_conv/output"] == before["quant_conv/output"]
    assert np.all(np.isfinite(list(after.values())))


@pytest.mark.sample(1)
@pytest.mark.parametrize("verb", [keras_qat.plan, keras_qat.quantize_model])
@pytest.mark.usefixtures("policy")
def test_activations_of_16_bits_are_refused(verb):
    with pytest.raises(ValueError, match="has too few digits for int16 activations"):
        verb(tiny_net(), "int16x8")


def whole_float64():
    keras.backend.set_floatx("float64")
    keras.mixed_precision.set_global_policy("float64")
    try:
        return keras.Sequential([keras.Input((4,)), layers.Dense(3, name="wrong")])
    finally:
        keras.backend.set_floatx("float32")
        keras.mixed_precision.set_global_policy("float32")


def of_type(dtype):
    return keras.Sequential([keras.Input((4,)), layers.Dense(3, dtype=dtype, name="wrong")])


OTHER_TYPES = {
    "float64_layers": lambda: of_type("float64"),
    "float64_operation": lambda: build_model(
        (4,), lambda x: layers.Dense(3)(tf.cast(x, "float64", name="wrong"))
    ),
    "half_weights": lambda: of_type("float16"),
    "whole_float64": whole_float64,
}


@pytest.mark.parametrize("name", OTHER_TYPES)
@pytest.mark.parametrize("verb", [keras_qat.plan, keras_qat.quantize_model])
def test_other_types_are_refused_early(name, verb):
    with pytest.raises(ValueError, match=r"'(wrong|tf\.cast.*)' of .* float(64|16).*set_floatx"):
        verb(OTHER_TYPES[name]())


@pytest.mark.slow
def test_inputs_in_float64_are_taken_in_float32():
    inputs = keras.Input((4,), dtype="float64")
    qat = keras_qat.quantize_model(keras.Model(inputs, layers.Dense(3)(inputs)))
    assert qat.input.dtype == tf.float32
    x = helpers.images(shape=(4,))
    train(qat, x.astype("float64"), 1)
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), x).max_difference == 0
