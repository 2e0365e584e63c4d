"""Expands operations and Keras layers while custom layers are traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras_qat.graph.calls import Call, map_values
from keras_qat.graph.operations import get_kind, is_operation
from keras_qat.keras2.backend import keras
from keras_qat.lowering.builder import LoweringContext
from keras_qat.lowering.expand_call import copy_outputs, expand_call
from keras_qat.lowering.expansions import EARLY_OPERATIONS, EARLY_OPERATIONS_OF_INTEGERS
from keras_qat.lowering.expansions.conv_lstm import CONVOLUTIONS, unroll_conv_lstm
from keras_qat.lowering.expansions.keras_layers import find_layer_expansion
from keras_qat.lowering.normalizing import WHOLE
from keras_qat.lowering.spectra import spectrum
from keras_qat.lowering.unrolling import unrolled


class TracedLayer(keras.layers.Layer):
    """Calls a function on symbolic tensors, and the layer that it stands for on all others.

    Args:
        operation: the call of the layer.
        function: computes the same from the same arguments, and may read the layer's weights.
    """

    def __init__(self, operation: Call, function: Callable[..., Any]) -> None:
        super().__init__(name=operation.layer.name)
        self.operation, self.function = operation, function

    def call(self, inputs: Sequence[Any]) -> Any:
        tensors = dict(zip(dict.fromkeys(self.operation.inputs), inputs, strict=True))
        args, kwargs = map_values(
            tensors.__getitem__, (self.operation.args, dict(self.operation.kwargs))
        )
        is_symbolic = any(map(keras.backend.is_keras_tensor, inputs))
        return (self.function if is_symbolic else self.operation.layer)(*args, **kwargs)


def expand_operation(call: Call, context: LoweringContext, forced: bool) -> list[Call]:
    """Expand an operation before masks, softmax and formulas are recognized.

    Args:
        call: the call.
        context: keeps the layers.
        forced: whether to expand operations that are better in float.
    """
    kind = get_kind(call)
    reads_floats = all(value.is_float for value in call.inputs)
    table = EARLY_OPERATIONS if reads_floats else EARLY_OPERATIONS_OF_INTEGERS
    if kind not in table or (kind in BETTER_IN_FLOAT and not forced):
        return []
    parts, within = expand_call(call, table[kind], context, inside=True), (*call.within, call.layer)
    return [part.replace(source=call.source, within=within) for part in parts]


BETTER_IN_FLOAT = (*WHOLE, "clip_by_norm", "per_image_standardization")
"""Kinds that divide by the size of their input, for which 8 bits are few."""


def find_traceable(call: Call, forced: bool = False, unrolls: bool = False) -> Call | None:
    """Return a call that is traced in place of a Keras layer or of complex operations.

    None if there is none. A recurrent layer that a row computes is traced if `unrolls`.
    """
    function: Callable[..., Any] | None
    if (complex_part := spectrum(call)) and (forced or not complex_part.has_kernels):
        function, reals = complex_part.in_pairs, complex_part.reals
        call = Call(complex_part, reals, {}, copy_outputs(call), call.name)
    elif is_operation(call.layer):
        return None
    elif type(call.layer) in CONVOLUTIONS:
        function = unroll_conv_lstm(call)
    else:
        function = unrolled(call, unrolls) or find_layer_expansion(call)
    if function is None:
        return None
    layer = TracedLayer(call, function)
    return Call(layer, (list(dict.fromkeys(call.inputs)),), {}, copy_outputs(call), call.name)
