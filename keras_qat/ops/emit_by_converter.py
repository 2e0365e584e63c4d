"""Layers that only move values, emitted by TFLite's converter."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.kernel_families import REFERENCE
from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.ops.emission import Emission
from keras_qat.ops.node import Node, Tensor
from keras_qat.ops.op import Arguments
from keras_qat.tflite.op_versions import choose_version
from keras_qat.tflite.schema import OPERATORS, SCOPE, TYPES, new, operator_code, unpack
from keras_qat.tflite.splice import splice_model

MOVES = {
    *("BATCH_TO_SPACE_ND", "BROADCAST_TO", "CONCATENATION", "DEPTH_TO_SPACE", "EXPAND_DIMS"),
    *("GATHER", "GATHER_ND", "IF", "MAXIMUM", "MAX_POOL_2D", "MINIMUM", "MIRROR_PAD", "PACK"),
    *("PAD", "PADV2", "RANK", "REDUCE_MAX", "REDUCE_MIN", "RESHAPE", "RESIZE_NEAREST_NEIGHBOR"),
    *("REVERSE_V2", "SELECT", "SELECT_V2", "SHAPE", "SLICE", "SPACE_TO_BATCH_ND"),
    *("SPACE_TO_DEPTH", "SPLIT", "SPLIT_V", "SQUEEZE", "STRIDED_SLICE", "TILE", "TRANSPOSE"),
    *("UNPACK", "WHILE"),
}
"""Operators that only move, copy or select values, or count them."""


def emit_by_converter(e: Emission) -> None:
    """Adds the operators of TFLite's converter for a call's layer, with quantized values.

    Raises:
        ValueError: if the layer does more than move its values.
    """
    node, params = e.node, e.node.output.params
    model = unpack(_convert(node))
    if params is not None:
        _quantize(model, params, node)
    (signature,), main = model.signatureDefs, model.subgraphs[0]
    by_name = {f"x{number}": index for number, index in enumerate(e.inputs)}
    by_name |= {f"y{number}": index for number, index in enumerate(e.outputs)}
    named = [*signature.inputs, *signature.outputs]
    ends = {entry.tensorIndex: by_name[entry.name.decode()] for entry in named}
    inputs, outputs = ([ends[int(index)] for index in end] for end in (main.inputs, main.outputs))
    splice_model(e.builder, model, inputs, outputs, params, prefix=f"{SCOPE}/{node.name}/")


def _convert(node: Node) -> bytes:
    """Returns a TFLite file of the layer alone, in float."""
    specs = [
        tf.TensorSpec(x.shape, x.dtype, f"x{number}")
        for number, x in enumerate(node.inputs)
        if isinstance(x, Tensor)
    ]

    def serve(*tensors: Any) -> dict[str, Any]:
        result = Arguments(REFERENCE, {}, [], [], None, node.call).run_layer(list(tensors))  # type: ignore[arg-type]
        return {f"y{number}": y for number, y in enumerate(tf.nest.flatten(result))}

    function = tf.function(serve, input_signature=specs, autograph=False)
    module = tf.Module()
    module.weights = list(node.call.layer.weights)
    concrete = function.get_concrete_function()
    converter = tf.lite.TFLiteConverter.from_concrete_functions([concrete], module)
    contents: bytes = converter.convert()
    return contents


def _quantize(model: Any, params: QuantParams, node: Node) -> None:
    """Replaces all float values of a file by quantized values."""
    dtype = TYPES[params.dtype.name]
    for graph in model.subgraphs:
        floats = {
            index for index, tensor in enumerate(graph.tensors) if tensor.type == TYPES["float32"]
        }
        for operator in graph.operators:
            name = OPERATORS[operator_code(model.operatorCodes[operator.opcodeIndex])]
            read = floats.intersection(map(int, [*operator.inputs, *operator.outputs]))
            if read and name not in MOVES:
                raise _make_error(node, f"TFLite's converter makes {name} of it")
        for index in floats:
            if not _quantize_constant(model, graph.tensors[index], params):
                raise _make_error(node, "it has constants that are not 0")
            graph.tensors[index].type = dtype
        for operator in graph.operators:
            number = operator_code(model.operatorCodes[operator.opcodeIndex])
            code = {"builtinCode": number, "deprecatedBuiltinCode": min(number, 127)}
            version = choose_version(number, operator, graph.tensors)
            model.operatorCodes.append(new("OperatorCodeT", **code, version=version))
            operator.opcodeIndex = len(model.operatorCodes) - 1


def _make_error(node: Node, why: str) -> ValueError:
    kind = type(node.call.layer).__name__
    return ValueError(f"{node.name}: {kind} does more than to move its values: {why}.")


def _quantize_constant(model: Any, tensor: Any, params: QuantParams) -> bool:
    """Quantizes a constant, and returns whether it is zero, so that any range can hold it."""
    data = model.buffers[tensor.buffer].data
    if data is None:
        return True
    values = np.asarray(data, np.uint8).view(np.float32)
    zeros = np.full(values.shape, params.zero_point, params.dtype)
    model.buffers.append(new("BufferT", data=zeros.view(np.uint8).reshape(-1)))
    tensor.buffer = len(model.buffers) - 1
    return not values.any()
