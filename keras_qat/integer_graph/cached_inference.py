"""Inference with ranges and weights as of one moment.

What depends on ranges and weights alone - folding BatchNormalization, quantizing weights, the
multipliers of kernels - takes many small operations. They are done once after the weights have
changed, not for each batch: most are not traced at all (`arithmetic.partial_evaluation`), and the
traced inference is cut into what its inputs reach and the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.partial_evaluation import Stage, staging
from keras_qat.frontend.graph import Graph, values_in
from keras_qat.frontend.keras2.backend import traced as traced_for
from keras_qat.frontend.keras2.backend import traced_in_time
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.resolve import resolve_in_graph

__all__ = ["Settled"]

DECIDES = 3
"""So often it is traced for the branches that ranges and weights choose; from then on, as they go
on changing, with all branches."""

Infer = Callable[[ResolvedGraph, list[Any]], list[Any]]


class Settled:
    """A function of a model's inputs, its ranges and weights being those of the last `refresh`.

    Args:
        model: a quantization-aware model.
        graph: the same, read.
        infer: computes tensors from the resolved graph and the inputs.
    """

    def __init__(self, model: Any, graph: Graph, infer: Infer) -> None:
        self.model, self.graph, self.infer = model, graph, infer
        self.version = 0
        """How often it was traced. What was made of an earlier version computes something else."""
        self._weights: list[Any] = []
        """The values of the model's weights in the last `refresh`."""
        # In a function, as reading them one by one takes ten times as long.
        self._read = traced_in_time(lambda: [each.value() for each in model.weights])

    def refresh(self) -> None:
        """Takes ranges and weights as they are now."""
        weights = self._read()
        if self.is_ready and all(map(_unchanged, self._weights, weights)):
            return
        resolved = resolve_in_graph(self.graph, self.model.target)
        numbers = _numbers(resolved)
        known = self._stage.known(numbers) if self.is_ready else None
        if known is None:
            self._trace(resolved, numbers)
            with tf.init_scope():
                found = self._derived(self._stage.known() or {})
                self._variables = [tf.Variable(each, trainable=False) for each in found]
            self._stage.forget()
            self.version += 1
        else:
            for variable, value in zip(self._variables, self._derived(known), strict=True):
                variable.assign(value)
        self._weights = weights

    @property
    def is_ready(self) -> bool:
        """Whether there was a `refresh`."""
        return self.version > 0

    def __call__(self, *inputs: Any) -> list[Any]:
        """The tensors, from one tensor for each input; to be called where a graph is traced."""
        known = dict(zip(self._inputs, inputs, strict=True))
        for names, variable in zip(self._packs, self._variables, strict=True):
            values = tf.unstack(variable) if len(names) > 1 else [variable.value()]
            known |= zip(names, values, strict=True)
        return self._imported(known, self._outputs)

    def _trace(self, resolved: ResolvedGraph, numbers: list[Any]) -> None:
        """Traces the inference, and finds what its inputs do not reach."""
        inputs = [tf.TensorSpec(each.shape, each.dtype) for each in values_in(self.graph.inputs)]

        def inferred(*given: Any) -> list[Any]:
            stands_for = given[len(inputs) :]
            graph, rest = tf.compat.v1.get_default_graph(), iter(stands_for)
            self._stage = Stage(graph, stands_for, numbers, decides=self.version < DECIDES)
            settled = resolved.with_numbers(lambda number: next(rest))
            with staging(self._stage):
                return self.infer(settled, list(given[: len(inputs)]))

        specs = [tf.TensorSpec(each.shape, each.dtype) for each in numbers]
        traced = tf.function(inferred, autograph=False).get_concrete_function(*inputs, *specs)
        self._traced: Any = traced
        names = [each.name for each in traced.inputs]
        self._inputs = names[: len(inputs)]
        self._outputs = [each.name for each in traced.outputs]
        self._packs = _packs(_border(traced.graph, set(self._inputs)))
        known = self._stage.known() or {}
        rest = [name for pack in self._packs for name in pack if name not in known]
        used = sorted(_needed(traced.graph, rest, known)[1])

        @traced_for
        def derive(numbers: list[Any]) -> list[Any]:
            return self._imported(dict(zip(used, numbers, strict=True)), rest)

        self._derive = lambda known: dict(
            zip(rest, derive([known[name] for name in used]) if rest else [], strict=True)
        )

    def _derived(self, known: dict[str, Any]) -> list[Any]:
        """What the variables are to hold."""
        known = known | self._derive(known)
        packs = [[known[name] for name in pack] for pack in self._packs]
        return [tf.stack(pack) if len(pack) > 1 else pack[0] for pack in packs]

    def _imported(self, known: dict[str, Any], wanted: list[str]) -> list[Any]:
        """Tensors of the traced graph, computed from others of its tensors where this is called."""
        traced, outer = self._traced, tf.compat.v1.get_default_graph()
        rest = [name for name in wanted if name not in known]
        operations, used = _needed(traced.graph, rest, known)
        captured = traced.captured_inputs
        inner = traced.inputs[len(traced.inputs) - len(captured) :]
        for placeholder, tensor in zip(inner, captured, strict=True):
            if placeholder.op.name in operations:
                known[placeholder.name] = outer.capture(tensor)
                used.add(placeholder.name)
        definition = traced.graph.as_graph_def()
        nodes = [node for node in definition.node if node.name in operations]
        del definition.node[:]
        definition.node.extend(nodes)
        given = {name: known[name] for name in used}
        found = tf.graph_util.import_graph_def(definition, given, rest, name="settled")
        return [(known | dict(zip(rest, found, strict=True)))[name] for name in wanted]


