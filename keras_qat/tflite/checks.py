"""Checks TFLite files before an interpreter reads them, because many faults crash the process."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensorflow.lite.python import schema_py_generated as schema

from keras_qat.tflite.schema import OPERATORS, TYPE_NAMES, describe_damage, operator_code, unpack

LARGEST = 2**31 - 1
"""Maximum number of bytes of a tensor."""

POSITIVE = ("stride", "dilation", "filterWidth", "filterHeight", "beta")
"""Options that begin with these words must be positive. Kernels do not check them."""

ELEMENTWISE = (
    "ADD SUB MUL DIV MAXIMUM MINIMUM POW FLOOR_DIV FLOOR_MOD SQUARED_DIFFERENCE PRELU EQUAL "
    "NOT_EQUAL GREATER GREATER_EQUAL LESS LESS_EQUAL LOGICAL_AND LOGICAL_OR"
)
"""Operators with two inputs that must have broadcastable shapes."""

_LEAST_INPUTS = {
    1: "AVERAGE_POOL_2D MAX_POOL_2D RESHAPE SOFTMAX LOG_SOFTMAX LOGISTIC TANH RELU RELU6 ELU GELU "
    "HARD_SWISH LEAKY_RELU EXP LOG SQRT RSQRT ABS NEG SQUARE SIN COS FLOOR CEIL ROUND SIGN CAST "
    "QUANTIZE DEQUANTIZE SPACE_TO_DEPTH DEPTH_TO_SPACE UNPACK SQUEEZE SHAPE LOGICAL_NOT "
    "L2_NORMALIZATION CONCATENATION PACK ADD_N",
    2: f"{ELEMENTWISE} BATCH_MATMUL CONV_2D FULLY_CONNECTED MEAN SUM REDUCE_MAX REDUCE_MIN "
    "REDUCE_PROD REDUCE_ANY REDUCE_ALL PAD MIRROR_PAD GATHER GATHER_ND TILE TRANSPOSE SPLIT FILL "
    "REVERSE_V2 EXPAND_DIMS ARG_MAX ARG_MIN TOPK_V2 CUMSUM RESIZE_BILINEAR BROADCAST_TO "
    "RESIZE_NEAREST_NEIGHBOR EMBEDDING_LOOKUP",
    3: "DEPTHWISE_CONV_2D TRANSPOSE_CONV SELECT SELECT_V2 SLICE PADV2 SPLIT_V RANGE SCATTER_ND "
    "SPACE_TO_BATCH_ND BATCH_TO_SPACE_ND",
    4: "STRIDED_SLICE ONE_HOT",
    5: "SVDF",
    20: "UNIDIRECTIONAL_SEQUENCE_LSTM",
}
LEAST_INPUTS = {kind: count for count, kinds in _LEAST_INPUTS.items() for kind in kinds.split()}
"""Maps operators to minimum numbers of inputs. Some kernels do not check the number."""

SIZES = {"SPLIT": 0, "STRIDED_SLICE": 1}
"""Maps operators to the position of the input `axis` or `begin`, which must be int32 or int64."""

UNREADABLE = (
    *(struct.error, LookupError, TypeError, AttributeError),
    *(ValueError, OverflowError, MemoryError, RecursionError),
)
"""Exceptions that the flatbuffers library or this module raises for a damaged file."""


class Damaged(ValueError):
    """Raised for a file that no interpreter should run."""


def read_file(contents: bytes) -> schema.ModelT:
    """Unpacks a file's contents into a `ModelT` and checks it.

    Raises:
        ValueError: if the file is damaged.
    """
    try:
        model = unpack(contents)
        _check(bool(model.subgraphs), "it has no graph")
        for graph in model.subgraphs:
            _check_graph(model, graph)
        _check(len(model.subgraphs[0].outputs) > 0, "it has no outputs")
        for signature in model.signatureDefs or ():
            graph = _get(model.subgraphs, signature.subgraphIndex, "graph")
            _check(bool(signature.outputs), "its signature has no outputs")
            for entries, ends in (
                (signature.inputs, graph.inputs),
                (signature.outputs, graph.outputs),
            ):
                for entry in entries:
                    known = entry.tensorIndex in ends and entry.name is not None
                    _check(known, "its signature names no input or output")
    except Damaged as error:
        raise ValueError(describe_damage(error)) from None
    except UNREADABLE as error:
        raise ValueError(describe_damage(error)) from error
    return model


def _check(condition: bool, fault: str, *shown: object) -> None:
    if not condition:  # Formatting arrays is slow.
        raise Damaged(fault.format(*shown) if shown else fault)


def _get(items: Sequence[Any], index: int, noun: str) -> Any:
    _check(0 <= index < len(items), f"there is no {noun} {index}")
    return items[index]


def _check_graph(model: schema.ModelT, graph: schema.SubGraphT) -> None:
    for index, tensor in enumerate(graph.tensors):
        name = (tensor.name or b"").decode() or str(index)
        _check_tensor(model, tensor, f"tensor '{name}'")
    known = set(map(int, graph.inputs))
    for index in (*graph.inputs, *graph.outputs):
        _get(graph.tensors, int(index), "tensor")
    for operator in graph.operators or ():
        code = _get(model.operatorCodes, operator.opcodeIndex, "operator code")
        is_custom = code.customCode is not None  # Custom operators may read scratch memory.
        inputs = [] if operator.inputs is None else [int(index) for index in operator.inputs]
        outputs = [int(index) for index in operator.outputs]
        inner = [] if operator.intermediates is None else map(int, operator.intermediates)
        for index in (*inputs, *outputs, *inner):
            _check(-1 <= index < len(graph.tensors), f"there is no tensor {index}")
        for index in inputs:
            is_given = index < 0 or is_custom or has_value(model, graph.tensors[index])
            is_known = index in known or is_given
            _check(is_known, f"tensor {index} is read before it is computed")
        for index in outputs:
            is_free = index >= 0 and index not in known
            _check(
                is_free and not _get_data(model, graph.tensors[index]).size,
                "it computes a constant",
            )
        known.update(outputs)
        _check_options(model, operator)
        _check_kind(graph, operator, OPERATORS.get(operator_code(code), ""))
    for index in map(int, graph.outputs):
        is_known = index in known or has_value(model, graph.tensors[index])
        _check(is_known, f"its output, tensor {index}, is not computed")


def _check_kind(graph: schema.SubGraphT, operator: schema.OperatorT, kind: str) -> None:
    """Check the number, shapes and types of an operator's inputs, and the number of outputs."""
    if kind not in LEAST_INPUTS:
        return
    count = 0 if operator.inputs is None else len(operator.inputs)
    _check(count >= LEAST_INPUTS[kind], f"{kind} has {count} inputs")
    for index in operator.outputs:
        _check(graph.tensors[index].type in TYPE_NAMES, f"{kind} computes no values")
    if kind in ("SPLIT", "UNPACK"):
        expected = getattr(operator.builtinOptions, "numSplits" if kind == "SPLIT" else "num", None)
        _check(expected == len(operator.outputs), f"{kind} has {len(operator.outputs)} outputs")
    if kind in ELEMENTWISE.split():
        shapes = [_get_sizes(graph.tensors[index].shape) for index in operator.inputs[:2]]
        fits = all(
            1 in pair or len(set(pair)) == 1
            for pair in zip(*(x[::-1] for x in shapes), strict=False)
        )
        _check(fits, "{} reads the shapes {}", kind, shapes)
    if kind in SIZES:
        tensor = graph.tensors[operator.inputs[SIZES[kind]]]
        is_integer = TYPE_NAMES.get(tensor.type) in ("int32", "int64")
        _check(is_integer, f"{kind} reads no integers")


