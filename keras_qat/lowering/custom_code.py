"""Decides which layers are traced. Lowering reads the TensorFlow operations of a traced layer.

For some Keras layers, another function with simpler operations is traced instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, flatten_values, map_values
from keras_qat.graph.facts import reach
from keras_qat.graph.operations import get_argument, get_kind, is_operation, name_in_tensorflow
from keras_qat.graph.read_model import read_model
from keras_qat.imports.read_float import ReadsWeight
from keras_qat.keras2.backend import keras, layers
from keras_qat.keras2.configurations import can_find_activation
from keras_qat.keras2.readability import is_graph_model
from keras_qat.lowering.activations import ACTIVATIONS
from keras_qat.lowering.builder import LoweringContext
from keras_qat.lowering.expand_call import copy_outputs, expand_call
from keras_qat.lowering.expansions import EARLY, EARLY_OF_INTEGERS
from keras_qat.lowering.expansions.complex_numbers import find_complex_part
from keras_qat.lowering.expansions.keras_layers import find_layer_expansion
from keras_qat.lowering.mask_tensors import is_recurrent
from keras_qat.lowering.unrolling import CELLS, find_unrolled
from keras_qat.messages import KERAS, KNOWN, get_package
from keras_qat.ops.registry import is_listed, is_listed_function, is_registered

ATTENTION = layers.Attention, layers.AdditiveAttention
"""Keras layers that may be traced."""

_SEPARABLE = layers.SeparableConv1D, layers.SeparableConv2D
"""Custom activations are also split off from these layers, which have no operator of their own."""

NORMALIZES = {
    "batch_normalization",
    "fused_batch_norm",
    "local_response_normalization",
    "normalize",
}

BETTER_IN_FLOAT = NORMALIZES | {"per_image_standardization"}
"""Operations that divide by a norm or deviation of their input. They need more than 8 bits."""

ROOTS = ("rsqrt", "sqrt")
DEVIATIONS = {"reduce_std", "moments", "weighted_moments", "norm"}
SIZES = DEVIATIONS | {"reduce_mean", "reduce_sum", "reduce_variance"}
"""Operations that compute a norm or a deviation, or a part of it, such as a mean of squares."""


def runs_custom_code(layer: layers.Layer) -> bool:
    """Return True if a layer contains custom code, or Keras code that can only be traced."""
    if type(layer) in ATTENTION:
        return type(layer) is layers.AdditiveAttention or bool(layer.weights)
    if is_registered(layer) or is_operation(layer):
        return False
    if type(layer) is layers.TimeDistributed:
        inner = layer.layer
        calls = read_model(inner).calls if is_graph_model(inner) else []
        inner_layers = [call.layer for call in calls] or [inner]
        return any(runs_custom_code(each) or has_custom_activation(each) for each in inner_layers)
    if type(layer) is layers.Activation:
        inner = layer.activation
        return runs_custom_code(inner) if isinstance(inner, layers.Layer) else not _is_known(inner)
    if type(layer) in (layers.Lambda, ReadsWeight, *CELLS):
        return True
    return get_package(type(layer)) not in KNOWN


def _is_known(function: Callable[..., object]) -> bool:
    """Return True if Keras can save an activation function, and lowering supports it."""
    if get_package(function) == "tensorflow" and not can_find_activation(function):
        return False
    with contextlib.suppress(TypeError):  # Some callables are not hashable.
        return function in ACTIVATIONS or is_listed_function(function)
    return False


def has_custom_activation(layer: layers.Layer) -> bool:
    """Return True if a Keras layer has a custom activation. Recurrent layers are ignored."""
    function = getattr(layer, "activation", None)
    is_split = is_listed(layer) or isinstance(layer, _SEPARABLE)
    if is_registered(layer) or is_recurrent(layer) or not (is_split and callable(function)):
        return False
    if isinstance(function, layers.Layer):
        return runs_custom_code(function)
    package = get_package(function)
    return package not in KERAS and not (package == "tensorflow" and _is_known(function))


class ExpandedLayer(keras.layers.Layer):
    """Calls `function` when lowering traces the layer. Otherwise, calls the original layer.

    Args:
        operation: the call of the original layer.
        function: a function that computes the same result, perhaps with the weights of the layer.
    """

    def __init__(self, operation: Call, function: Callable[..., Any]) -> None:
        super().__init__(name=operation.layer.name)
        self.operation, self.function = operation, function

    def call(self, inputs: Sequence[tf.Tensor]) -> Any:
        tensors = dict(zip(dict.fromkeys(self.operation.inputs), inputs, strict=True))
        args, kwargs = map_values(
            tensors.__getitem__, (self.operation.args, dict(self.operation.kwargs))
        )
        is_symbolic = any(map(keras.backend.is_keras_tensor, inputs))
        return (self.function if is_symbolic else self.operation.layer)(*args, **kwargs)


def expand_operation(call: Call, context: LoweringContext, forced: bool) -> list[Call]:
    """Replace a TensorFlow operation by simpler operations, which `EARLY` defines.

    Operations in `BETTER_IN_FLOAT` are replaced only if `forced`.
    """
    kind = get_kind(call)
    reads_floats = all(value.is_float for value in call.inputs)
    table = EARLY if reads_floats else EARLY_OF_INTEGERS
    if kind not in table or (kind in BETTER_IN_FLOAT and not forced):
        return []
    parts, within = expand_call(call, table[kind], context, inside=True), (*call.within, call.layer)
    return [part.replace(source=call.source, within=within) for part in parts]


def find_normalization(graph: Graph, of_weights: set[Value]) -> str:
    """Return the name of a TensorFlow operation that normalizes the graph's input, or "".

    Values in `of_weights` depend only on weights. A normalization of such values is ignored.
    """

    def find_sources(value: Value) -> list[Value]:
        return [] if value.producer is None else value.producer.inputs

    divisors: list[object] = []
    for call in [*graph.calls, *graph.loss_only]:
        if "div" in get_kind(call):
            divisors.append(get_argument(call, "y"))
        elif get_kind(call) in ("reciprocal", "rsqrt"):
            divisors += call.inputs
    divides = set(reach([x for x in divisors if isinstance(x, Value)], find_sources))
    for call in graph.calls:
        kind, outputs = get_kind(call), flatten_values(call.outputs)
        if of_weights.issuperset(outputs):
            continue
        measures = kind in DEVIATIONS
        if kind in ROOTS:
            before = [value.producer for value in reach(call.inputs, find_sources)]
            measures = any(earlier and get_kind(earlier) in SIZES for earlier in before)
        if kind != "rsqrt":
            measures = measures and not divides.isdisjoint(outputs)
        if measures or kind in NORMALIZES:
            return name_in_tensorflow(call.layer)
    return ""


def find_traceable(call: Call, forced: bool = False, unrolls: bool = False) -> Call | None:
    """Return a call that can be traced instead of `call`. Return None if there is none.

    `call` may be a Keras layer, or an operation on complex numbers.

    Args:
        call: the call.
        forced: whether to replace complex operations even if TFLite has kernels for them.
        unrolls: whether to unroll recurrent layers even if they have an operator.
    """
    function: Callable[..., Any] | None
    if (part := find_complex_part(call)) and (forced or not part.has_kernels):
        function = part.compute_pairs
        call = Call(part, part.floats, {}, copy_outputs(call), call.name)
    elif is_operation(call.layer):
        return None
    else:
        function = find_unrolled(call, unrolls) or find_layer_expansion(call)
    if function is None:
        return None
    layer = ExpandedLayer(call, function)
    return Call(layer, (list(dict.fromkeys(call.inputs)),), {}, copy_outputs(call), call.name)
