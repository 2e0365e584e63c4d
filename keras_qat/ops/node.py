"""Nodes of a resolved graph: one operator at work, its tensors and constants."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import tensorflow as tf

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.frontend.graph import Call
from keras_qat.ops.op import Attributes, Op
from keras_qat.ops.weights import Weights


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor that exists at run time.

    Args:
        name: unique: that of the layer's scope in files.
        shape: None for sizes that are known at run time only.
        dtype: in the model, e.g. "float32".
        params: what its quantized values stand for; None for one that is not quantized.
        label: its name in the float model, for reports.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str
    params: QuantParams | None
    label: str = ""

    @property
    def is_float(self) -> bool:
        """Whether it stands for real numbers, quantized or not."""
        return tf.as_dtype(self.dtype).is_floating

    @property
    def elements(self) -> int:
        """How many numbers one example has. Where the batch has a size, all of its examples.

        Raises:
            ValueError: if a size is known at run time only.
        """
        sizes = [
            1 if place == 0 and size is None else size for place, size in enumerate(self.shape)
        ]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            raise ValueError(f"The shape of '{self.name}' is not known: {list(self.shape)}.")
        return math.prod(known)


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """An array among the inputs of an operation, quantized.

    Args:
        q: quantized values, int8 or int16; a float64 tensor where `params` are tensors.
        params: what they stand for.
    """

    q: Any
    params: QuantParams


Operand = Tensor | Constant


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """One operator at work.

    Args:
        name: the layer's path, with a mark from its second call on.
        op: the operator, or None: computed in float, between DEQUANTIZE and QUANTIZE.
        attributes: its options.
        call: the call that it computes: of the layer itself, not of a wrapper around it.
        inputs: what it reads, in the order of the call's arguments.
        outputs: what it gives.
        weights: of a weighted operator: its weights as kernels hold them.
        maximum: where a ReLU that is merged into it ends, infinity for nowhere; None without one.
        reason: of a node in float: why.
        layer: the quantization-aware model's layer: that of the call, or the wrapper around it.
        sized: whether its file knows the size of batches, whatever the model does: a target's.
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
        """The only output, or the first one."""
        return self.outputs[0]
