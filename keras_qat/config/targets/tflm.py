"""TFLite Micro, with its reference kernels: what microcontrollers run where no others are built in.

Which types and how many axes its kernels take is what the interpreter of the package `tflite-micro`
was seen to run, for each operator's random examples (tests/targets); its sources say the same.
"""

from __future__ import annotations

import dataclasses

from keras_qat.config.targets.target import Kernel, Target
from keras_qat.tflite.site import Site

__all__ = ["CMSIS_NN", "TFLM"]

INTEGERS = ("int8", "int16")
REAL = (*INTEGERS, "float32")
WEIGHTED = (*REAL, "int32", "int64")
"""With biases of 32 bits, or of 64 where activations have 16."""
PLACES = (*REAL, "int32")
"""With sizes, axes or places of 32 bits."""
NARROW = ("int8", "float32", "int32")


def _scale_of_int4(site: Site) -> str | None:
    weights = site.inputs[1]
    if weights is None or weights.type != "int4" or weights.scale:
        return None
    return "takes weights of 4 bits in, but with one scale: export with target='tflm'"


def _has_numbers(site: Site) -> str | None:
    is_empty = any(0 in each.shape for each in site.outputs)
    return "takes no tensors without any number in" if is_empty else None


TFLM = Target(
    name="tflm",
    title="TFLite Micro",
    kernels="tflm",
    batch_size=1,
    checks=(_has_numbers,),
    source="run here, in the interpreter of the package tflite-micro",
    operators={
        **dict.fromkeys(("CONV_2D", "DEPTHWISE_CONV_2D"), Kernel((*WEIGHTED, "int4"))),
        "FULLY_CONNECTED": Kernel((*WEIGHTED, "int4"), checks=(_scale_of_int4,)),
        "TRANSPOSE_CONV": Kernel(WEIGHTED),
        **dict.fromkeys(
            (
                *("ADD", "SUB", "MUL", "MEAN", "PAD", "PADV2", "PACK"),
                *(
                    "UNPACK",
                    "SPLIT",
                    "SPLIT_V",
                    "RESIZE_NEAREST_NEIGHBOR",
                    "SQUEEZE",
                    "EXPAND_DIMS",
                ),
                *("MAXIMUM", "MINIMUM", "SLICE"),
            ),
            Kernel(PLACES),
        ),
        **dict.fromkeys(
            (
                *("AVERAGE_POOL_2D", "MAX_POOL_2D", "RELU", "LEAKY_RELU", "LOGISTIC", "TANH"),
                *("BATCH_MATMUL", "DEQUANTIZE"),
            ),
            Kernel(REAL),
        ),
        "QUANTIZE": Kernel((*REAL, "uint8")),
        **dict.fromkeys(("SOFTMAX", "PRELU", "L2_NORMALIZATION"), Kernel(REAL, max_axes=4)),
        "CONCATENATION": Kernel(PLACES, max_inputs=10),
        "TRANSPOSE": Kernel(PLACES, max_axes=5),
        "STRIDED_SLICE": Kernel((*PLACES, "bool"), max_axes=4),
        "SHAPE": Kernel(PLACES),
        "CAST": Kernel(PLACES, reads=(*PLACES, "bool")),
        "RESHAPE": Kernel((*PLACES, "int64", "bool")),
        "REVERSE_V2": Kernel(PLACES),
        **dict.fromkeys(("UNIDIRECTIONAL_SEQUENCE_LSTM", "SVDF"), Kernel(WEIGHTED)),
        **dict.fromkeys(
            ("GATHER", "REDUCE_MAX", "REDUCE_MIN", "RESIZE_BILINEAR", "MIRROR_PAD"), Kernel(NARROW)
        ),
        **dict.fromkeys(
            ("HARD_SWISH", "ELU", "DEPTH_TO_SPACE", "SPACE_TO_DEPTH"), Kernel(("int8", "float32"))
        ),
        **dict.fromkeys(("ARG_MAX", "ARG_MIN"), Kernel(NARROW, reads=("int8", "float32"))),
        **dict.fromkeys(
            ("EXP", "LOG", "SQRT", "RSQRT", "SIN", "COS", "ABS", "NEG", "SQUARE", "ROUND"),
            Kernel(("float32",)),
        ),
        **dict.fromkeys(("FLOOR", "CEIL", "DIV", "RELU6"), Kernel(("float32",))),
        **dict.fromkeys(
            ("GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL", "EQUAL", "NOT_EQUAL"),
            Kernel((*NARROW, "int64", "bool")),
        ),
        "SQUARED_DIFFERENCE": Kernel(PLACES),
        "SELECT_V2": Kernel((*PLACES, "bool")),
        **dict.fromkeys(("LOGICAL_AND", "LOGICAL_OR", "LOGICAL_NOT"), Kernel(("bool",))),
        **dict.fromkeys(("WHILE", "IF"), Kernel((*PLACES, "bool"))),
    },
)
"""RELU6 has no scales of its own in int8, so it counts as float."""

CMSIS_NN = dataclasses.replace(
    TFLM,
    name="cmsis_nn",
    title="TFLite Micro with CMSIS-NN",
    source="read: CMSIS-NN's sources say that its kernels give the numbers of TFLite Micro's",
)
"""Cortex-M: operators that CMSIS-NN has no kernel for are those of TFLite Micro."""
