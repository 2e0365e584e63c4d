"""TFLite Micro with its reference kernels, which microcontrollers run by default.

Types and numbers of axes are those that the interpreter of the package `tflite-micro` runs in
random examples of each operator (tests/targets). Its sources say the same.
"""

from __future__ import annotations

from keras_qat.config.targets import forms
from keras_qat.config.targets.fault import Fault
from keras_qat.config.targets.target import Kernel, Target, operators
from keras_qat.tflite.reader import Site

INTEGERS = ("int8", "int16")
REAL = (*INTEGERS, "float32")
WEIGHTED = (*REAL, "int32", "int64")
"""Types with biases of 32 bits, or of 64 where activations have 16."""
INDEXED = (*REAL, "int32")
"""Types with sizes, axes or indices of 32 bits."""
NARROW = ("int8", "float32", "int32")


def _scale_of_int4(site: Site) -> str | None:
    weights = site.inputs[1]
    if weights is None or weights.type != "int4" or weights.scale:
        return None
    return "4-bit weights without one scale per tensor: export with target='tflm'"


def _has_numbers(site: Site) -> str | None:
    is_empty = any(0 in tensor.shape for tensor in site.outputs)
    return "no empty tensors" if is_empty else None


def _is_wide_table(site: Site) -> bool:
    return site.outputs[0].type == "int16" and site.constant(0) is not None


WIDE_TABLES = Fault("GATHER", _is_wide_table, "no kernel for int16", forms.bytewise)
"""Tables of 16 bits, as division and normalization have."""

TFLM = Target(
    name="tflm",
    title="TFLite Micro",
    kernels="tflm",
    batch_size=1,
    checks=(_has_numbers,),
    source="run: the interpreter of the package tflite-micro",
    faults=(WIDE_TABLES,),
    channel_bytes={"FULLY_CONNECTED": 8},
    operators=operators(
        ("CONV_2D DEPTHWISE_CONV_2D", Kernel((*WEIGHTED, "int4"))),
        ("FULLY_CONNECTED", Kernel((*WEIGHTED, "int4"), checks=(_scale_of_int4,))),
        ("TRANSPOSE_CONV UNIDIRECTIONAL_SEQUENCE_LSTM SVDF", Kernel(WEIGHTED)),
        ("ADD SUB MUL MEAN PAD PADV2 PACK UNPACK SPLIT SPLIT_V SQUEEZE", Kernel(INDEXED)),
        ("EXPAND_DIMS RESIZE_NEAREST_NEIGHBOR MAXIMUM MINIMUM SLICE", Kernel(INDEXED)),
        ("SHAPE REVERSE_V2 SQUARED_DIFFERENCE", Kernel(INDEXED)),
        ("CONCATENATION", Kernel((*INDEXED, "bool"), max_inputs=10)),
        ("TRANSPOSE", Kernel(INDEXED, max_axes=5)),
        ("AVERAGE_POOL_2D MAX_POOL_2D RELU LEAKY_RELU LOGISTIC TANH", Kernel(REAL)),
        ("BATCH_MATMUL DEQUANTIZE", Kernel(REAL)),
        ("SOFTMAX PRELU L2_NORMALIZATION", Kernel(REAL, max_axes=4)),
        ("QUANTIZE", Kernel((*REAL, "uint8", "int32"))),
        ("STRIDED_SLICE", Kernel((*INDEXED, "bool"), max_axes=4)),
        ("CAST", Kernel(INDEXED, reads=(*INDEXED, "bool"))),
        ("RESHAPE", Kernel((*INDEXED, "int64", "uint8", "bool"))),
        ("SELECT_V2 WHILE IF", Kernel((*INDEXED, "bool"))),
        ("GATHER REDUCE_MAX REDUCE_MIN RESIZE_BILINEAR MIRROR_PAD", Kernel(NARROW)),
        ("ARG_MAX ARG_MIN", Kernel(NARROW, reads=("int8", "float32"))),
        ("GREATER GREATER_EQUAL LESS LESS_EQUAL", Kernel((*NARROW, "int64", "bool"))),
        ("EQUAL NOT_EQUAL", Kernel((*NARROW, "int64", "bool"))),
        ("HARD_SWISH ELU DEPTH_TO_SPACE SPACE_TO_DEPTH", Kernel(("int8", "float32"))),
        ("EXP LOG SQRT RSQRT SIN COS ABS NEG SQUARE ROUND", Kernel(("float32",))),
        ("FLOOR CEIL DIV RELU6", Kernel(("float32",))),
        ("LOGICAL_AND LOGICAL_OR LOGICAL_NOT", Kernel(("bool",))),
    ),
)
"""RELU6 in int8 has no scales, so it counts as a float operator."""
