"""int8 kernels that runtimes have and TFLite's converter makes no use of."""

from __future__ import annotations

from typing import Any

from tensorflow.lite.python import schema_py_generated as schema

from keras_qat.flatbuffer.edit import code_of, drop_unread

__all__ = ["use_int8_kernels"]

_Op = schema.BuiltinOperator

KERNELS = {_Op.ELU}
"""Operations that the converter leaves in float, between a DEQUANTIZE and a QUANTIZE."""


def use_int8_kernels(model: Any) -> None:
    """Lets those operations of the converter's file, unpacked, compute in int8.

    Those that the plan leaves in float stay so, as there are barriers around them.
    """
    for graph in model.subgraphs:
        makers = {int(index): each for each in graph.operators for index in each.outputs}
        for quantize in graph.operators:
            if code_of(model, quantize) != _Op.QUANTIZE:
                continue
            kernel = makers.get(int(quantize.inputs[0]))
            if kernel is None or code_of(model, kernel) not in KERNELS:
                continue
            dequantize = makers.get(int(kernel.inputs[0]))
            if dequantize is not None and code_of(model, dequantize) == _Op.DEQUANTIZE:
                quantize.opcodeIndex = kernel.opcodeIndex
                quantize.inputs = dequantize.inputs
                quantize.builtinOptionsType = kernel.builtinOptionsType
                quantize.builtinOptions = kernel.builtinOptions
        drop_unread(model, graph, {*KERNELS, _Op.DEQUANTIZE})
