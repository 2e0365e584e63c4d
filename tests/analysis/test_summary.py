"""Tests `summary`: bits, ranges, bytes and multiply-accumulates of each operator."""

import json

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.ops.multiply_accumulates import count_products
from keras_qat.tflite.schema import OPERATORS, operator_code, unpack
from tests.helpers import build_model, keras, layers, quantize_on, rng

WEIGHTED = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")


def calibrated(model, recipe="int8"):
    x = rng(1).uniform(-1, 1, (4, *model.input_shape[1:])).astype(np.float32)
    return quantize_on(model, x, recipe)


def residual():
    inputs = keras.Input((8, 8, 2), name="image")
    x = layers.Conv2D(4, 3, padding="same", use_bias=False, name="conv")(inputs)
    x = layers.ReLU(6.0, name="relu")(layers.BatchNormalization(name="norm")(x))
    x = layers.Add(name="add")([x, layers.DepthwiseConv2D(3, padding="same", name="deep")(x)])
    return keras.Model(inputs, layers.Dense(3, name="logits")(layers.Flatten(name="flat")(x)))


@pytest.mark.legacy
def test_sizes_are_those_of_a_plain_computation():
    rows = keras_qat.summary(calibrated(residual()))
    by_name = {layer.name: layer for layer in rows.layers}
    assert list(by_name) == ["relu", "deep", "add", "flat", "logits"]
    assert {name: value.multiply_accumulates for name, value in by_name.items()} == {
        "relu": 64 * 4 * 18,
        "deep": 64 * 4 * 9,
        "add": 0,
        "flat": 0,
        "logits": 256 * 3,
    }
    weights = [72 + 16, 36 + 16, 0, 0, 768 + 12]
    assert [layer.weight_bytes for layer in rows.layers] == weights
    assert rows.float_weight_bytes == 4 * (72 + 4 + 36 + 4 + 768 + 3)
    assert [layer.activation_bytes for layer in rows.layers] == [256, 256, 256, 256, 3]
    # Both terms and the sum; in float, four times as much.
    assert (rows.peak_activation_bytes, rows.peak_layer) == (768, "add")
    assert rows.float_peak_activation_bytes == 4 * 768


@pytest.mark.parametrize("recipe", ["int8", "int16x8"])
def test_weights_are_those_of_the_file(recipe):
    qat = calibrated(residual(), recipe)
    file = unpack(keras_qat.export_tflite(qat))
    (graph,) = file.subgraphs
    held = [
        len(file.buffers[graph.tensors[index].buffer].data)
        for operator in graph.operators
        if OPERATORS[operator_code(file.operatorCodes[operator.opcodeIndex])] in WEIGHTED
        for index in operator.inputs[1:]
    ]
    assert keras_qat.summary(qat).weight_bytes == sum(held)


def test_ranges_are_those_of_the_file():
    qat = calibrated(residual())
    interpreter = tf.lite.Interpreter(model_content=keras_qat.export_tflite(qat))
    (scale, zero_point) = interpreter.get_output_details()[0]["quantization"]
    logits = keras_qat.summary(qat).layers[-1]
    assert (logits.scale, logits.zero_point, logits.bits) == (np.float32(scale), zero_point, 8)
    assert logits.minimum == pytest.approx(scale * (-128 - zero_point), rel=1e-6)


def test_before_calibration_there_are_no_ranges():
    rows = keras_qat.summary(keras_qat.quantize_model(residual()))
    assert {layer.scale for layer in rows.layers} == {None}
    assert "not set" in str(rows)


ONES = {
    "conv": ((6, 5, 3), lambda x: layers.Conv2D(4, (3, 2), strides=2, groups=1)(x)),
    "groups": ((6, 5, 4), lambda x: layers.Conv2D(6, 3, groups=2)(x)),
    "sequence": ((9, 3), lambda x: layers.Conv1D(4, 3, dilation_rate=2)(x)),
    "depthwise": ((6, 5, 3), lambda x: layers.DepthwiseConv2D(3, depth_multiplier=2)(x)),
    "transposed": ((4, 5, 3), lambda x: layers.Conv2DTranspose(2, 3, strides=2)(x)),
    "dense": ((4, 5, 3), lambda x: layers.Dense(7)(x)),
    "heads": ((5, 6), lambda x: layers.EinsumDense("abc,cde->abde", (None, 2, 3))(x)),
    "per tensor": ((5, 6), lambda x: layers.EinsumDense("abc,dc->abd", (None, 4))(x)),
    "matmul": ((5, 6), lambda x: tf.matmul(x, x, transpose_b=True)),
    "dot": ((5, 6), lambda x: layers.Dot(axes=(1, 1))([x, x])),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ONES)
def test_products_are_counted_as_ones_are_added_up(name):
    """If all values are 1, each product adds 1 to the sum of the outputs."""
    shape, build = ONES[name]
    model = build_model(shape, build)
    model.set_weights([np.full(w.shape, float(w.ndim > 1)) for w in model.get_weights()])
    total = np.sum(model(np.ones((1, *shape), np.float32)))
    assert keras_qat.summary(calibrated(model)).multiply_accumulates == total
    assert sum(map(count_products, keras_qat.plan(model).graph.calls)) == total


