"""Nodes of a `ResolvedGraph`, from which files are exported: operators and float layers."""

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
    """A tensor that exists when a file runs.

    Args:
        name: a unique name. In files, the name begins with the layer's name.
        shape: the shape. None stands for a size that is known only at run time.
        dtype: the type in the Keras model, e.g. "float32". In files, this tensor may be int8.
        params: the quantization parameters. None if the tensor is not quantized.
        label: the tensor's name in the float model, for reports.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str
    params: QuantParams | None
    label: str = ""

    @property
    def is_float(self) -> bool:
        """Whether the tensor is float in the Keras model. It may be int8 in files."""
        return tf.as_dtype(self.dtype).is_floating

    @property
    def elements(self) -> int:
        """The number of values. If the batch size is unknown, it counts as 1."""
        sizes = [1 if axis == 0 and size is None else size for axis, size in enumerate(self.shape)]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            raise ValueError(f"The shape of '{self.name}' is unknown: {list(self.shape)}.")
        return math.prod(known)


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """A quantized array that is an input of a node.

    Args:
        q: the quantized values: an int8 or int16 array, or a float64 tensor in a `tf.function`.
        params: the quantization parameters.
    """

    q: Any
    params: QuantParams


Operand = Tensor | Constant


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """An operator with its inputs and outputs.

    Args:
        name: the layer's path. The second and later calls of a layer have a suffix.
        op: the operator. None for a layer that computes in float.
        attributes: the operator's options, such as `axis`.
        call: the call that the node computes. `call.layer` is the original layer, not the wrapper.
        inputs: the inputs, in the order of the call's arguments.
        weights: the quantized weights, or None.
        maximum: the maximum of a fused ReLU, `inf` for a plain ReLU. None without a fused ReLU.
        reason: the reason why the node computes in float.
        layer: the layer in the quantization-aware model. It is `call.layer` or a wrapper around it.
        sized: whether files have a fixed batch size, even if the batch size of the model is None.
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
        """The first output. Most nodes have no other output."""
        return self.outputs[0]

    @property
    def computes_in_float(self) -> bool:
        """Whether the node has no integer operator, and reads or returns float values."""
        tensors = [x for x in (*self.inputs, *self.outputs) if isinstance(x, Tensor)]
        return self.op is None and any(tensor.is_float for tensor in tensors)
