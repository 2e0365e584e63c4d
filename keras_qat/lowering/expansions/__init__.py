"""Expansions: TensorFlow functions that replace an operation by operations with integer kernels.

Each file defines some of these tables. A key is a kind of operation, such as "cumsum".

- `EARLY`: used while custom layers are traced, for operations that only read floats.
- `EARLY_OF_INTEGERS`: used at the same time, for operations that also read other types.
- `OF_FLOATS`: used later, by `split_layers`, for operations that only read and return floats.
- `OPERATIONS`: used by `split_layers` for operations on all types.
- `LAYERS`: used by `split_layers`. A key is a Keras layer class, or the path of a class.
- `LAYERS_ALWAYS`: like `LAYERS`, but also used by `recipes.contrib`.
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
    """Return the expansion that `split_layers` uses for a call, or None.

    Args:
        call: the call.
        activations: whether to use all tables. `recipes.contrib` only uses `LAYERS_ALWAYS`.
    """
    layer = call.layer
    if (kind := get_kind(layer)) and activations:
        are_floats = all(x.is_float for x in [*call.inputs, *flatten_values(call.outputs)])
        return (OF_FLOATS.get(kind) if are_floats else None) or OPERATIONS.get(kind)
    tables = (LAYERS_ALWAYS, LAYERS) if activations else (LAYERS_ALWAYS,)
    known = (table.get(key) for table in tables for key in (type(layer), get_class_path(layer)))
    function = next(filter(None, known), None)
    return function and partial(function, layer)
