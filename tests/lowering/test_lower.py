"""Layers that do several things are split; the lowered model computes the same."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.graph.read_model import read_model
from keras_qat.graph.rebuild_model import rebuild_model
from keras_qat.keras2.backend import keras
from keras_qat.lowering import lower
from tests.comparison import assert_in_integers, assert_kept
from tests.helpers import images, observe, scramble
from tests.networks.small import functional, layers

pytestmark = pytest.mark.legacy

CASES = {
    "conv_relu": (partial(layers.Conv2D, 4, 3, activation="relu"), ["Conv2D", "Activation"]),
    "conv": (partial(layers.Conv2D, 4, 3), ["Conv2D"]),
    "dense_softmax": (partial(layers.Dense, 4, activation="softmax"), ["Dense", "Activation"]),
    "depthwise_tanh": (
        partial(layers.DepthwiseConv2D, 3, activation="tanh"),
        ["DepthwiseConv2D", "Activation"],
    ),
    "separable": (partial(layers.SeparableConv2D, 4, 3), ["DepthwiseConv2D", "Conv2D"]),
    "separable_with_everything": (
        partial(
            layers.SeparableConv2D,
            4,
            3,
            strides=2,
            padding="same",
            depth_multiplier=2,
            use_bias=False,
            activation="relu",
        ),
        ["DepthwiseConv2D", "Conv2D", "Activation"],
    ),
}


def lowered_outputs(model, x):
    lowered = lower(read_model(model))
    rebuilt = rebuild_model(lowered)
    for layer, weights in lowered.weights.items():
        for new, old in zip(layer.weights, weights, strict=True):
            new.assign(old)
    return lowered, rebuilt(x)


@pytest.mark.parametrize("case", CASES)
def test_split_computes_the_same(case):
    make, kinds = CASES[case]
    model = scramble(functional((8, 8, 3), build=lambda x: make(name="layer")(x)))
    x = images(4, (8, 8, 3))
    lowered, result = lowered_outputs(model, x)
    assert [type(call.layer).__name__ for call in lowered.calls] == kinds
    np.testing.assert_allclose(result, model(x), rtol=1e-5, atol=1e-6)
    assert lowered.calls[-1].output.name == "layer"


@pytest.mark.parametrize("merge", [layers.Add, layers.Multiply])
def test_merge_of_four_becomes_three_of_two(merge):
    model = functional(*[(4,)] * 4, build=lambda *values: merge(name="merge")(list(values)))
    x = [images(4, (4,), seed) for seed in range(4)]
    lowered, result = lowered_outputs(model, x)
    assert [len(call.inputs) for call in lowered.calls] == [2, 2, 2]
    np.testing.assert_allclose(result, model(x), rtol=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("merge", [layers.Add, layers.Subtract, layers.Maximum, layers.Average])
@pytest.mark.parametrize("shapes", [((), (1,)), ((3, 4), (4,))], ids=str)
def test_merges_of_other_numbers_of_axes_broadcast_as_in_keras(merge, shapes):
    """Axes are added behind that of the examples, of which there are as many as channels here."""
    model = functional(*shapes, build=lambda *values: merge()(list(values)))
    x = [images(4, shape, seed) for seed, shape in enumerate(shapes)]
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.calibrate(qat, x)
    assert np.abs(qat.predict(x, verbose=0) - model.predict(x, verbose=0)).max() < 0.02
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), x).identical == 1


def test_merges_of_three_with_other_numbers_of_axes():
    shapes = [(4,), (3, 4, 4), (4,)]
    model = functional(*shapes, build=lambda *values: layers.Add()(list(values)))
    x = [images(4, shape, seed) for seed, shape in enumerate(shapes)]
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.calibrate(qat, x)
    assert np.abs(qat.predict(x, verbose=0) - model.predict(x, verbose=0)).max() < 0.05


@pytest.mark.sample(2)
@pytest.mark.parametrize("merge", [layers.Add, layers.Concatenate, layers.Maximum, tf.add_n])
def test_merges_of_one_tensor_pass_it_on(merge, tmp_path):
    """Keras loads no such layer: decoders have it at a level without a skip."""
    merged = merge if merge is tf.add_n else merge()
    model = functional((4,), build=lambda x: merged([layers.Dense(3)(x)]))
    qat, x = keras_qat.quantize_model(model, strict=True), images(8, (4,))
    keras_qat.calibrate(qat, x)
    assert np.abs(qat(x) - model(x)).max() < 0.05
    assert_kept(qat, x, tmp_path)


def test_parts_may_have_the_name_of_another_layer(tmp_path):
    inputs, x = keras.Input((4, 4, 2)), images(16, (4, 4, 2))
    y = layers.SeparableConv2D(2, 2, name="conv")(inputs)
    outputs = layers.Conv2D(2, 2, name="conv_depthwise")(y)
    assert_in_integers(keras.Model(inputs, outputs), x, tmp_path)


def test_copies_for_a_batch_keep_their_shape():
    """Along the first axis; `tf.repeat` without an axis makes one axis of all."""
    one, x = layers.Input((1, 4), batch_size=1), layers.Input((3,))
    count = tf.shape(x)[0]
    result = [tf.repeat(one, count, axis=0), tf.tile(input=one, multiples=[count, 1, 1])]
    result += [tf.repeat(one, count), tf.tile(one, [count, 2, 1])]
    plan = keras_qat.plan(keras.Model([one, x], result))
    assert sorted(plan.float_layers) == sorted(item.node.layer.name for item in result[2:])


ROWS = {
    "as wide as the others leave": lambda x: [tf.shape(x)[0], 3, -1],
    "as many as there are": lambda x: [tf.shape(x)[0], -1, 4],
    "flat": lambda x: [tf.shape(x)[0], -1],
    "halves": lambda x: (tf.shape(x)[0], -1, 2),
    "counted by rows": lambda x: [tf.shape(tf.reshape(x, [-1, 4]))[0], 2, -1],
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("rows", ROWS)
def test_rows_of_all_examples_become_examples_again(rows, tmp_path):
    """The open first axis between the reshapes counts rows: three times the examples."""
    model = functional(
        (3, 4),
        build=lambda x: tf.reshape(layers.Dense(4)(tf.reshape(x, [-1, 4])), ROWS[rows](x)),
    )
    x = images(8, (3, 4))
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.calibrate(qat, x)
    expected = model.predict(x, verbose=0)
    np.testing.assert_allclose(qat.predict(x, verbose=0), expected, atol=0.05)
    assert_kept(qat, x, tmp_path)


COPIED = {
    "broadcast_to": lambda x, row: tf.broadcast_to(row, tf.shape(x)),
    "broadcast_to of more axes": lambda x, row: tf.broadcast_to(row[None], tf.shape(x)),
    "tile": lambda x, row: tf.tile(row[None], tf.stack([tf.shape(x)[0], 1, 1])),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("copied", COPIED)
def test_constants_are_copied_to_sizes_in_a_tensor(copied, tmp_path):
    row = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    model = functional((3, 4), build=lambda x: tf.sin(x) * COPIED[copied](x, tf.constant(row)))
    x = images(8, (3, 4))
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.calibrate(qat, x)
    assert np.abs(qat.predict(x, verbose=0) - model.predict(x, verbose=0)).max() < 0.02
    assert_kept(qat, x, tmp_path)


class Loop(layers.Layer):
    """Steps of one's own, from states of zeros, ones or another number for each example."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.step = layers.Dense(3, "tanh")

    def call(self, inputs):
        count = tf.shape(inputs)[0]
        state, gate = tf.zeros((count, 3)), tf.fill([count, 3], 0.5)
        for index in range(2):
            state = self.step(tf.concat([inputs[:, index], state, tf.ones([count, 1])], -1))
            gate = gate * state
        return gate


