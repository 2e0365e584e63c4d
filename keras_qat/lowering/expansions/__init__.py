"""Expansions: TensorFlow functions that compute an operation with simpler operations.

Each file defines some of these tables, which map a kind of operation to its expansion:

- `EARLY`: expansions of float operations before masks, softmax and chains of elementwise operations
  are recognized; `EARLY_OF_INTEGERS`: early expansions of integer operations.
- `OPERATIONS`: later expansions; `OF_FLOATS`: later expansions of calls with only float tensors.
- `LAYERS`: layer class, or its `get_class_path` -> a function of the layer and its inputs;
  `LAYERS_ALWAYS`: layers that are expanded even by recipes that leave operations unchanged.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from keras_qat.graph.calls import Call, flatten_values
from keras_qat.graph.operations import get_kind
from keras_qat.keras2.layers_and_models import get_class_path
from keras_qat.lowering.expand_call import Expansion
from keras_qat.lowering.expansions import (
    arithmetic,
    copying,
    images,
    keras_layers,
    matrices,
    merging,
    movement,
    statistics,
)

_SUBJECTS = (arithmetic, copying, images, keras_layers, matrices, merging, movement, statistics)


def _collect(table: str) -> dict[Any, Expansion]:
    """Return the entries of all tables with this name."""
    return {
        key: expansion
        for subject in _SUBJECTS
        for key, expansion in getattr(subject, table, {}).items()
    }


EARLY = _collect("EARLY")
EARLY_OF_INTEGERS = _collect("EARLY_OF_INTEGERS")
OF_FLOATS = _collect("OF_FLOATS")
OPERATIONS = _collect("OPERATIONS")
LAYERS = _collect("LAYERS")
LAYERS_ALWAYS = _collect("LAYERS_ALWAYS")


def find_expansion(call: Call, activations: bool = True) -> Expansion | None:
    """Return the expansion of a call, except `EARLY` expansions.

    Args:
        call: the call.
        activations: False for recipes that leave operations unchanged.
    """
    layer = call.layer
    if (kind := get_kind(layer)) and activations:
        are_floats = all(x.is_float for x in [*call.inputs, *flatten_values(call.outputs)])
        return (OF_FLOATS.get(kind) if are_floats else None) or OPERATIONS.get(kind)
    tables = (LAYERS_ALWAYS, LAYERS) if activations else (LAYERS_ALWAYS,)
    known = (table.get(key) for table in tables for key in (type(layer), get_class_path(layer)))
    function = next(filter(None, known), None)
    return function and partial(function, layer)
