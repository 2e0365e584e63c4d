"""Tests that expansions are traced, compared with the replaced call, and named after it."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.graph.calls import Call
from keras_qat.graph.operations import KINDS, bind_arguments
from keras_qat.graph.read_model import read_model
from keras_qat.keras2.backend import keras
from keras_qat.lowering.builder import LoweringContext
from keras_qat.lowering.expand_call import expand_call, get_value, require
from keras_qat.lowering.expansions import EARLY, EARLY_OF_INTEGERS
from tests.helpers import build_model
from tests.networks.forms.equivalents import FUNCTIONS, SHAPE


def read_call(function) -> Call:
    x = keras.Input((3, 4))
    return read_model(keras.Model(x, function(x))).calls[-1]


def test_the_parts_are_named_after_the_call():
    call = read_call(lambda x: tf.math.add(x, 0.0))
    parts = expand_call(call, lambda x, y: tf.abs(x, name="size") * tf.sign(x), LoweringContext())
    assert [part.name for part in parts] == [f"{call.name}_size", f"{call.name}_sign", call.name]
    assert parts[-1].outputs is call.outputs
    assert [part.layer.name for part in parts] == [part.name for part in parts]


@pytest.mark.parametrize(("factor", "count"), [(1.0, 2), (1.01, 0)])
def test_an_expansion_that_computes_something_else_is_not_used(factor, count):
    call = read_call(lambda x: tf.math.squared_difference(x, 1.0))
    parts = expand_call(
        call, lambda x, y, name=None: tf.square(tf.subtract(x, factor * y)), LoweringContext()
    )
    assert len(parts) == count


def test_results_that_are_not_finite_may_differ():
    call = read_call(tf.math.log)
    assert expand_call(
        call, lambda x, name=None: tf.math.log(tf.maximum(x, 1e-9)), LoweringContext()
    )


def test_arguments_that_are_not_supported():
    call = read_call(lambda x: tf.reduce_sum(x, axis=1))

    def expansion(input_tensor, axis=None):
        require(axis == 2)

    assert expand_call(call, expansion, LoweringContext()) == []
    assert expand_call(call, lambda input_tensor: input_tensor, LoweringContext()) == []
    assert call.output.producer is call


def test_what_is_known_of_a_tensor_is_not_checked():
    call = read_call(lambda x: tf.identity(tf.nn.relu(x)))

    def expansion(input):
        require(get_value(input).producer is not None)
        return tf.abs(input)

    (part,) = expand_call(call, expansion, LoweringContext())
    assert part.name == call.name


def test_calls_of_a_shared_layer_share_the_parts():
    layer = keras.layers.Lambda(tf.abs)
    x, context = keras.Input((2,)), LoweringContext()
    calls = read_model(keras.Model(x, layer(layer(x)))).calls
    first, second = (
        expand_call(call, lambda x: tf.maximum(tf.negative(x), x), context) for call in calls
    )
    assert [part.layer for part in first] == [part.layer for part in second]
    assert len({part.output.name for part in [*first, *second]}) == 4


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (lambda x: tf.reduce_sum(x, axis=1, keepdims=False, name="sum"), 1, {"axis": 1}),
        (lambda x: tf.einsum("abc,dc->abd", x, np.ones((2, 4))), 3, {}),
        (lambda x: x == 0.0, 1, {"y": 0.0}),
        (lambda x: tf.compat.v1.gather_nd(x, [[0]], None, 0), 1, {"indices": [[0]]}),
    ],
)
def test_arguments_are_given_by_their_names_in_tensorflow_2(function, args, kwargs):
    found, named = bind_arguments(read_call(function))
    assert len(found) == args
    assert kwargs.items() <= named.items()
    assert not {"name", "keepdims", "batch_dims"} & named.keys()


def test_all_equivalents_have_a_form():
    assert {KINDS.get(name, name) for name in FUNCTIONS} == EARLY.keys() | EARLY_OF_INTEGERS.keys()


OTHERS = {
    "math.reduce_prod": lambda x: tf.reduce_prod(tf.tile(x, [1, 2, 1]), axis=1),
    "nn.log_softmax": lambda x: tf.compat.v1.nn.log_softmax(x, dim=-1),
    "norm": lambda x: tf.compat.v1.norm(x, ord=1, axis=-1, keep_dims=True),
    "where: it needs a mask and two tensors": lambda x: tf.where(np.tri(6, 8) > 0, x, -1e9),
    "pad: pads with values other than 0": lambda x: tf.pad(
        x, [[0, 0], [1, 2], [0, 1]], constant_values=-np.inf
    ),
}
"""Operations with options that have no expansion, and operations of TensorFlow 1."""


@pytest.mark.parametrize("name", OTHERS)
def test_other_options_stay_in_float(name):
    model = build_model(SHAPE, OTHERS[name])
    (reason,) = keras_qat.plan(model).float_layers.values()
    assert reason.startswith("no int8 rule for tf.") and reason.endswith(name)
    assert keras_qat.quantize_model(model).output_shape == model.output_shape


def test_numbers_are_those_of_the_operation(monkeypatch):
    model = build_model(SHAPE, tf.math.log_sigmoid)
    assert not keras_qat.plan(model).float_layers
    monkeypatch.setitem(EARLY, "log_sigmoid", lambda x: -1.01 * tf.math.softplus(-x))
    assert keras_qat.plan(model).float_layers