def test_numbers_for_each_example_are_in_integers():
    model, x = scramble(functional((2, 4), build=Loop())), images(32, (2, 4))
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.calibrate(qat, x)
    expected = model.predict(x, verbose=0)
    error = qat.predict(x, verbose=0) - expected
    assert np.square(error).mean() < 1e-3 * np.var(expected)
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), x).identical == 1


class FromTokens(layers.Layer):
    """As decoders begin: sizes are those of tokens, or all of `tf.shape`."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.embedding = layers.Embedding(9, 3)

    def call(self, tokens):
        state = tf.zeros((tf.shape(tokens)[0], 3))
        for index in range(2):
            first = self.embedding(tokens[:, index])
            largest = tf.maximum(tf.fill(tf.shape(first), 0.01), first)
            state = 0.5 * state + largest * tf.ones([tf.shape(tokens)[0] * 1, 1])
        return state * tf.zeros(tf.shape(tokens)[:1])[:, None] + state


def test_numbers_for_each_example_are_in_integers_beside_tokens():
    tokens = keras.Input((2,), dtype="int32")
    model = keras.Model(tokens, FromTokens()(tokens))
    x = np.arange(16).reshape(8, 2) % 9
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.calibrate(qat, x)
    expected = model.predict(x, verbose=0)
    assert np.abs(qat.predict(x, verbose=0) - expected).max() < 0.02 * np.abs(expected).max()
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), x).identical == 1


class FromOneToken(layers.Layer):
    """Sums of embeddings from zeros, as many as examples, which are one number each."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.embedding = layers.Embedding(9, 3)

    def call(self, token):
        total = tf.zeros((tf.shape(token)[0], 3)) + tf.fill(tf.shape(token), 0.5)[:, None]
        return total + self.embedding(token) + tf.ones(tf.shape(token)[:1])[:, None]


