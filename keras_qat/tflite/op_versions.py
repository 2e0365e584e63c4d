"""Chooses versions of operators, and finds the oldest runtime that supports them.

Source: TensorFlow Lite's `op_version.cc` and `runtime_version.cc`. Only operators that this library
writes are listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tensorflow.lite.python import schema_py_generated as schema

from keras_qat.tflite.schema import OPERATORS, operator_code

_Type = schema.TensorType

_BY_TYPE = (
    ("ADD SOFTMAX MEAN MIRROR_PAD REDUCE_MAX REDUCE_MIN RELU6 RELU TANH LOGISTIC", (2, 3)),
    ("CONCATENATION MAX_POOL_2D AVERAGE_POOL_2D PACK PAD PADV2 BATCH_MATMUL", (2, 3)),
    ("DEQUANTIZE TOPK_V2", (2, 3)),
    ("MUL SPLIT SLICE MAXIMUM MINIMUM UNPACK GATHER RESIZE_BILINEAR", (2, 4)),
    ("RESIZE_NEAREST_NEIGHBOR SPACE_TO_BATCH_ND BATCH_TO_SPACE_ND", (2, 4)),
    ("QUANTIZE LEAKY_RELU", (1, 2)),
    ("L2_NORMALIZATION STRIDED_SLICE ARG_MAX ARG_MIN EXP LOG", (2, 2)),
    ("SUB TRANSPOSE", (2, 5)),
    ("TRANSPOSE_CONV REVERSE_V2 TILE SVDF", (3, 3)),
    ("CONV_2D", (3, 4)),
    ("DEPTHWISE_CONV_2D", (3, 5)),
    ("FULLY_CONNECTED", (4, 7)),
    ("BROADCAST_TO", (3, 3)),
    ("CAST", (3, 1)),
    # DEPTH_TO_SPACE has version 1 in int8, because reference kernels do not support version 2.
    ("GELU SPACE_TO_DEPTH SPLIT_V NOT_EQUAL", (2, 1)),
)
BY_TYPE = {name: versions for names, versions in _BY_TYPE for name in names.split()}
"""Maps operators to `(version for int8, version for int16)`. The default is version 1."""

OTHER_TYPES = {"BROADCAST_TO": 2}
"""Maps operators to the version for all types except int8 and int16. The default is 1."""

RUNTIMES: dict[str, dict[int, str]] = {
    "DEPTHWISE_CONV_2D": {5: "2.3.0"},
    "CONV_2D": {4: "2.3.0", 6: "2.9.0", 7: "2.13.0"},
    "FULLY_CONNECTED": {5: "2.0.0", 6: "2.1.0", 7: "2.3.0", 10: "2.14.0"},
    "SUB": {3: "2.3.0", 5: "2.4.0"},
    "RELU": {2: "2.1.0", 3: "2.5.0"},
    "SELECT_V2": {1: "2.2.0"},
    "MIRROR_PAD": {2: "2.3.0", 3: "2.12.0"},
    "MUL": {3: "1.15.0", 4: "2.3.0"},
    "BATCH_MATMUL": {2: "2.3.0", 3: "2.4.0"},
    "GATHER": {4: "2.4.0"},
    "TRANSPOSE": {4: "2.3.0", 5: "2.4.0", 6: "2.12.0"},
    "TRANSPOSE_CONV": {3: "2.3.0", 4: "2.13.0"},
    "RESIZE_BILINEAR": {3: "2.2.0", 4: "2.5.0"},
    "RESIZE_NEAREST_NEIGHBOR": {3: "2.3.0", 4: "2.4.0"},
    "LEAKY_RELU": {1: "1.13.1", 2: "2.3.0"},
    "HARD_SWISH": {1: "2.0.0"},
    "GELU": {1: "2.9.0"},
    "ELU": {1: "1.14.0"},
    "TILE": {2: "2.2.0", 3: "2.8.0"},
    "STRIDED_SLICE": {3: "2.1.0", 4: "2.2.0", 6: "2.6.0"},
    "SLICE": {4: "2.4.0", 5: "2.5.0"},
    "QUANTIZE": {2: "2.2.0"},
    "BROADCAST_TO": {2: "2.5.0", 3: "2.5.0"},
    "DEPTH_TO_SPACE": {1: "2.1.0", 2: "2.5.0"},
    "EXP": {2: "2.12.0"},
    "LOG": {2: "2.15.0"},
    "CAST": {3: "2.8.0"},
    "UNIDIRECTIONAL_SEQUENCE_LSTM": {1: "2.8.0"},
    "SVDF": {3: "2.2.0"},
    "SPLIT_V": {2: "2.3.0"},
    "TOPK_V2": {3: "2.13.0"},
    **{key: {3: "2.4.0"} for key in ("ADD", "MEAN")},
    **{key: {3: "2.4.0", 4: "2.6.0"} for key in ("PAD", "PADV2")},
    **{key: {3: "2.5.0"} for key in ("REDUCE_MAX", "REDUCE_MIN", "RELU6", "REVERSE_V2")},
    **{
        key: {3: "2.3.0", 4: "2.3.0"}
        for key in (
            *("MAX_POOL_2D", "AVERAGE_POOL_2D", "CONCATENATION", "SOFTMAX", "TANH", "LOGISTIC"),
            *("PACK", "SPLIT", "UNPACK", "MAXIMUM", "MINIMUM"),
        )
    },
}
"""Maps operators and versions to the first TensorFlow that supports them. All others require
1.14.0, the first TensorFlow with int8. TensorFlow's own table has no entry for int8 LSTMs. Theirs
is the version of the CAST that usually precedes them."""


def choose_version(code: int, operator: schema.OperatorT, tensors: list[schema.TensorT]) -> int:
    """Returns the lowest version of an operator that supports its types and options."""
    name = OPERATORS[code]
    inputs = [tensors[index] for index in operator.inputs if index >= 0]
    output, data = tensors[operator.outputs[0]], _get_data(name, inputs)
    casts_to_int8 = name == "CAST" and output.type == _Type.INT8
    deciding = output if name == "QUANTIZE" or casts_to_int8 else data
    int8, int16 = BY_TYPE.get(name, (1, 1))
    versions = {_Type.INT8: int8, _Type.INT16: int16}
    version = versions.get(deciding.type, OTHER_TYPES.get(name, 1))
    return max([version, *_find_minimum_versions(name, operator.builtinOptions, inputs, output)])


def _get_data(name: str, inputs: list[schema.TensorT]) -> schema.TensorT:
    """Return the input with activations. Other inputs are, for example, weights or an axis."""
    return inputs[{"SPLIT": 1, "TRANSPOSE_CONV": 2}.get(name, 0)]


def _find_minimum_versions(
    name: str, options: Any, inputs: list[schema.TensorT], output: schema.TensorT
) -> Iterator[int]:
    """Yield versions that an operator needs for its options, shapes or int4 weights."""
    data = _get_data(name, inputs)
    rank = len(data.shape)
    if name == "CONV_2D":  # Version 8 adds `quantizedBiasType`, which is always int64.
        if inputs[1].shape[3] != data.shape[3]:
            yield 6
        elif inputs[1].type == _Type.INT4:
            yield 7
    elif name == "DEPTHWISE_CONV_2D" and inputs[1].type == _Type.INT4:
        yield 7
    elif name == "FULLY_CONNECTED":
        if options.keepNumDims:
            yield 5
        if len(inputs) == 2:
            yield 6
        if inputs[1].type == _Type.INT4:
            yield 10
    elif name == "TRANSPOSE_CONV" and getattr(options, "fusedActivationFunction", False):
        yield 4
    elif name == "MUL" and data.type == _Type.INT8:
        scales = [float(tensor.quantization.scale[0]) for tensor in [*inputs, output]]
        if scales[0] * scales[1] / scales[2] >= 1:
            yield 3
    elif name in ("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR"):
        if options.halfPixelCenters or (name == "RESIZE_NEAREST_NEIGHBOR" and options.alignCorners):
            yield 3
    elif name == "TRANSPOSE" and rank > 4:
        yield 6 if rank > 5 else 4
    elif name in ("PAD", "PADV2") and rank > 4:
        yield 4
    elif name == "SLICE" and rank > 4:
        yield 5
    elif name == "STRIDED_SLICE":
        if options.ellipsisMask or options.newAxisMask:
            yield 6
        elif rank > 4:
            yield 4
        elif data.type == _Type.BOOL:
            yield 3
    elif name in ("SUB", "MAXIMUM", "MINIMUM"):
        ranks = [len(tensor.shape) for tensor in inputs]
        if len({tuple(tensor.shape) for tensor in inputs}) > 1 and max(ranks) > 4:
            yield 3


def find_min_runtime_version(codes: list[schema.OperatorCodeT]) -> str:
    """Returns the oldest version of TensorFlow Lite that supports all operators of a file."""
    runtimes = ["1.14.0"]
    for code in codes:
        versions = RUNTIMES.get(OPERATORS.get(operator_code(code), ""), {})
        runtimes += [first for version, first in versions.items() if version <= code.version]
    return max(runtimes, key=lambda runtime: [int(part) for part in runtime.split(".")])
