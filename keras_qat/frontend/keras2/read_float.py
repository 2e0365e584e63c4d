"""Reads a user's float model into the model and graph to quantize."""

from __future__ import annotations

from typing import Any

from keras_qat.frontend.graph import Graph, read
from keras_qat.frontend.keras2.input_shape import with_known_input
from keras_qat.frontend.keras2.precision import check_precision, float32_policy, in_float32
from keras_qat.frontend.keras2.readability import as_functional, check_readable, check_training


def read_float(model: Any, inputs: Any = None, half: bool = True) -> tuple[Any, Graph]:
    """Returns the functional or Sequential Keras 2 model to quantize, and its graph.

    The model is the user's unless that is subclassed or does not know its input's shape.

    Args:
        model: the user's model.
        inputs: symbolic inputs for a subclassed model.
        half: whether the model may compute in half precision; else a float32 copy is used.

    Raises:
        ValueError: if the model cannot be read, trains in its own way, or holds float64.
    """
    model = as_functional(model, inputs)
    check_readable(model)
    check_training(model)
    model = with_known_input(model if half else in_float32(model))
    with float32_policy():
        graph = read(model)
    check_precision(graph)
    return model, graph