@pytest.mark.slow
def test_numbers_for_each_example_are_in_integers_beside_single_tokens():
    token = keras.Input((), dtype="int32")
    model, x = keras.Model(token, FromOneToken()(token)), np.arange(16, dtype=np.int32) % 9
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.calibrate(qat, x)
    expected = model.predict(x, verbose=0)
    assert np.abs(qat.predict(x, verbose=0) - expected).max() < 0.02 * np.abs(expected).max()
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), x).identical == 1


class Largest(layers.Layer):
    """As RWKV's steps: from a number far below all others."""

    def call(self, x):
        largest, total = tf.fill(tf.shape(x[:, 0]), -1e4), tf.zeros_like(x[:, 0])
        for index in range(3):
            before, largest = largest, tf.maximum(largest, x[:, index])
            total = total * tf.exp(before - largest) + tf.exp(x[:, index] - largest)
        return total


class Decaying(layers.Layer):
    """As RWKV's steps, whose largest number decays: what is far stays far."""

    def build(self, shape):
        self.decay = self.add_weight("decay", (4,), initializer="ones")

    def call(self, x):
        largest, total = tf.ones_like(x[:, 0]) * -1e38, tf.zeros_like(x[:, 0])
        for index in range(2):
            before = largest - tf.exp(self.decay)
            largest = tf.maximum(before, x[:, index])
            total = tf.exp(before - largest) * total + tf.exp(x[:, index] - largest)
        return total - tf.zeros_like(total)


class Limited(layers.Layer):
    """Numbers that no one reaches."""

    def call(self, x):
        return tf.minimum(tf.maximum(x, tf.ones_like(x) * -1e9), 1e9 - tf.zeros_like(x))


@pytest.mark.sample(1)
@pytest.mark.parametrize("layer", [Largest, Decaying, Limited])
def test_numbers_for_each_example_set_no_range(layer, tmp_path):
    model, x = functional((3, 4), build=layer()), images(32, (3, 4))
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.calibrate(qat, x)
    expected = model.predict(x, verbose=0)
    assert np.abs(qat.predict(x, verbose=0) - expected).max() < 0.05 * np.abs(expected).max()
    assert_kept(qat, x, tmp_path)


def test_numbers_near_others_are_computed_with():
    x = keras.Input((4,))
    near = tf.maximum(x, tf.ones_like(x) * 0.5) + (tf.zeros_like(x) - 3.0)
    qat = keras_qat.quantize_model(keras.Model(x, 2.0 - tf.zeros_like(x) * x + near))
    keras_qat.set_quantization(qat, False)
    np.testing.assert_allclose(qat(np.ones([2, 4], np.float32), training=True), 0.0, atol=1e-6)


def test_float_model_keeps_its_activation():
    model = functional((4,), build=layers.Dense(3, activation="relu", name="dense"))
    lower(read_model(model))
    assert model.get_layer("dense").activation.__name__ == "relu"


def test_a_layer_as_activation_keeps_its_weights():
    def build(x):
        x = layers.Conv2D(4, 3, activation=layers.PReLU(shared_axes=[1, 2]), name="conv")(x)
        return layers.SeparableConv2D(4, 3, activation=layers.PReLU(), name="separable")(x)

    model, x = scramble(functional((8, 8, 4), build=build)), images(32, (8, 8, 4))
    qat = observe(keras_qat.quantize_model(model, strict=True), x)
    assert "quant_conv_activation" in [layer.name for layer in qat.layers]
    expected = model.predict(x, verbose=0)
    difference = np.abs(qat.predict(x, verbose=0) - expected)
    assert difference.mean() < 0.01 * np.abs(expected).max()
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), x).identical == 1
    plain = keras_qat.strip_quantization(qat)
    np.testing.assert_array_equal(plain.predict(x, verbose=0), expected)
