"""Opening: custom layers, Lambdas and functions are computed as what they are made of."""

import dataclasses
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.ops.weighted_sums import RECENT
from tests.helpers import images, keras, layers, observe, quantize_on
from tests.networks.closed import CLOSED, OwnNorm
from tests.networks.custom import OPENED, Block, ChannelAffine, DropPath, OwnConv

pytestmark = pytest.mark.legacy

SHAPE = (8, 8, 4)


def model_of(build):
    keras.utils.set_random_seed(3)
    x = keras.Input(SHAPE)
    return with_random_weights(keras.Model(x, build(x)))


def with_random_weights(model):
    numbers = np.random.default_rng(3)
    for weight in model.trainable_weights:
        weight.assign(weight + 0.2 * numbers.normal(size=weight.shape))
    return model


def outputs_of(model, data):
    return [np.asarray(tensor) for tensor in tf.nest.flatten(model(data))]


def inbound_nodes(model):
    inside = [module for module in model.submodules if isinstance(module, layers.Layer)]
    return [len(layer.inbound_nodes) for layer in inside]


class Net(keras.Model):
    """A subclassed model, with layers in a list, weights of its own and a part called twice."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.stem = layers.Conv2D(4, 3, padding="same", activation="relu")
        self.blocks = [Block(4), Block(4)]
        self.pool, self.head = layers.GlobalAveragePooling2D(), layers.Dense(3, name="logits")

    def build(self, input_shape):
        self.scale = self.add_weight("scale", (4,), initializer="ones")
        super().build(input_shape)

    def call(self, inputs, training=None):
        x = self.stem(inputs) * self.scale
        for block in self.blocks:
            x = block(x, training=training)
        return self.head(self.pool(self.stem(x)))


class Reversible(layers.Layer):
    """Normalizes a series, and takes that back in a second call (RevIN)."""

    def build(self, input_shape):
        if isinstance(input_shape, list):
            input_shape = input_shape[0]
        self.gain = self.add_weight("gain", input_shape[-1:], initializer="ones")
        super().build(input_shape)

    def call(self, inputs, statistics=None):
        if statistics is not None:
            mean, deviation = statistics
            return inputs / (self.gain + 1e-10) * deviation + mean
        mean, variance = tf.nn.moments(inputs, 1, keepdims=True)
        deviation = tf.sqrt(variance + 1e-5)
        return (inputs - mean) / deviation * (2.0 * self.gain), mean, deviation


def quantized(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return keras_qat.quantize_model(model, strict=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [*OPENED, "a subclassed model"])
def test_what_is_opened_is_exact(name, tmp_path):
    """The float model stays as it is, weights go there and back, the file has the model's codes."""
    if name == "Lambda, mean and maximum" and not RECENT:
        pytest.skip("older kernels round means otherwise whose range is their input's")
    if name == "Keras' backend" and not RECENT:
        pytest.skip("older kernels round transposed convolutions otherwise")
    data = images(32)
    if name in OPENED:
        model = model_of(OPENED[name])
    else:
        model = Net()
        model(data)
        with_random_weights(model)
    before, nodes = outputs_of(model, data), inbound_nodes(model)
    qat = quantized(model)
    if name in OPENED:
        assert inbound_nodes(model) == nodes
    assert len(qat.trainable_weights) == len(model.trainable_weights)
    assert len(qat.losses) == len(model.losses)
    for ours, there in zip(
        outputs_of(keras_qat.strip_quantization(qat), data), before, strict=True
    ):
        np.testing.assert_array_equal(ours, there)

    keras_qat.freeze_batch_norm(qat)
    qat.compile(keras.optimizers.SGD(1e-3), "mse")
    targets = [np.zeros_like(weight) for weight in before]
    qat.fit(data, targets if len(targets) > 1 else targets[0], batch_size=16, verbose=0)
    contents = keras_qat.export_tflite(qat)
    report = keras_qat.verify(qat, contents, data, per_layer=True)
    assert report.identical == 1
    assert not report.differing
    assert not report.float_operations

    qat.save(tmp_path / "qat.keras")
    loaded = keras.models.load_model(tmp_path / "qat.keras")
    assert keras_qat.export_tflite(loaded) == contents
    for ours, there in zip(
        outputs_of(keras_qat.strip_quantization(qat), data), outputs_of(qat, data), strict=True
    ):
        assert np.abs(ours - there).mean() < 0.02 * np.abs(ours).max()


