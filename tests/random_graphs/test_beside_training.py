"""Tests that the comparison with training finds errors that model, file and simulation share."""

from collections.abc import Callable
from typing import Any

import pytest

import keras_qat
from tests.helpers import images, observe, scramble
from tests.networks.small import functional, layers
from tests.random_graphs.beside_training import assert_alike_in_training

X = images(16, (6, 6, 3))


@pytest.fixture(scope="module")
def qat():
    def build(x):
        x = layers.Conv2D(4, 3, use_bias=False)(x)
        x = layers.ReLU(6.0)(layers.BatchNormalization()(x))
        return layers.Add()([layers.Dense(4)(x), x])

    return observe(keras_qat.quantize_model(scramble(functional((6, 6, 3), build=build))), X)


def change(owner: Any, field: str, make: Callable[[Any], Any]) -> None:
    """Changes a value for all its readers."""
    object.__setattr__(owner, field, make(getattr(owner, field)))


FAULTS: dict[str, Callable[[Any], None]] = {
    "none": lambda graph: None,
    "scale": lambda graph: change(graph.nodes[0].output.params, "scale", lambda s: s * 1.002),
    "zero_point": lambda graph: change(graph.nodes[1].output.params, "zero_point", lambda z: z + 1),
    "scale_of_input": lambda graph: change(
        graph.nodes[0].inputs[0].params, "scale", lambda s: s * 0.999
    ),
    "scale_of_weights": lambda graph: change(graph.nodes[0].weights, "scale", lambda s: s * 1.0001),
    "weight": lambda graph: change(graph.nodes[1].weights, "q", lambda q: q + (q == q.max())),
    "bias": lambda graph: change(graph.nodes[0].weights, "bias", lambda b: b + 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_seen(qat, fault):
    graph = keras_qat.resolve(qat)
    FAULTS[fault](graph)
    if fault == "none":
        assert_alike_in_training(graph, [X])
    else:
        with pytest.raises(AssertionError):
            assert_alike_in_training(graph, [X])
