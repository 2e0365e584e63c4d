"""Parts of a layer that training alone computes, between what it computes at inference too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_qat.graph.operations import name_in_tensorflow
from keras_qat.graph.rebuild_model import copy_with_all_arguments
from keras_qat.helper_layers.operations import TrainingOnly
from keras_qat.keras2.backend import is_symbolic, keras
from keras_qat.tracing.compare_traces import equal, identity


class Sections:
    """Compares two traces of a layer, with parts in training that inference leaves out.

    Stochastic depth written by hand is such a part: `x / keep * mask` in training, `x` otherwise.
    A part computes from one tensor another of its shape, without weights. It may read others that
    inference computes as well: `mean + deviation * noise` in training, `mean` otherwise.

    Args:
        trained, tested: traces of training and of inference. The first is changed.
    """

    def __init__(self, trained: Any, tested: Any) -> None:
        self.trained, self.tested = trained, tested
        self.made = [
            {id(x): node for node in trace.nodes for x in tf.nest.flatten(node.outputs)}
            for trace in (trained, tested)
        ]
        self.inputs = [
            {id(x): index for index, x in enumerate(trace.model.inputs)}
            for trace in (trained, tested)
        ]
        self.begins: dict[tuple[int, int], Any] = {}
        """Ids of a pair of tensors -> None if they differ, or the tensor at which a part begins."""
        self.others: dict[tuple[int, int], list[tuple[Any, Any]]] = {}
        """Ids of where a part begins and ends -> what else it reads, in both traces."""
        self.pairs: dict[Any, Any] = {}
        self.parts: dict[int, Any] = {}

    def joined(self) -> Any | None:
        """Returns the outputs of training with a `TrainingOnly` for each part.

        None if the traces differ in anything else.
        """
        ends = [tf.nest.flatten(trace.outputs) for trace in (self.trained, self.tested)]
        if len(ends[0]) != len(ends[1]) or not all(map(self._corresponds, *ends)):
            return None
        flat = list(map(self._rebuilt, *ends))
        return tf.nest.pack_sequence_as(self.trained.outputs, flat)

    def _corresponds(self, a: Any, b: Any) -> bool:
        key = id(a), id(b)
        if key not in self.begins:
            starts = (x for x in self._before(a) if self._is_part(x, a, b))
            self.begins[key] = a if self._equals(a, b) else next(starts, None)
        return self.begins[key] is not None

    def _equals(self, a: Any, b: Any) -> bool:
        """Returns whether training computes one tensor as inference computes the other."""
        indices = self.inputs[0].get(id(a)), self.inputs[1].get(id(b))
        if indices != (None, None):
            return indices[0] == indices[1]
        nodes = self.made[0][id(a)], self.made[1][id(b)]
        outputs = [list(map(id, tf.nest.flatten(node.outputs))) for node in nodes]
        is_same = outputs[0].index(id(a)) == outputs[1].index(id(b))
        if not is_same or identity(nodes[0]) != identity(nodes[1]):
            return False
        arguments = [(node.call_args, dict(node.call_kwargs)) for node in nodes]
        try:
            tf.nest.assert_same_structure(*arguments)
        except (ValueError, TypeError):
            return False
        return all(map(self._agree, *map(tf.nest.flatten, arguments)))

    def _agree(self, a: Any, b: Any) -> bool:
        if is_symbolic(a) and is_symbolic(b):
            return self._corresponds(a, b)
        return _is_phase(a, b) or (not is_symbolic(a) and not is_symbolic(b) and equal(a, b))

    def _before(self, end: Any) -> Iterator[Any]:
        """Yields what a tensor is computed from, the nearest first."""
        queue, seen = [end], {id(end)}
        for tensor in queue:
            for x in self._read(tensor):
                if id(x) not in seen:
                    seen.add(id(x))
                    queue.append(x)
                    yield x

    def _read(self, tensor: Any) -> list[Any]:
        node = self.made[0].get(id(tensor))
        arguments = () if node is None else (node.call_args, node.call_kwargs)
        return [x for x in tf.nest.flatten(arguments) if is_symbolic(x)]

    def _is_part(self, start: Any, end: Any, b: Any) -> bool:
        kinds = {(tuple(x.shape), x.dtype) for x in (start, end, b)}
        if len(kinds) > 1 or not self._equals(start, b):
            return False
        others: list[tuple[Any, Any]] = []
        queue, seen = [end], {id(end), id(start)}
        for tensor in queue:
            partner = None if tensor is end else self._partner(tensor)
            node = self.made[0].get(id(tensor))
            if partner is not None:
                others.append((tensor, partner))
                continue
            if node is None or node.layer.weights:
                return False
            new = {id(x): x for x in self._read(tensor) if id(x) not in seen}
            seen.update(new)
            queue += new.values()
        self.others[id(start), id(end)] = others
        return True

    def _partner(self, a: Any) -> Any | None:
        """Returns the tensor of inference that is equal to one of training; None if none is."""
        if (index := self.inputs[0].get(id(a))) is not None:
            b = self.tested.model.inputs[index]
            self.begins[id(a), id(b)] = a
            return b
        layer = self.made[0][id(a)].layer
        name = name_in_tensorflow(layer)
        for node in self.tested.nodes:
            if node.layer is layer or (name and name_in_tensorflow(node.layer) == name):
                for b in tf.nest.flatten(node.outputs):
                    if self._equals(a, b):
                        self.begins[id(a), id(b)] = a
                        return b
        return None

    def _rebuilt(self, a: Any, b: Any) -> Any:
        start = self.begins[id(a), id(b)]
        self._rebuild(start, b)
        if start is a:
            return a
        if id(a) not in self.parts:
            name = f"in_training_{len(self.parts)}" if self.parts else "in_training"
            others = self.others[id(start), id(a)]
            model = keras.Model([start, *(x for x, _ in others)], a)
            layer = TrainingOnly(copy_with_all_arguments(model), name=name)
            given = [start, *(self._rebuilt(x, y) for x, y in others)]
            self.parts[id(a)] = layer(start, given=given) if others else layer(start)
        return self.parts[id(a)]

    def _rebuild(self, a: Any, b: Any) -> None:
        """Makes the node of a tensor read what `_rebuilt` returns, and follow the model's phase."""
        node = self.made[0].get(id(a))
        if node is None or node in self.pairs:
            return
        other = self.pairs[node] = self.made[1][id(b)]

        def argument(x: Any, y: Any) -> Any:
            if is_symbolic(x):
                return self._rebuilt(x, y)
            return None if _is_phase(x, y) else x

        arguments = [(n.call_args, dict(n.call_kwargs)) for n in (node, other)]
        args, kwargs = tf.nest.map_structure(argument, *arguments)
        type(node)(node.layer, args, kwargs, outputs=node.outputs)


def _is_phase(a: Any, b: Any) -> bool:
    return a is True and b is False