def test_functions_of_the_backend(tmp_path):
    test_what_is_opened_is_exact("Keras' backend", tmp_path)


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["int16x8", "int4_weights"])
@pytest.mark.parametrize(
    "name",
    [
        "a factor and an offset for each channel",
        pytest.param("a block of blocks", marks=pytest.mark.slow),
    ],
)
def test_other_bits(name, recipe):
    model, data = model_of(OPENED[name]), images(32)
    qat = quantize_on(model, data, recipe, strict=True)
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), data).identical == 1


@pytest.mark.parametrize("name", CLOSED)
def test_what_is_not_opened_says_why(name):
    make, reason = CLOSED[name]
    x = keras.Input(SHAPE)
    model = keras.Model(x, make()(layers.Conv2D(4, 1)(x)))
    (result,) = keras_qat.plan(model).float_layers.values()
    assert "cannot be opened" in result
    said = f"(?s)compute in float.*{model.layers[-1].name}: .*{reason}"
    with pytest.warns(UserWarning, match=said):
        keras_qat.quantize_model(model)


@pytest.mark.sample(1)
@pytest.mark.parametrize("without_float", [False, True])
def test_calls_of_a_layer_share_its_weights(without_float):
    """Also where one call cannot be opened, or each computes something else from a weight."""
    x = keras.Input((8, 3))
    layer = Reversible()
    normalized, *statistics = layer(x)
    model = keras.Model(x, layer(layers.Dense(3)(normalized), statistics=statistics))
    data = np.random.default_rng(0).normal(3, 2, (16, 8, 3)).astype("float32")
    recipe = dataclasses.replace(keras_qat.recipes.int8(), without_float=without_float)
    with nullcontext() if without_float else pytest.warns(UserWarning, match="it normalizes"):
        qat = keras_qat.quantize_model(model, recipe)
    assert len(qat.trainable_weights) == len(model.trainable_weights)
    np.testing.assert_allclose(qat(data), model(data), atol=0.1)


def test_what_is_traced_warns_of_nothing(caplog):
    """Keras does so of variables in operations, in the words of its own."""
    keras_qat.plan(model_of(lambda x: ChannelAffine()(x)))
    assert not [record for record in caplog.records if "Lambda layer" in record.getMessage()]


def test_weights_that_are_zero_have_a_range():
    """As biases are that the loss does not depend on."""
    x = keras.Input(SHAPE)
    qat = quantized(keras.Model(x, ChannelAffine()(x)))
    keras_qat.calibrate(qat, images(32))
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), images(32)).identical == 1


def test_overrides_say_what_is_opened():
    model = model_of(lambda x: OwnNorm()(OwnConv(6)(x)))
    recipe = keras_qat.recipes.int8().override("OwnConv", open=False)
    closed = keras_qat.plan(model, recipe.override("own_norm*", open=True))
    assert list(closed.float_layers) == [model.layers[1].name]
    x = keras.Input(SHAPE)
    with keras_qat.register_op(OwnNorm, "move"):
        assert not keras_qat.plan(keras.Model(x, OwnNorm()(x))).float_layers


def test_paths_are_dropped_in_training_only():
    qat = quantized(model_of(lambda x: DropPath()(x)))
    data = np.ones((64, *SHAPE), np.float32)
    kept = np.asarray(qat(data, training=True))[:, 0, 0, 0]
    assert {round(float(layer), 2) for layer in kept} == {0.0, 1.25}
    assert np.ptp(qat(data)) == 0


class DropBlock(layers.Layer):
    """Drops what is not on the diagonal, in training: `tf.meshgrid` takes any number of tensors."""

    def call(self, x, training=None):
        if not training:
            return x
        rows, columns = tf.meshgrid(tf.range(tf.shape(x)[1]), tf.range(tf.shape(x)[2]))
        return x * tf.cast(rows == columns, x.dtype)[..., None]


