"""Expansions: TensorFlow functions that compute operations from simpler ones, by subject."""

from __future__ import annotations

from functools import partial
from typing import Any

from keras_qat.graph.calls import Call, flatten_values
from keras_qat.graph.operations import get_kind
from keras_qat.keras2.layers_and_models import get_class_path
from keras_qat.lowering.expand_call import Expansion
from keras_qat.lowering.expansions.arithmetic import (
    ARITHMETIC,
    EARLY_ARITHMETIC,
    FLOAT_ARITHMETIC,
)
from keras_qat.lowering.expansions.constant_products import CONSTANT_PRODUCTS
from keras_qat.lowering.expansions.copying import COPYING
from keras_qat.lowering.expansions.gathering import GATHERING
from keras_qat.lowering.expansions.images import EARLY_IMAGES, IMAGE_LAYERS, IMAGES
from keras_qat.lowering.expansions.matrices import (
    EARLY_MATRICES,
    EARLY_MATRICES_OF_INTEGERS,
    MATRIX_LAYERS,
)
from keras_qat.lowering.expansions.merging import (
    FLOAT_MERGES,
    MERGES,
    MERGING_LAYERS,
    MERGING_LAYERS_ALWAYS,
)
from keras_qat.lowering.expansions.movement import (
    EARLY_MOVEMENT,
    EARLY_MOVEMENT_OF_INTEGERS,
    MOVEMENT,
)
from keras_qat.lowering.expansions.normalization import NORMALIZATION_LAYERS
from keras_qat.lowering.expansions.pooling import EARLY_POOLING, POOLING_LAYERS
from keras_qat.lowering.expansions.segments import EARLY_SEGMENTS
from keras_qat.lowering.expansions.signals import EARLY_SIGNALS
from keras_qat.lowering.expansions.statistics import EARLY_STATISTICS, STATISTICS

EARLY_OPERATIONS: dict[str, Expansion] = {
    **EARLY_ARITHMETIC,
    **EARLY_IMAGES,
    **EARLY_MATRICES,
    **EARLY_MOVEMENT,
    **EARLY_POOLING,
    **EARLY_SEGMENTS,
    **EARLY_SIGNALS,
    **EARLY_STATISTICS,
}
"""Kind of an operation on floats -> its expansion before masks, softmax and formulas are found."""

EARLY_OPERATIONS_OF_INTEGERS: dict[str, Expansion] = {
    **EARLY_MATRICES_OF_INTEGERS,
    **EARLY_MOVEMENT_OF_INTEGERS,
}
"""The same for operations that read integers."""

FLOAT_OPERATIONS: dict[str, Expansion] = {
    **CONSTANT_PRODUCTS,
    **FLOAT_ARITHMETIC,
    **FLOAT_MERGES,
    **STATISTICS,
}
"""Kind of an operation -> its expansion if it reads and returns floats alone."""

OPERATIONS: dict[str, Expansion] = {
    **ARITHMETIC,
    **COPYING,
    **GATHERING,
    **IMAGES,
    **MERGES,
    **MOVEMENT,
}
"""Kind of an operation -> its expansion."""

LAYERS: dict[Any, Expansion] = {
    **IMAGE_LAYERS,
    **MATRIX_LAYERS,
    **MERGING_LAYERS,
    **NORMALIZATION_LAYERS,
    **POOLING_LAYERS,
}
"""Layer class -> a function of the layer and its inputs."""


def find_expansion(call: Call, activations: bool = True) -> Expansion | None:
    """Return the expansion of a call after masks, norms and activations are recognized.

    Args:
        call: the call.
        activations: False for recipes that keep operations like the original.
    """
    layer = call.layer
    if (kind := get_kind(layer)) and activations:
        are_floats = kind in FLOAT_OPERATIONS and is_of_floats(call)
        return FLOAT_OPERATIONS[kind] if are_floats else OPERATIONS.get(kind)
    tables = (MERGING_LAYERS_ALWAYS, LAYERS) if activations else (MERGING_LAYERS_ALWAYS,)
    known = (table.get(key) for table in tables for key in (type(layer), get_class_path(layer)))
    function = next(filter(None, known), None)
    return function and partial(function, layer)


def is_of_floats(call: Call) -> bool:
    """Tell whether a call reads and returns floats alone: no integers and no truth values."""
    return all(value.is_float for value in [*call.inputs, *flatten_values(call.outputs)])
