"""Nodes of a resolved graph: operators with their tensors and constants."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import tensorflow as tf

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.graph.calls import Call
from keras_qat.ops.op import Attributes, Op
from keras_qat.ops.weights import Weights


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor that exists at run time.

    Args:
        name: a unique name, which begins with the layer's name in files.
        shape: the shape, with None for sizes that are known only at run time.
        dtype: the type in the model, e.g. "float32".
        params: the quantization parameters; None if the tensor is not quantized.
        label: the name in the float model, for reports.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str
    params: QuantParams | None
    label: str = ""

    @property
    def is_float(self) -> bool:
        """Whether the tensor stands for float values, quantized or not."""
        return tf.as_dtype(self.dtype).is_floating

    @property
    def elements(self) -> int:
        """Number of values in one example, or in the batch if its size is known.

        Raises:
            ValueError: if a size is known at run time only.
        """
        sizes = [1 if axis == 0 and size is None else size for axis, size in enumerate(self.shape)]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            raise ValueError(f"The shape of '{self.name}' is unknown: {list(self.shape)}.")
        return math.prod(known)


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """A quantized array that is an input of a node.

    Args:
        q: quantized values, int8 or int16, or a float64 tensor if `params` are tensors.
        params: the quantization parameters.
    """

    q: Any
    params: QuantParams


Operand = Tensor | Constant


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """An operator with its inputs and outputs.

    Args:
        name: the layer's path. For the second and later calls of a layer, it has a suffix.
        op: the operator; None if the node computes in float between a DEQUANTIZE and a QUANTIZE.
        attributes: the operator's options.
        call: the call that the node computes. Its layer is the original layer, not the wrapper.
        inputs: the inputs, in the order of the call's arguments.
        outputs: the outputs.
        weights: the weights of a weighted operator.
        maximum: maximum of a fused ReLU, `inf` for a plain ReLU; None without a ReLU.
        reason: the reason why the node computes in float.
        layer: the layer in the quantization-aware model: the call's layer, or its wrapper.
        sized: whether the batch size in the file is fixed, even if the model's is unknown.
    """

    name: str
    op: Op | None
    attributes: Attributes
    call: Call
    inputs: tuple[Operand, ...]
    outputs: tuple[Tensor, ...]
    weights: Weights | None = None
    maximum: float | None = None
    reason: str = ""
    layer: Any = None
    sized: bool = False

    @property
    def output(self) -> Tensor:
        """The first output, which is often the only one."""
        return self.outputs[0]

    @property
    def computes_in_float(self) -> bool:
        """Whether the node has no operator and computes float values, not just indices or masks."""
        tensors = [x for x in (*self.inputs, *self.outputs) if isinstance(x, Tensor)]
        return self.op is None and any(tensor.is_float for tensor in tensors)