def test_what_is_dropped_in_training_is_saved(tmp_path):
    qat = keras_qat.quantize_model(model_of(lambda x: DropBlock()(x)), strict=True)
    observe(qat, images(8, SHAPE))
    qat.save(tmp_path / "qat.keras")
    loaded, x = keras.models.load_model(tmp_path / "qat.keras"), np.ones((1, *SHAPE), np.float32)
    np.testing.assert_array_equal(loaded(x), qat(x))
    np.testing.assert_array_equal(np.sign(loaded(x, training=True))[0, ..., 0], np.eye(SHAPE[0]))


class Compressed(layers.Layer):
    """Rounds its difference to another tensor, in training with noise in the place of that."""

    def call(self, inputs, training=None):
        x, y = inputs
        z = (x - y) * 4.0
        return z + tf.random.uniform(tf.shape(z), -0.5, 0.5) if training else tf.round(z)


def test_what_training_computes_otherwise_stays_in_training(tmp_path):
    def build(x):
        y = layers.Conv2D(4, 3, padding="same")(x)
        return layers.Conv2D(2, 3)(Compressed(name="code")([x, y]))

    model, x = model_of(build), images(8, SHAPE)
    qat = quantize_on(model, x, strict=True)
    contents = keras_qat.export_tflite(qat)
    assert keras_qat.verify(qat, contents, x).identical == 1
    qat.save(tmp_path / "qat.keras")
    loaded = keras.models.load_model(tmp_path / "qat.keras")
    assert keras_qat.export_tflite(loaded) == contents
    inner = loaded.get_layer("quant_code/in_training")
    z = np.arange(256, dtype=np.float32).reshape(1, *SHAPE)
    np.testing.assert_array_equal(inner(z, given=[z, 2 * z]), z)
    noise = inner(z, given=[z, 2 * z], training=True) + 4 * z
    assert 0 < np.abs(noise).min() <= np.abs(noise).max() <= 0.5
    assert np.any(loaded(x, training=True) != loaded(x, training=True))
    plain = keras_qat.strip_quantization(qat)
    np.testing.assert_array_equal(plain(x), model(x))


def test_parts_are_overridden_by_their_names():
    model = model_of(OPENED["a block of blocks"])
    name = model.layers[-1].name
    recipe = keras_qat.recipes.int8().override(f"{name}/blocks_1", quantize=False)
    floats = keras_qat.plan(model, recipe).float_layers
    assert floats
    assert all(layer.startswith(f"{name}/blocks_1") for layer in floats)
    whole = keras_qat.plan(model, keras_qat.recipes.int8().override("Stage", quantize=False))
    assert len(whole.float_layers) > len(floats)


def test_subclassed_models_are_told_their_inputs():
    with pytest.raises(ValueError, match=r"inputs=keras.Input"):
        keras_qat.plan(Net())
    assert not keras_qat.plan(Net(), inputs=keras.Input(SHAPE)).float_layers
    built = Net()
    built.build((None, *SHAPE))
    assert keras_qat.quantize_model(built).input_shape == (None, *SHAPE)


def test_subclassed_models_that_cannot_be_opened_say_which_line():
    class ByValue(keras.Model):
        def call(self, x):
            return x if tf.reduce_sum(x) > 0 else -x

    with pytest.raises(ValueError, match=r"in `return x if tf.reduce_sum\(x\) > 0"):
        keras_qat.quantize_model(ByValue(), inputs=keras.Input(SHAPE))


class ReversibleNorm(keras.Model):
    """Normalizes each series itself, as forecasting networks do, and undoes that at the end."""

    def __init__(self):
        super().__init__()
        self.mixer = layers.Dense(8, activation="relu")

    def call(self, x):
        mean = tf.reduce_mean(x, axis=1, keepdims=True)
        deviation = tf.sqrt(tf.math.reduce_variance(x, axis=1, keepdims=True) + 1e-5)
        y = tf.transpose(self.mixer(tf.transpose((x - mean) / deviation, [0, 2, 1])), [0, 2, 1])
        return y * deviation + mean


