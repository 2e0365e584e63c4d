"""Writing the nodes of a resolved graph into a TFLite file."""

from __future__ import annotations

import numpy as np

from keras_qat.arithmetic.qparams import QuantParams
from keras_qat.ops.op import FixedRange, SharedRange
from keras_qat.resolved.graph import Constant, Node, Tensor
from keras_qat.tflite.builder import Builder
from keras_qat.tflite.emission import Emission

__all__ = ["tensor_index", "write_node"]


def tensor_index(builder: Builder, indices: dict[Tensor, int], tensor: Tensor) -> int:
    """The index of a tensor in the file, added where it is missing."""
    if tensor not in indices:
        dtype = tensor.dtype if tensor.params is None else tensor.params.dtype.name
        indices[tensor] = builder.tensor(tensor.name, tensor.shape, dtype, tensor.params)
    return indices[tensor]


def write_node(builder: Builder, node: Node, indices: dict[Tensor, int]) -> None:
    """Writes an operator, and what brings its result to the output's quantization parameters.

    Kernels that fix their output's parameters are followed by a QUANTIZE where others are wanted;
    those of fewer than 8 bits by a MINIMUM, as kernels know no upper end but int8's.
    """
    assert node.op is not None
    inputs = [
        builder.constant(f"{node.name}/constant", each.q, each.params)
        if isinstance(each, Constant)
        else tensor_index(builder, indices, each)
        for each in node.inputs
    ]
    outputs = [tensor_index(builder, indices, each) for each in node.outputs]
    params = node.output.params
    if params is None:  # Indices.
        node.op.emit(Emission(builder, node, inputs, outputs))
        return
    native, (target, *_) = params, outputs
    if isinstance(node.op.output, FixedRange):
        native = node.op.output.params(params.bits)
    steps: list[tuple[str, QuantParams]] = []
    if native != params:
        steps.append(("QUANTIZE", native))
    if params.bits < 8 and node.op.output != SharedRange():
        steps.append(("MINIMUM", params))
    places = [
        builder.tensor(f"{node.name}/unclipped", node.output.shape, params.dtype.name, each)
        for _, each in steps
    ]
    chain = [*places, target]
    node.op.emit(Emission(builder, node, inputs, chain[:1] + outputs[1:]))
    for (code, _), source, end in zip(steps, chain, chain[1:], strict=False):
        rest = Emission(builder, node, [source], [end])
        if code == "MINIMUM":
            highest = rest.constant("highest", np.int8(params.highest), params)
            rest.add(code, [source, highest], options="MaximumMinimumOptions", version=2)
        else:
            rest.add(code, options="QuantizeOptions", version=2)
