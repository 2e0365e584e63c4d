"""Reads a user's float model. Returns a functional model and its graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value
from keras_qat.graph.operations import is_operation
from keras_qat.graph.precision import check_holds_16_bits, check_precision, use_float32
from keras_qat.graph.read_model import read_model
from keras_qat.graph.sizes import fold_known_sizes
from keras_qat.keras2.backend import keras
from keras_qat.keras2.layers_and_models import clone, get_output_names, list_layers
from keras_qat.keras2.readability import as_functional, check_readable
from keras_qat.tracing.layer_weights import find_weight_holders, is_constant_mask


class ReadsWeight(keras.layers.Lambda):
    """Placeholder for an operation that reads another layer's weight, such as a tied embedding.

    Keras cannot save such a layer, so the package `lowering` replaces it.

    Args:
        function: the operation.
        reason: the error message if tracing cannot replace the placeholder.
    """

    def __init__(self, function: Callable[..., Any], reason: str, **kwargs: object) -> None:
        super().__init__(function, **kwargs)
        self.reason = reason


def read_float(model: Any, inputs: Any = None, half: bool = True) -> tuple[keras.Model, Graph]:
    """Returns the functional or Sequential Keras 2 model to quantize, and its graph.

    The result is the user's model, unless it is subclassed or has an unknown input shape.

    Args:
        model: the user's model.
        inputs: symbolic inputs for a subclassed model.
        half: True if the model may compute in half precision.

    Raises:
        ValueError: if the model cannot be read, has float64 tensors, or reads a variable that
            belongs to no layer.
    """
    model = as_functional(model, inputs)
    check_readable(model)
    if not half:
        check_holds_16_bits(model)
    model = _set_input_shape(model)
    with use_float32():
        graph = fold_known_sizes(read_model(model))
    graph.output_names = get_output_names(model)
    check_precision(graph)
    return model, _replace_weight_reads(graph)


def _replace_weight_reads(graph: Graph) -> Graph:
    """Replace operations by `ReadsWeight` if they read a weight, as in a tied embedding."""
    layers = dict.fromkeys(inner for call in graph.calls for inner in list_layers(call.layer))
    calls = [new for call in graph.calls for new in _replace_call(call, list(layers))]
    return dataclasses.replace(graph, calls=calls)


def _replace_call(call: Call, layers: list[keras.layers.Layer]) -> list[Call]:
    given = call.args, call.kwargs
    variables = [leaf for leaf in tf.nest.flatten(given) if isinstance(leaf, tf.Variable)]
    if not variables:
        return [call]
    readers = {id(variable): _find_reader(variable, layers) for variable in variables}
    reason = (
        f"'{call.name}' reads {variables[0].name}, which is not a weight of this layer, so Keras "
        f"can neither copy nor save it. Write a custom layer that has the variable as a weight "
        f"and computes this operation in its call."
    )
    if None in readers.values():
        raise ValueError(reason)
    if not is_operation(call.layer):
        return _pass_weights(call, variables, readers, reason)

    def compute(tensors: list[tf.Tensor]) -> Any:
        remaining = iter(tensors)

        def read(leaf: Any) -> Any:
            if isinstance(leaf, Value):
                return next(remaining)
            return readers[id(leaf)]() if id(leaf) in readers else leaf

        args, kwargs = tf.nest.map_structure(read, given)
        return call.layer.function(*args, **kwargs)

    layer = ReadsWeight(compute, reason, name=call.layer.name)
    return [Call(layer, (call.inputs,), {}, call.outputs, call.name)]


def _find_reader(variable: tf.Variable, layers: list[keras.layers.Layer]) -> Any:
    """Return a function that reads a variable from its layer. Return None if no layer has it."""
    for holder, own in (pair for layer in layers for pair in find_weight_holders(layer)):
        for attribute, held in own.items():
            variables = [id(leaf) for leaf in tf.nest.flatten(held)]
            if id(variable) in variables:
                index = variables.index(id(variable))
                return lambda: tf.nest.flatten(getattr(holder, attribute))[index]
    return None


def _pass_weights(
    call: Call, variables: list[tf.Variable], readers: dict[int, Any], reason: str
) -> list[Call]:
    """Return a `ReadsWeight` call for each variable, then `call` with the results as arguments."""
    calls, values = [], dict[int, Value]()
    read = {id(v): v for v in variables if not is_constant_mask(v)}
    for index, (key, variable) in enumerate(read.items()):
        name = f"{call.name}/weight_{index}"
        layer = ReadsWeight(lambda _, read=readers[key]: read(), reason, name=name)
        values[key] = Value(name, tuple(variable.shape), variable.dtype.name)
        calls.append(Call(layer, (call.inputs[0],), {}, values[key], name))

    def replace(leaf: Any) -> Any:
        if isinstance(leaf, tf.Variable) and is_constant_mask(leaf):
            return tf.constant(leaf.numpy())
        return values.get(id(leaf), leaf)

    args, kwargs = tf.nest.map_structure(replace, (call.args, call.kwargs))
    return [*calls, dataclasses.replace(call, args=args, kwargs=kwargs)]


def _set_input_shape(model: keras.Model) -> keras.Model:
    """Return the model, or a copy with a known input shape.

    A Sequential model without `keras.Input` has an unknown input shape. If the first layer is an
    adapted Normalization, the layer knows the sizes of the normalized axes.

    Raises:
        ValueError: if such a Normalization is not the first layer of a Sequential model.
    """
    unknown = [layer for layer in model._flatten_layers() if _find_missing_sizes(layer)]
    if not unknown:
        return model
    if not isinstance(model, keras.Sequential) or unknown != [model.layers[0]]:
        raise ValueError(
            f"'{unknown[0].name}' normalizes along an axis of unknown size. Use an input with a "
            f"static shape. In a Sequential model, pass keras.Input(shape) as the first layer."
        )
    shape = list(model.input_shape)
    for axis, size in _find_missing_sizes(model.layers[0]).items():
        shape[axis] = size
    inputs = keras.Input(batch_shape=shape, dtype=model.inputs[0].dtype, name=model.input_names[0])
    first, *others = model.layers
    layers = [clone(first, batch_input_shape=shape), *map(clone, others)]
    copy = keras.Sequential([inputs, *layers], name=model.name)
    copy.set_weights(model.get_weights())
    for layer in layers:
        layer.finalize_state()  # Normalization computes other attributes from its weights.
    return copy


def _find_missing_sizes(layer: keras.layers.Layer) -> dict[int, int]:
    """Return {axis: size} for axes of unknown size if an adapted Normalization knows the size."""
    if not isinstance(layer, keras.layers.Normalization) or not layer.built or layer.axis is None:
        return {}
    shapes = [node.input_shapes for node in layer.inbound_nodes]
    return {
        axis: layer._build_input_shape[axis]
        for shape in shapes
        for axis in layer._keep_axis
        if shape[axis] is None
    }
