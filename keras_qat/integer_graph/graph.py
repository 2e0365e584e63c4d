"""The resolved graph: what a quantization-aware model computes in integers.

`resolve.resolve` makes it from a model. Export, simulation, verification and the model's own
inference read it, and derive none of it again.
"""

from __future__ import annotations

import dataclasses

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.graph.calls import Value
from keras_qat.integer_graph.origin import Origin
from keras_qat.ops.node import Constant, Node, Operand, Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class ResolvedGraph:
    """A quantization-aware model as nodes in the order in which they compute.

    Args:
        name: the model's name.
        inputs, outputs: by name, in the model's order.
        nodes: the nodes.
        tensors: value of the model's calls -> the tensor that holds it.
        values: tensor -> the value it holds, behind its quantizer and the ReLU merged into it.
        unrounded: output in float -> its parameters in files whose outputs are to be integers.
        origin: all that later verbs need to know of the model, which they do not ask again.
    """

    name: str
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    nodes: tuple[Node, ...]
    tensors: dict[Value, Tensor]
    values: dict[Tensor, Value]
    unrounded: dict[Tensor, QuantParams] = dataclasses.field(default_factory=dict)
    origin: Origin = dataclasses.field(default_factory=Origin)

    def sized(self) -> ResolvedGraph:
        """Returns the graph with the rounding of a file whose batch size is known."""
        nodes = tuple(dataclasses.replace(node, sized=True) for node in self.nodes)
        return dataclasses.replace(self, nodes=nodes)

    def __str__(self) -> str:
        """Formats a line for each node: operator, quantization parameters, weights, merged ReLU."""
        lines = [f"inputs: {', '.join(map(_described, self.inputs.values()))}"]
        for node in self.nodes:
            name = node.op.name if node.op else f"float ({node.reason})"
            parts = [f"{node.name}: {name}"]
            if node.attributes:
                parts.append(" ".join(f"{key}={value}" for key, value in node.attributes.items()))
            parts.append("reads " + ", ".join(map(_described, node.inputs)))
            if node.weights is not None:
                parts.append(str(node.weights))
            if node.maximum is not None:
                parts.append(f"merged ReLU up to {node.maximum:g}")
            parts.append("gives " + ", ".join(map(_described, node.outputs)))
            lines.append("; ".join(parts))
        return "\n".join([*lines, f"outputs: {', '.join(map(_described, self.outputs.values()))}"])


def _described(operand: Operand) -> str:
    if isinstance(operand, Constant):
        return f"constant {operand.q.shape} ({operand.params})"
    kind = operand.dtype if operand.params is None else str(operand.params)
    return f"{operand.name} {list(operand.shape)} ({kind})"
