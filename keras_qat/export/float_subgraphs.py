"""Exports layers that stay in float, with TFLite's converter.

The converter writes the operators of these layers to a separate file. The operators are then copied
into the exported file, where each quantized input gets a DEQUANTIZE.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.lite.python import schema_py_generated as schema
from tensorflow.lite.python.convert_phase import ConverterError

from keras_qat.graph.calls import Call, Value, flatten_values
from keras_qat.graph.keras_masks import KerasMasks
from keras_qat.graph.operations import is_operation, name_in_tensorflow
from keras_qat.integer_graph.float_nodes import (
    compute_in_float,
    find_mask_sources,
    get_weight_scales,
)
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.keras2.backend import keras
from keras_qat.keras2.layers_and_models import use_attribute_names
from keras_qat.keras2.readability import get_first_line
from keras_qat.messages import pluralize
from keras_qat.ops.node import Node, Tensor
from keras_qat.tflite.builder import Builder
from keras_qat.tflite.schema import SCOPE, find_scope, unpack
from keras_qat.tflite.splice import splice_model
from keras_qat.tflite.weight_packing import pack_weights
from keras_qat.training.layers import QuantizeWeights, QuantizeWrapper
from keras_qat.training.quantizers import PREFIX


def write_float_subgraph(
    builder: Builder,
    graph: ResolvedGraph,
    nodes: Sequence[Node],
    ends: Sequence[Tensor],
    indices: dict[Tensor, int],
    dequantized: dict[Tensor, int],
) -> None:
    """Writes the operators of several float layers, with one run of TFLite's converter.

    Args:
        builder: the file.
        graph: the graph of the nodes.
        nodes: the nodes, in order.
        ends: the outputs that later nodes read, or that are outputs of the model.
        indices: maps tensors to their indices in the file. The function adds `ends`.
        dequantized: maps quantized tensors to the indices of their float values. All float
            subgraphs share this dict.

    Raises:
        ValueError: if the converter refuses layers. The message names the layers.
    """
    inputs = _find_inputs(graph, nodes)
    try:
        model = unpack(_convert(graph.tensors, nodes, inputs, ends))
    except ConverterError as error:
        raise ValueError(_explain(error, graph)) from error
    _rename(model, nodes)
    pack_weights(model, [scale for node in nodes for scale in get_weight_scales(node)])
    main = model.subgraphs[0]
    starts, results = (list(map(int, end)) for end in (main.inputs, main.outputs))
    read = {int(index) for operator in main.operators for index in operator.inputs}
    index_here: dict[int, int] = {}
    """Maps indices in the converter's file to indices in the exported file."""
    for start, tensor in zip(starts, inputs, strict=True):
        if start in read or start in results:
            index_here[start] = _add_dequantized(builder, indices, dequantized, tensor)
    for result, tensor in zip(results, ends, strict=True):
        if result not in index_here:
            name = f"{SCOPE}/{tensor.name}"
            index_here[result] = builder.tensor(name, tensor.shape, tensor.dtype)
        indices[tensor] = index_here[result]
    main.inputs = [index for index in starts if index in index_here]
    main.outputs = [index for index in dict.fromkeys(results) if index not in starts]
    starts_here, ends_here = (
        [index_here[index] for index in end] for end in (main.inputs, main.outputs)
    )
    splice_model(builder, model, starts_here, ends_here)


def _rename(file: schema.ModelT, nodes: Sequence[Node]) -> None:
    """Rename constants and the tensors of loops, so that equal models produce equal files.

    The converter's names contain counters of the process.
    """
    scopes = [node.name for node in nodes]
    for number, graph in enumerate(file.subgraphs):
        graph.name = f"{SCOPE}/{scopes[0]}/{number}".encode()
        for position, tensor in enumerate(graph.tensors):
            if number:
                tensor.name = f"{SCOPE}/{scopes[0]}/{number}/{position}".encode()
            elif file.buffers[tensor.buffer].data is not None:
                scope = find_scope(tensor.name.decode(), scopes) or scopes[0]
                tensor.name = f"{SCOPE}/{scope}/constant_{position}".encode()


def _add_dequantized(
    builder: Builder, indices: dict[Tensor, int], dequantized: dict[Tensor, int], tensor: Tensor
) -> int:
    """Return the index of a tensor's float values. Add a DEQUANTIZE if there is none yet."""
    if tensor.params is None:
        return indices[tensor]
    if tensor not in dequantized:
        name = f"{SCOPE}/{tensor.name}/dequantized"
        dequantized[tensor] = builder.tensor(name, tensor.shape, "float32")
        builder.operator("DEQUANTIZE", [indices[tensor]], [dequantized[tensor]])
    return dequantized[tensor]


def _find_inputs(graph: ResolvedGraph, nodes: Sequence[Node]) -> list[Tensor]:
    """Return the tensors that `nodes` read, except tensors that they compute themselves."""
    computed = {tensor for node in nodes for tensor in node.outputs}
    read = dict.fromkeys(tensor for node in nodes for tensor in list_inputs(graph, node))
    return [tensor for tensor in read if tensor not in computed]


def list_inputs(graph: ResolvedGraph, node: Node) -> list[Tensor]:
    """Returns the tensors that a node reads.

    A float layer may also use a Keras mask. Tensors from which the mask is computed are included.
    """
    tensors = _list_tensors(node)
    if node.op is None:
        sources = map(graph.tensors.get, find_mask_sources(node.call))
        tensors += [tensor for tensor in sources if tensor is not None]
    return list(dict.fromkeys(tensors))


