"""Targets for TFLite Micro: its reference kernels, ESP-NN's kernels, and Google's Coral NPU.

tests/targets checks the types and numbers of axes in this module. It runs random examples of each
operator in the interpreter of `tflite-micro`.
"""

from __future__ import annotations

import dataclasses

from keras_qat.config.targets.target import Fault, Kernel, Target, operators
from keras_qat.tflite.reader import Site

INTEGERS = ("int8", "int16")
VALUES = (*INTEGERS, "float32")
WEIGHTED = (*VALUES, "int32", "int64")
"""Types of activations, weights and biases. Biases are int64 if activations are int16."""
INDEXED = (*VALUES, "int32")
"""Types of activations, and int32 for sizes, axes and indices."""
NARROW = ("int8", "float32", "int32")


def _check_int4_scale(site: Site) -> str | None:
    weights = site.inputs[1]
    if weights is None or weights.type != "int4" or weights.scale:
        return None
    return "4-bit weights without one scale per tensor: export with target='tflm'"


def _check_slice(site: Site) -> str | None:
    is_constant = all(site.constant(index) is not None for index in (1, 2, 3))
    return None if is_constant else "begin, end and strides must be constants"


def _check_sizes(site: Site) -> str | None:
    is_empty = any(0 in tensor.shape for tensor in site.outputs)
    return "no empty tensors" if is_empty else None


def _is_wide_table(site: Site) -> bool:
    return site.outputs[0].type == "int16" and site.constant(0) is not None


WIDE_TABLES = Fault("GATHER", _is_wide_table, "no kernel for int16", "split_bytes")
"""16-bit divisions read lookup tables with an int16 GATHER. TFLite Micro has no such kernel."""

MOST_INPUTS = 10

LONG_CONCATENATIONS = Fault(
    "CONCATENATION",
    lambda site: len(site.inputs) > MOST_INPUTS,
    f"at most {MOST_INPUTS} inputs",
    "split_concatenation",
)

TFLM = Target(
    name="tflm",
    title="TFLite Micro",
    kernels="tflm",
    batch_size=1,
    checks=(_check_sizes,),
    source="run: the interpreter of the package tflite-micro",
    faults=(WIDE_TABLES, LONG_CONCATENATIONS),
    channel_bytes={"FULLY_CONNECTED": 8},
    operators=operators(
        ("CONV_2D DEPTHWISE_CONV_2D", Kernel((*WEIGHTED, "int4"))),
        ("FULLY_CONNECTED", Kernel((*WEIGHTED, "int4"), checks=(_check_int4_scale,))),
        ("TRANSPOSE_CONV UNIDIRECTIONAL_SEQUENCE_LSTM SVDF", Kernel(WEIGHTED)),
        ("ADD SUB MUL MEAN PAD PADV2 PACK UNPACK SPLIT SPLIT_V SQUEEZE", Kernel(INDEXED)),
        ("EXPAND_DIMS RESIZE_NEAREST_NEIGHBOR MAXIMUM MINIMUM SLICE", Kernel(INDEXED)),
        ("SHAPE REVERSE_V2 SQUARED_DIFFERENCE", Kernel(INDEXED)),
        ("CONCATENATION", Kernel((*INDEXED, "bool"), max_inputs=MOST_INPUTS)),
        ("TRANSPOSE", Kernel(INDEXED, max_axes=5)),
        ("AVERAGE_POOL_2D MAX_POOL_2D RELU LEAKY_RELU LOGISTIC TANH", Kernel(VALUES)),
        ("BATCH_MATMUL DEQUANTIZE", Kernel(VALUES)),
        ("SOFTMAX PRELU L2_NORMALIZATION", Kernel(VALUES, max_axes=4)),
        ("QUANTIZE", Kernel((*VALUES, "uint8", "int32"))),
        ("STRIDED_SLICE", Kernel((*INDEXED, "bool"), max_axes=4, checks=(_check_slice,))),
        ("CAST", Kernel(INDEXED, reads=(*INDEXED, "bool"))),
        ("RESHAPE", Kernel((*INDEXED, "int64", "uint8", "bool"))),
        ("SELECT_V2 WHILE IF", Kernel((*INDEXED, "bool"))),
        ("GATHER REDUCE_MAX REDUCE_MIN RESIZE_BILINEAR MIRROR_PAD", Kernel(NARROW)),
        ("ARG_MAX ARG_MIN", Kernel(NARROW, reads=("int8", "float32"))),
        ("GREATER GREATER_EQUAL LESS LESS_EQUAL", Kernel((*NARROW, "int64", "bool"))),
        ("EQUAL NOT_EQUAL", Kernel((*NARROW, "int64", "bool"))),
        ("HARD_SWISH ELU DEPTH_TO_SPACE SPACE_TO_DEPTH", Kernel(("int8", "float32"))),
        ("EXP LOG SQRT RSQRT SIN COS ABS NEG SQUARE ROUND", Kernel(("float32",))),
        # The int8 kernel of RELU6 ignores scales.
        ("FLOOR CEIL DIV RELU6", Kernel(("float32",))),
        ("LOGICAL_AND LOGICAL_OR LOGICAL_NOT", Kernel(("bool",))),
    ),
)

CORAL_NPU: Target = dataclasses.replace(
    TFLM,
    name="coral_npu",
    title="TFLite Micro on the Coral NPU",
    source="read: its sources build TFLite Micro with custom convolutions, dense layers, pooling "
    "and sigmoid, and their tests compare the values with TFLite Micro's",
)

ESP_NN: Target = dataclasses.replace(
    TFLM,
    name="esp_nn",
    title="TFLite Micro with ESP-NN",
    source="read: ESP-NN's sources; it rounds like TFLite Micro unless it is built with SKIP_NUDGE",
)
