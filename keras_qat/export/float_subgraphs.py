"""Islands of float nodes inside a file, the only nodes that TFLite's converter writes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.lite.python.convert_phase import ConverterError

from keras_qat.graph.calls import Value
from keras_qat.graph.keras_masks import KerasMasks
from keras_qat.graph.operations import is_operation, name_in_tensorflow
from keras_qat.integer_graph.float_nodes import (
    compute_in_float,
    find_mask_sources,
    get_weight_scales,
)
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.keras2.layer_names import use_attribute_names
from keras_qat.ops.node import Node, Tensor
from keras_qat.tflite.builder import Builder
from keras_qat.tflite.schema import SCOPE, find_scope, unpack
from keras_qat.tflite.splice import splice_model
from keras_qat.tflite.weight_packing import pack_weights
from keras_qat.training.layers import QuantizeWeights, QuantizeWrapper
from keras_qat.training.quantizers import PREFIX


def write_island(
    builder: Builder,
    graph: ResolvedGraph,
    nodes: Sequence[Node],
    ends: Sequence[Tensor],
    indices: dict[Tensor, int],
    in_float: dict[Tensor, int],
) -> None:
    """Writes nodes in float, connected or not, with one run of the converter.

    Args:
        builder: the file.
        graph: the graph of the nodes.
        nodes: the nodes, in order.
        ends: their outputs that other nodes read, or the caller.
        indices: tensor -> its index in the file. It has the inputs; outputs are added, with the
            index of another tensor where the converter finds them equal.
        in_float: quantized tensor -> index of its real values, shared by all islands.

    Raises:
        ValueError: if the converter refuses a layer; the message names all such layers of the
            graph.
    """
    entering = _entering(graph, nodes)
    try:
        model = unpack(_converted(graph, nodes, entering, ends))
    except ConverterError as error:
        raise ValueError(_explained(error, graph)) from error
    _rename(model, nodes)
    pack_weights(model, [scale for node in nodes for scale in get_weight_scales(node)])
    main = model.subgraphs[0]
    starts, results = (list(map(int, end)) for end in (main.inputs, main.outputs))
    read = {int(index) for operator in main.operators for index in operator.inputs}
    index_here: dict[int, int] = {}
    """Index in the converter's file -> index in this one."""
    for start, tensor in zip(starts, entering, strict=True):
        if start in read or start in results:
            index_here[start] = _real_index(builder, indices, in_float, tensor)
    for result, tensor in zip(results, ends, strict=True):
        if result not in index_here:
            name = f"{SCOPE}/{tensor.name}"
            index_here[result] = builder.tensor(name, tensor.shape, tensor.dtype)
        indices[tensor] = index_here[result]
    main.inputs = [index for index in starts if index in index_here]
    main.outputs = [index for index in dict.fromkeys(results) if index not in starts]
    inputs, outputs = ([index_here[index] for index in end] for end in (main.inputs, main.outputs))
    splice_model(builder, model, inputs, outputs)


def _rename(file: Any, nodes: Sequence[Node]) -> None:
    """Names constants, and all tensors in loops, by nodes and positions.

    Else they hold counters of the process, and say how an argument was given, which is another way
    in a loaded model: the same model gives the same file.
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


def _real_index(
    builder: Builder, indices: dict[Tensor, int], in_float: dict[Tensor, int], tensor: Tensor
) -> int:
    """Returns the index of a tensor's real values, adding one DEQUANTIZE for all islands."""
    if tensor.params is None:
        return indices[tensor]
    if tensor not in in_float:
        name = f"{SCOPE}/{tensor.name}/dequantized"
        in_float[tensor] = builder.tensor(name, tensor.shape, "float32")
        ends = [indices[tensor]], [in_float[tensor]]
        builder.operator("DEQUANTIZE", *ends)
    return in_float[tensor]


def _entering(graph: ResolvedGraph, nodes: Sequence[Node]) -> list[Tensor]:
    """Returns the tensors that nodes read from other nodes, also for their masks."""
    computed = {tensor for node in nodes for tensor in node.outputs}
    read = dict.fromkeys(tensor for node in nodes for tensor in reads(graph, node))
    return [tensor for tensor in read if tensor not in computed]


def reads(graph: ResolvedGraph, node: Node) -> list[Tensor]:
    """Returns the tensors that a node reads; in float also those that its masks need."""
    tensors = _tensors(node)
    if node.op is None:
        needed = map(graph.tensors.get, find_mask_sources(node.call))
        tensors += [tensor for tensor in needed if tensor is not None]
    return list(dict.fromkeys(tensors))


def _tensors(node: Node) -> list[Tensor]:
    return [x for x in node.inputs if isinstance(x, Tensor)]


ASSIGNMENTS = "AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"