def _list_tensors(node: Node) -> list[Tensor]:
    return [x for x in node.inputs if isinstance(x, Tensor)]


ASSIGNMENTS = "AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"


class _Converter(tf.lite.TFLiteConverter):
    """TFLite's converter, with errors that explain how to change a layer."""

    def _freeze_concrete_function(self) -> Any:
        (function,) = self._funcs
        if not all(isinstance(x, tf.__internal__.EagerTensor) for x in function.captured_inputs):
            raise ConverterError(
                "it reads a tensor that an earlier call stored in an attribute. Return the tensor, "
                "and pass it to the later call as an argument"
            )
        definition = function.graph.as_graph_def()
        nodes = [definition.node, *(inner.node_def for inner in definition.library.function)]
        if any(node.op in ASSIGNMENTS for node in itertools.chain(*nodes)):
            raise ConverterError(
                "it assigns to a variable, but a file stores variables as constants. Assign only "
                "in training, as in `if training:`"
            )
        if function.captured_inputs:
            return super()._freeze_concrete_function()
        return definition, function.inputs, function.outputs, function


def _convert(
    tensors: Mapping[Value, Tensor],
    nodes: Sequence[Node],
    inputs: Sequence[Tensor],
    ends: Sequence[Tensor],
) -> bytes:
    def serve(*args: tf.Tensor) -> list[tf.Tensor]:
        values = dict(zip(inputs, args, strict=True))
        _compute(tensors, nodes, values)
        return [_cast(values[end], end.dtype) for end in ends]

    signature = [
        tf.TensorSpec(tensor.shape, tensor.dtype, name=f"input_{index}")
        for index, tensor in enumerate(inputs)
    ]
    function = tf.function(serve, input_signature=signature, autograph=False)
    concrete = function.get_concrete_function()
    converter = _Converter.from_concrete_functions([concrete], tf.Module())
    # A SavedModel would take twice as long: it writes weights to disk and reads them twice.
    converter.experimental_lower_to_saved_model = False
    return converter.convert()


def _compute(
    tensors: Mapping[Value, Tensor], nodes: Sequence[Node], values: dict[Tensor, tf.Tensor]
) -> None:
    """Run the layers of `nodes` in float, and store their outputs in `values`."""
    masks = KerasMasks(lambda value: values.get(tensors.get(value)))  # type: ignore[arg-type]
    for node in nodes:
        layer = _unwrap(node.call.layer)
        with tf.name_scope(f"{SCOPE}/{node.name}/"), use_attribute_names(layer):
            inputs = [
                masks.attach(value, _cast(values[tensor], value.inference_dtype))
                for value, tensor in zip(node.call.inputs, _list_tensors(node), strict=True)
            ]
            results = compute_in_float(node, inputs, for_file=True)
        values.update(zip(node.outputs, results, strict=True))


def _cast(x: tf.Tensor, dtype: str) -> tf.Tensor:
    return tf.cast(x, dtype) if x.dtype != dtype else x


def _explain(error: Exception, graph: ResolvedGraph) -> str:
    """Return an error message with the names of the refused layers.

    The converter's own error names no layers, so each layer is converted separately.
    """
    causes: dict[str, str] = {}
    for node in graph.nodes:
        if node.op is None:
            try:
                _convert(graph.tensors, [node], _find_inputs(graph, [node]), node.outputs)
            except ConverterError as alone:
                causes.setdefault(_describe_layer(node), _find_reason(alone))
    if not causes:
        return f"TFLite's converter refuses the model: {_find_reason(error)}."
    listed = "; ".join(f"{name}: {reason}" for name, reason in causes.items())
    return (
        f"TFLite's converter refuses {pluralize(len(causes), 'layer')}: {listed}. Use layers that "
        f"TFLite supports. Or end the file before these layers: "
        f"keras_qat.quantize_model(model, outputs=[...]). keras_qat.plan(model) lists names."
    )


def explain_refusal(call: Call) -> str:
    """Returns the reason why TFLite's converter refuses a layer, or "" if it accepts the layer."""
    values = dict.fromkeys([*call.inputs, *flatten_values(call.outputs)])
    tensors = {
        value: Tensor(str(index), value.shape, value.inference_dtype, None)
        for index, value in enumerate(values)
    }
    inputs = tuple(tensors[value] for value in call.inputs)
    outputs = tuple(tensors[value] for value in flatten_values(call.outputs))
    node = Node("call", None, {}, call, inputs, outputs)
    try:
        _convert(tensors, [node], list(dict.fromkeys(inputs)), outputs)
    except ConverterError as error:
        return _find_reason(error)
    except ValueError as error:
        return get_first_line(error)
    return ""


def _unwrap(layer: keras.layers.Layer) -> keras.layers.Layer:
    while isinstance(layer, (QuantizeWeights, QuantizeWrapper)):
        layer = layer.layer
    return layer


def _describe_layer(node: Node) -> str:
    layer = _unwrap(node.call.layer)
    kind = f"tf.{name_in_tensorflow(layer)}" if is_operation(layer) else type(layer).__name__
    return f"'{node.call.origin.removeprefix(PREFIX)}' ({kind})"


def _find_reason(error: Exception) -> str:
    """Return the first meaningful error in the converter's text, without file paths."""
    text = str(error)
    missing = sorted(set(re.findall(r"'(tf\.\w+)' op is neither a custom op nor a flex op", text)))
    if missing:
        return f"TFLite has no operation for {', '.join(missing)}"
    errors = re.findall(r"error: (.*)", text)
    return errors[0] if errors else text.splitlines()[0]
