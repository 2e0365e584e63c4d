"""Tests that the check of graphs finds faults, and accepts correct graphs."""

import dataclasses

import pytest

from keras_qat.graph.calls import Value
from keras_qat.graph.debug_graph import find_problems
from keras_qat.graph.read_model import read_model
from tests.networks.small import functional, layers


def read(*made):
    def build(x):
        for layer in made:
            x = layer(x)
        return x

    return read_model(functional((4,), build=build))


def test_graph_of_model():
    assert not list(find_problems(read(layers.Dense(3), layers.ReLU())))


def test_call_before_its_producer():
    graph = read(layers.Dense(3, name="dense"), layers.ReLU(name="relu"))
    graph = dataclasses.replace(graph, calls=graph.calls[::-1])
    assert list(find_problems(graph)) == ["relu reads dense, which no earlier call computes"]


def test_value_with_another_producer():
    graph = read(layers.Dense(3, name="dense"))
    graph.calls[0].replace(name="copy")
    (problem,) = find_problems(graph)
    assert problem.startswith("the producer of dense is")


@pytest.mark.parametrize("kind", [layers.Dense(3, name="x"), layers.ReLU(name="x")])
def test_wrong_shape(kind):
    graph = read(kind)
    graph.calls[0].output.shape = (None, 5)
    (problem,) = find_problems(graph)
    assert "has the shape (None, 5)" in problem


def test_two_layers_of_one_name():
    graph = read(layers.ReLU(name="a"), layers.ReLU(name="b"))
    calls = [graph.calls[0], graph.calls[1].replace(name="a")]
    graph = dataclasses.replace(graph, calls=calls)
    assert list(find_problems(graph)) == ["two layers are called a"]


def test_output_that_nothing_computes():
    graph = read(layers.ReLU())
    graph = dataclasses.replace(graph, outputs=Value("lost", (None, 4), "float32"))
    assert list(find_problems(graph)) == ["no call computes the output lost"]