@pytest.mark.slow
@pytest.mark.parametrize("sequences", [False, True])
def test_each_step_of_an_image_multiplies_at_each_position(sequences):
    """There are 3 steps, 6 x 4 positions of 2 x 3 inputs and of 2 x 3 states, and 4 gates."""
    inputs = keras.Input((3, 7, 6, 2))
    x = layers.ConvLSTM2D(5, (2, 3), return_sequences=sequences)(inputs)
    rows = keras_qat.summary(calibrated(keras.Model(inputs, x)))
    assert rows.multiply_accumulates == 3 * (6 * 4) * (2 * 3) * (2 + 5) * (4 * 5)


def test_a_shared_layer_is_held_once_and_works_twice():
    inputs, shared = keras.Input((4,)), layers.Dense(4, name="shared")
    rows = keras_qat.summary(calibrated(keras.Model(inputs, shared(shared(inputs)))))
    assert [layer.weight_bytes for layer in rows.layers] == [32, 0]
    assert rows.multiply_accumulates == 32


def test_what_is_in_float_and_what_is_not_known():
    inputs = keras.Input((None, None, 3))
    x = layers.Conv2D(4, 3, name="conv")(inputs)
    model = keras.Model(inputs, layers.Dense(2)(tf.math.xlogy(layers.GlobalMaxPooling2D()(x), 1.5)))
    rows = keras_qat.summary(keras_qat.quantize_model(model))
    assert rows.layers[0].multiply_accumulates is None
    assert rows.peak_activation_bytes is None
    assert list(rows.float_layers.values()) == ["no int8 rule for tf.math.xlogy"]
    with pytest.warns(DeprecationWarning, match="use Summary.float_layers"):
        assert rows.in_float == rows.float_layers == rows.to_dict()["in_float"]
    assert "?x?x4" in str(rows)


@keras.saving.register_keras_serializable("summary")
class Product(layers.Layer):
    def build(self, shape):
        self.matrix = self.add_weight("matrix", (shape[-1], 5))

    def call(self, x):
        return tf.cond(tf.reduce_mean(x) > 0.0, lambda: x @ self.matrix, lambda: -x @ self.matrix)


IN_FLOAT = {
    "by recipe": (lambda: layers.Dense(5, name="last"), 4 * 6 * 5),
    "a custom layer": (lambda: Product(name="last"), 4 * 6 * 5),
    "LSTM": (lambda: layers.LSTM(5, name="last"), 4 * (6 + 5) * 4 * 5),
    "SimpleRNN": (lambda: layers.SimpleRNN(5, name="last"), 4 * (6 + 5) * 5),
    "GRU": (lambda: layers.GRU(5, name="last"), 4 * (6 + 5) * 3 * 5),
    "no products": (lambda: layers.PReLU(name="last"), 0),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", IN_FLOAT)
def test_share_of_the_arithmetic_in_integers(name):
    build, in_float = IN_FLOAT[name]
    model = build_model((4, 3), lambda inputs: build()(layers.Dense(6)(inputs)))
    recipe = keras_qat.recipes.int8().override("last", quantize=False, open=False)
    in_integers = 4 * 3 * 6
    share = in_integers / (in_integers + in_float)
    plan, rows = keras_qat.plan(model, recipe), keras_qat.summary(calibrated(model, recipe))
    assert plan.integer_share == rows.integer_share == pytest.approx(share)
    percent = {120: "37.5", 880: "7.5", 220: "24.6", 660: "9.8", 0: "100"}[in_float]
    counted = "counted " * (in_float == 0)
    for text in (str(plan), str(rows)):
        assert f"; {percent} % of the {counted}arithmetic in int8" in text


def test_share_of_files_that_end_inside():
    inputs = keras.Input((4,))
    x = layers.Dense(6, name="inside")(inputs)
    model = keras.Model(inputs, layers.Dense(5, name="last")(x))
    assert keras_qat.plan(model, outputs=["inside"]).integer_share == 1


def test_share_of_unknown_sizes():
    plan = keras_qat.plan(build_model((None, 3), layers.Dense(6)))
    assert plan.integer_share is None


def test_as_json():
    data = json.loads(keras_qat.summary(calibrated(residual())).to_json())
    assert data["multiply_accumulates"] == 64 * 4 * 27 + 768
    assert data["integer_share"] == 1
    assert data["layers"][0]["name"] == "relu"


def test_target():
    qat = keras_qat.quantize_model(residual(), target="ethos_u55")
    rows = keras_qat.summary(qat)
    assert rows.to_dict()["target"] == "ethos_u55"
    assert "\ntarget: ethos_u55" in str(rows)
    assert "target" not in str(keras_qat.summary(keras_qat.quantize_model(residual())))