class _Converter(tf.lite.TFLiteConverter):
    """TFLite's converter, which freezes variables even where there are none."""

    def _freeze_concrete_function(self) -> Any:
        (function,) = self._funcs
        if not all(isinstance(x, tf.__internal__.EagerTensor) for x in function.captured_inputs):
            raise ConverterError(
                "it reads a tensor that an earlier call kept in an attribute: return it there, and "
                "give it to the later call as an argument"
            )
        definition = function.graph.as_graph_def()
        nodes = [definition.node, *(inner.node_def for inner in definition.library.function)]
        if any(node.op in ASSIGNMENTS for node in itertools.chain(*nodes)):
            raise ConverterError(
                "it assigns to a variable, and what a file holds is constant: do so in training "
                "only, as in `if training:`"
            )
        if function.captured_inputs:
            return super()._freeze_concrete_function()
        return definition, function.inputs, function.outputs, function


def _converted(
    graph: ResolvedGraph, nodes: Sequence[Node], entering: Sequence[Tensor], ends: Sequence[Tensor]
) -> bytes:
    """Converts nodes to a TFLite file of their own, whose inputs and outputs are real numbers."""

    def serve(*inputs: Any) -> list[Any]:
        numbers = dict(zip(entering, inputs, strict=True))
        _trace(graph, nodes, numbers)
        return [_of_type(numbers[end], end.dtype) for end in ends]

    signature = [
        tf.TensorSpec(tensor.shape, tensor.dtype, name=f"input_{index}")
        for index, tensor in enumerate(entering)
    ]
    function = tf.function(serve, input_signature=signature, autograph=False)
    concrete = function.get_concrete_function()
    converter = _Converter.from_concrete_functions([concrete], tf.Module())
    # A SavedModel would write weights to the disk and read them twice: half of the time.
    converter.experimental_lower_to_saved_model = False
    return converter.convert()


def _trace(graph: ResolvedGraph, nodes: Sequence[Node], numbers: dict[Tensor, Any]) -> None:
    """Computes nodes, with operations named after them, and adds their outputs to `numbers`."""

    def number_of(value: Value) -> Any:
        tensor = graph.tensors.get(value)
        return None if tensor is None else numbers.get(tensor)

    masks = KerasMasks(number_of)
    for node in nodes:
        layer = _unwrapped(node.call.layer)
        with tf.name_scope(f"{SCOPE}/{node.name}/"), use_attribute_names(layer):
            values = [
                masks.attach(value, _of_type(numbers[tensor], value.inference_dtype))
                for value, tensor in zip(node.call.inputs, _tensors(node), strict=True)
            ]
            results = compute_in_float(node, values, for_file=True)
        numbers.update(zip(node.outputs, results, strict=True))


def _of_type(x: Any, dtype: str) -> Any:
    return tf.cast(x, dtype) if x.dtype != dtype else x


def _explained(error: Exception, graph: ResolvedGraph) -> str:
    """Explains a refusal of the converter: which layers it refuses, and why.

    The converter names no layers, so each layer is converted by itself.
    """
    causes: dict[str, str] = {}
    for node in graph.nodes:
        if node.op is None:
            try:
                _converted(graph, [node], _entering(graph, [node]), node.outputs)
            except ConverterError as alone:
                causes.setdefault(_layer_name(node), _reason(alone))
    if not causes:
        return f"TFLite's converter refuses the model: {_reason(error)}."
    listed = "; ".join(f"{name}: {reason}" for name, reason in causes.items())
    count = f"{len(causes)} layer{'s' * (len(causes) > 1)}"
    return (
        f"TFLite's converter refuses {count}: {listed}. Use layers that TFLite supports, or end "
        f"the file before, as before a loss: keras_qat.quantize_model(model, outputs=[...]) with "
        f"names that keras_qat.plan(model) lists."
    )


def _unwrapped(layer: Any) -> Any:
    while isinstance(layer, (QuantizeWeights, QuantizeWrapper)):
        layer = layer.layer
    return layer


def _layer_name(node: Node) -> str:
    layer = _unwrapped(node.call.layer)
    kind = f"tf.{name_in_tensorflow(layer)}" if is_operation(layer) else type(layer).__name__
    return f"'{node.call.origin.removeprefix(PREFIX)}' ({kind})"


def _reason(error: Exception) -> str:
    """Returns the first meaningful error in the converter's text, without the path in front."""
    text = str(error)
    missing = sorted(set(re.findall(r"'(tf\.\w+)' op is neither a custom op nor a flex op", text)))
    if missing:
        return f"TFLite has no operation for {', '.join(missing)}"
    errors = re.findall(r"error: (.*)", text)
    return errors[0] if errors else text.splitlines()[0]
