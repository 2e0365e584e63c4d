"""Tests reading a model as calls, and rebuilding it."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from keras_qat.graph.read_model import read_model
from keras_qat.graph.rebuild_model import rebuild_model
from tests.helpers import build_model, images, keras
from tests.networks.small import functional, layers, residual_net, tiny_net

pytestmark = pytest.mark.legacy


def nested():
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="dense")], name="inner")
    return functional((4,), build=lambda x: layers.Add(name="add")([inner(x), inner(inner(x))]))


def several():
    def build(a, b):
        mean, variance = layers.Lambda(lambda x: (x, x + 1), name="pair")(a)
        return {"y": layers.Multiply()([mean, b]), "x": layers.Dense(2)(variance)}

    return functional((4,), (4,), build=build)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "make",
    [
        *(residual_net, tiny_net, nested, several),
        lambda: functional((4,), build=lambda x: 2.0 * (layers.Dense(4)(x) + x)[:, :2]),
        lambda: functional((4,), build=lambda x: tf.math.polyval([1.0, 2.0, 3.0], x)),
    ],
)
def test_rebuilt_model_computes_the_same(make):
    model = make()
    again = rebuild_model(read_model(model))
    x = [images(4, tuple(array.shape[1:]), seed) for seed, array in enumerate(model.inputs)]
    expected, predicted = model.predict(x, verbose=0), again.predict(x, verbose=0)
    tf.nest.map_structure(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6), predicted, expected
    )


def test_nested_and_shared_layers_are_calls_with_names():
    calls = read_model(nested()).calls
    assert [call.name for call in calls] == ["inner/dense", "inner/dense", "inner/dense", "add"]
    assert [call.output.name for call in calls] == [
        "inner/dense",
        "inner/dense#2",
        "inner/dense#3",
        "add",
    ]
    assert len({id(call.layer) for call in calls[:3]}) == 1


def test_consumers():
    read = read_model(residual_net())
    relu = next(call for call in read.calls if call.name == "stem_relu")
    assert [call.name for call in read.consumers()[relu.output]] == ["depthwise", "merge"]


def test_a_model_inside_that_is_called_with_training_stays_so():
    inner = keras.Sequential([keras.Input((4,)), layers.Dropout(0.5)], name="inner")
    (call,) = read_model(functional((4,), build=lambda x: inner(x, training=True))).calls
    assert call.kwargs["training"] is True


def test_calls_are_immutable_and_graphs_say_who_produces_a_value():
    graph = read_model(build_model((3,), layers.ReLU()))
    (call,) = graph.calls
    with pytest.raises(dataclasses.FrozenInstanceError):
        call.name = "other"
    tried = dataclasses.replace(call, name="other")
    assert tried.output is call.output and call.output.producer is call
    dataclasses.replace(graph, calls=[tried])
    assert call.output.producer is tried
