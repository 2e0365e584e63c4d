"""Expansions: TensorFlow functions that compute an operation with simpler operations.

Each file defines some of these tables. A table maps a kind of operation to its expansion.

- `EARLY`: operations on floats, expanded before masks and chains are recognized.
- `EARLY_OF_INTEGERS`: operations on integers, expanded at the same time.
- `OPERATIONS`: operations that are expanded later.
- `OF_FLOATS`: operations on floats, expanded later.
- `LAYERS`: maps a layer class or its `get_class_path` to a function of the layer and its inputs.
- `LAYERS_ALWAYS`: like `LAYERS`, but all recipes use these expansions.
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
    """Return the expansion of a call, or None. `EARLY` expansions are ignored.

    Args:
        call: the call.
        activations: False for recipes that keep operations unchanged.
    """
    layer = call.layer
    if (kind := get_kind(layer)) and activations:
        are_floats = all(x.is_float for x in [*call.inputs, *flatten_values(call.outputs)])
        return (OF_FLOATS.get(kind) if are_floats else None) or OPERATIONS.get(kind)
    tables = (LAYERS_ALWAYS, LAYERS) if activations else (LAYERS_ALWAYS,)
    known = (table.get(key) for table in tables for key in (type(layer), get_class_path(layer)))
    function = next(filter(None, known), None)
    return function and partial(function, layer)