def _needed(graph: tf.Graph, wanted: list[str], known: Any) -> tuple[set[str], set[str]]:
    """Names of the operations that compute some tensors, and which known tensors they read."""
    operations, used = set(), set()
    left = [graph.get_tensor_by_name(name).op for name in wanted]
    while left:
        operation = left.pop()
        if operation.name in operations:
            continue
        operations.add(operation.name)
        left += operation.control_inputs
        used |= {each.name for each in operation.inputs if each.name in known}
        left += [each.op for each in operation.inputs if each.name not in known]
    return operations, used


def _numbers(resolved: ResolvedGraph) -> list[Any]:
    """The tensors among its ranges, weights and constants."""
    found: list[Any] = []

    def note(number: Any) -> Any:
        found.append(number)
        return number

    resolved.with_numbers(note)
    return found


def _unchanged(before: Any, now: Any) -> bool:
    """Whether a variable has the value it had. What is still held is never overwritten."""
    one, other = np.asarray(before), np.asarray(now)
    return one.ctypes.data == other.ctypes.data or np.array_equal(one, other)


def _border(graph: tf.Graph, inputs: set[str]) -> list[Any]:
    """The tensors that computations which depend on `inputs` read from those which do not."""
    reached: dict[Any, None] = {}
    border: dict[str, Any] = {}
    for operation in graph.get_operations():
        sources = [each.op for each in operation.inputs] + list(operation.control_inputs)
        is_input = any(each.name in inputs for each in operation.outputs)
        is_number = operation.type == "Placeholder" or not operation.op_def.is_stateful
        if is_input or not is_number or any(each in reached for each in sources):
            reached[operation] = None
    for operation in reached:
        for each in operation.inputs:
            if each.op not in reached and each.op.type != "Const" and each.dtype != tf.resource:
                border[each.name] = each
    return list(border.values())


def _packs(border: list[Any]) -> list[list[str]]:
    """Names of tensors by the variable that holds them: scalars of a type share one."""
    packs: dict[Any, list[str]] = {}
    for each in border:
        key = each.dtype if each.shape.rank == 0 else each.name
        packs.setdefault(key, []).append(each.name)
    return list(packs.values())