def _check_options(model: schema.ModelT, operator: schema.OperatorT) -> None:
    for options in (operator.builtinOptions, getattr(operator, "builtinOptions2", None)):
        for name, value in vars(options).items() if options is not None else ():
            if name.startswith(POSITIVE) and isinstance(value, (int, float)):
                _check(value > 0, f"an operator has {name} {value}")
            if name.lower().endswith("subgraphindex"):
                _get(model.subgraphs, value, "graph")


def _check_tensor(model: schema.ModelT, tensor: schema.TensorT, name: str) -> None:
    shape = _get_sizes(tensor.shape)
    dtype = TYPE_NAMES.get(tensor.type, "")
    _check(min(shape, default=0) >= 0, f"{name} has the shape {shape}")
    if tensor.shapeSignature is not None and len(tensor.shapeSignature):
        _check(len(tensor.shapeSignature) == len(shape), f"{name} has two ranks")
    item = np.dtype(dtype if dtype not in ("", "int4") else "int8").itemsize
    count = int(np.prod(shape, dtype=object))
    _check(count * item <= LARGEST, f"{name} has the shape {shape}")
    data = _get_data(model, tensor)
    if data.size and dtype and tensor.sparsity is None:
        size = (count + 1) // 2 if dtype == "int4" else count * item
        _check(data.size == size, f"{name} has {data.size} bytes instead of {size}")
    quantization = tensor.quantization
    if quantization is not None and quantization.scale is not None:
        _check_quantization(quantization, shape, dtype, name)
        is_computed = not data.size and len(quantization.scale)
        _check(not is_computed or quantization.scale[0] > 0, f"the scale of {name} is 0")


def _check_quantization(
    quantization: schema.QuantizationParametersT, shape: tuple[int, ...], dtype: str, name: str
) -> None:
    scales = np.asarray(quantization.scale, np.float64)
    points = np.asarray([] if quantization.zeroPoint is None else quantization.zeroPoint, np.int64)
    _check(bool(np.all(np.isfinite(scales) & (scales >= 0))), "a scale of {} is {}", name, scales)
    is_small = dtype in ("int4", "int8", "uint8", "int16")
    limits = np.iinfo("int8" if dtype == "int4" else dtype if is_small else "int32")
    inside = np.all((points >= limits.min) & (points <= limits.max))
    _check(bool(inside), "a zero point of {} is {}", name, points)
    if scales.size:
        _check(points.size in (1, scales.size), f"{name} has {points.size} zero points")
    if scales.size > 1:
        axis = quantization.quantizedDimension
        channels = shape[axis] if 0 <= axis < len(shape) else None
        _check(scales.size == channels, f"{name} has {scales.size} scales")


def _get_sizes(shape: Iterable[int] | None) -> tuple[int, ...]:
    return () if shape is None else tuple(int(size) for size in shape)


def _get_data(model: schema.ModelT, tensor: schema.TensorT) -> NDArray[np.uint8]:
    data = _get(model.buffers, tensor.buffer, "buffer").data
    return np.asarray([] if data is None else data, np.uint8)


def has_value(model: schema.ModelT, tensor: schema.TensorT) -> bool:
    """Returns True if a tensor has values at the start of a run, like constants and variables."""
    is_empty = 0 in _get_sizes(tensor.shape)
    return tensor.isVariable or is_empty or _get_data(model, tensor).size > 0