@pytest.mark.skipif(not RECENT, reason="older interpreters have no sums of 32 bits")
def test_subclassed_models_may_normalize():
    model, x = ReversibleNorm(), images(32, (8, 4)) + images(32, (1, 4), 1)
    expected = model.predict(x, verbose=0)
    qat = quantized(model)
    keras_qat.calibrate(qat, x)
    error = qat.predict(x, verbose=0) - expected
    assert np.square(error).mean() < 1e-3 * np.var(expected)
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), x).identical == 1


class PassesTrainingOn(layers.Layer):
    """Hands `training` on by position, as some packages' layers do."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.mixer = layers.Dense(4)
        self.dropout = layers.Dropout(0.5)

    def __call__(self, inputs, training=None, **kwargs):
        return super().__call__(inputs, training, **kwargs)

    def call(self, inputs, training=None, **kwargs):
        return self.mixer(self.dropout(inputs, training))


class DropsInTraining(layers.Layer):
    """Calls a layer in training alone, as an example in Keras' documentation, in one branch."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first, self.second = layers.Dense(4), layers.Dense(4, "relu")
        self.short = [layers.Dense(4), layers.Dense(4), layers.Dense(4)]
        self.dropout = layers.Dropout(0.5)

    def call(self, inputs, training=False):
        x = self.second(self.first(inputs))
        if training:
            x = self.dropout(x, training=training)
        for layer in self.short:
            inputs = layer(inputs)
        return x + inputs


@pytest.mark.sample(1)
@pytest.mark.parametrize("layer", [PassesTrainingOn, DropsInTraining])
def test_dropout_inside_follows_the_phase(layer):
    model, data = model_of(layer()), images(32)
    qat = quantized(model)
    keras_qat.calibrate(qat, data)
    expected = model.predict(data, verbose=0)
    error = qat.predict(data, verbose=0) - expected
    assert np.square(error).mean() < 1e-3 * np.var(expected)
    assert np.any(qat(data, training=True) != qat(data, training=True))
    assert np.all(qat(data) == qat(data))


def test_parts_of_several_outputs_have_plain_names():
    """The name of an output was appended: `distance/reduce_sum_meandistance:0`."""

    class Distance(layers.Layer):
        def call(self, a, b):
            return tf.reduce_sum(tf.square(a - b), -1), tf.reduce_sum(tf.nn.silu(a + b), -1)

    ends = keras.Input((4,)), keras.Input((4,))
    plan = keras_qat.plan(keras.Model(ends, Distance(name="distance")(*ends)))
    names = [row.tensor for row in plan.rows]
    assert {"distance:0", "distance:1"} <= set(names)
    assert [name for name in names if name.count("distance") > 1] == []
    assert len(set(names)) == len(names)


def test_parts_of_an_inner_activation_have_plain_names():
    """The name was `block/activation_sigmoidblock`."""

    class Block(layers.Layer):
        def build(self, shape):
            self.activation = layers.Activation("swish")

        def call(self, x):
            return self.activation(x)

    inputs = keras.Input((4,))
    block = Block(name="block")
    plan = keras_qat.plan(keras.Model(inputs, block(block(inputs))))
    names = [row.tensor for row in plan.rows]
    assert [name for name in names if name.count("block") > 1] == []
    assert len(set(names)) == len(names)


class Gates(layers.Layer):
    """A layer that passes a tensor to a Lambda as an argument."""

    def __init__(self, **options):
        super().__init__(**options)
        self.gate = layers.Dense(4, activation="sigmoid")

    def call(self, x):
        return layers.Lambda(lambda y, gate: y * gate, arguments={"gate": self.gate(x)})(x)


def test_tensors_among_the_arguments_of_a_lambda():
    x = keras.Input((4,))
    model, data = keras.Model(x, layers.Dense(3)(Gates()(x))), images(32, (4,))
    qat = quantized(model)
    keras_qat.calibrate(qat, data)
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), data)
    assert report.identical == 1
    assert not report.float_operations
