"""The resolved graph: what a quantization-aware model computes in integers.

`resolve.resolve` makes it from a model. Export, simulation, verification and the model's own
inference read it, and derive none of it again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.frontend.graph import Value
from keras_qat.integer_graph.origin import Origin
from keras_qat.ops.node import Constant, Node, Operand, Tensor
from keras_qat.ops.weights import Weights


@dataclasses.dataclass(frozen=True, eq=False)
class ResolvedGraph:
    """A quantization-aware model as nodes in the order in which they compute.

    Args:
        name: the model's name.
        inputs, outputs: by name, in the model's order.
        nodes: the nodes.
        tensors: value of the model's calls -> the tensor that holds it.
        values: tensor -> the value it holds, behind its quantizer and the ReLU merged into it.
        origin: all that later verbs need to know of the model, which they do not ask again.
    """

    name: str
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    nodes: tuple[Node, ...]
    tensors: dict[Value, Tensor]
    values: dict[Tensor, Value]
    origin: Origin = dataclasses.field(default_factory=Origin)

    def sized(self) -> ResolvedGraph:
        """Returns the graph with the rounding of a file whose batch size is known."""
        nodes = tuple(dataclasses.replace(node, sized=True) for node in self.nodes)
        return dataclasses.replace(self, nodes=nodes)

    def with_numbers(self, change: Callable[[Any], Any]) -> ResolvedGraph:
        """Returns the graph with its ranges, weights and constants replaced where they are tensors.

        Args:
                change: maps a tensor to its replacement; called in the same order for all graphs of
                one model.
        """
        changed: dict[int, Any] = {}

        def number(each: Any) -> Any:
            return change(each) if tf.is_tensor(each) else each

        def params(each: QuantParams | None) -> Any:
            if each is not None and id(each) not in changed:  # One object for each quantizer.
                numbers = number(each.scale), number(each.zero_point)
                changed[id(each)] = QuantParams(*numbers, each.bits)
            return changed.get(id(each))

        def operand(each: Operand) -> Any:
            if id(each) not in changed:
                q = {"q": number(each.q)} if isinstance(each, Constant) else {}
                changed[id(each)] = dataclasses.replace(each, params=params(each.params), **q)
            return changed[id(each)]

        def weights(each: Weights | None) -> Any:
            if each is None:
                return None
            names = ("q", "scale", "bias", "reach")
            numbers = {name: number(getattr(each, name)) for name in names}
            inner = {name: params(each.inner[name]) for name in each.inner}
            recurrent = weights(each.recurrent)
            return dataclasses.replace(each, **numbers, inner=inner, recurrent=recurrent)

        nodes = tuple(
            dataclasses.replace(
                node,
                inputs=tuple(map(operand, node.inputs)),
                outputs=tuple(map(operand, node.outputs)),
                weights=weights(node.weights),
            )
            for node in self.nodes
        )
        return dataclasses.replace(
            self,
            inputs={name: operand(each) for name, each in self.inputs.items()},
            outputs={name: operand(each) for name, each in self.outputs.items()},
            nodes=nodes,
            tensors={value: operand(each) for value, each in self.tensors.items()},
            values={operand(each): value for each, value in self.values.items()},
        )

    def __str__(self) -> str:
        """Formats a line for each node: operator, quantization parameters, weights, merged ReLU."""
        lines = [f"inputs: {', '.join(map(_described, self.inputs.values()))}"]
        for node in self.nodes:
            name = node.op.name if node.op else f"float ({node.reason})"
            parts = [f"{node.name}: {name}"]
            if node.attributes:
                parts.append(" ".join(f"{key}={each}" for key, each in node.attributes.items()))
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
