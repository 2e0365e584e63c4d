"""Combines two traces of a layer, with `training=True` and `training=False`, into one trace.

The first trace is called `trained` and its tensors `a`. The second is called `tested` and its
tensors `b`. The phase is the value of `training`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import map_values
from keras_qat.graph.operations import draws_random_numbers, get_kind, name_in_tensorflow
from keras_qat.graph.rebuild_model import copy_with_all_arguments
from keras_qat.helper_layers.operations import TrainingOnly
from keras_qat.keras2.backend import KerasTensor, Node, is_symbolic, keras, layers
from keras_qat.keras2.layers_and_models import bind_options
from keras_qat.messages import KNOWN, get_package
from keras_qat.tracing.cannot_trace import CannotTrace, MustTraceInline, OnlyTrains
from keras_qat.tracing.check_trace import draw_inputs
from keras_qat.tracing.replaced_functions import OwnGradient

if TYPE_CHECKING:
    from keras_qat.tracing.trace_layer import Trace

NOISE = {
    *(layers.Dropout, layers.SpatialDropout1D, layers.SpatialDropout2D, layers.SpatialDropout3D),
    *(layers.AlphaDropout, layers.GaussianDropout, layers.GaussianNoise),
    *(layers.RandomFlip, layers.RandomRotation, layers.RandomZoom, layers.RandomTranslation),
    *(layers.RandomContrast, layers.RandomBrightness),
}
"""Layers that change their input only in training."""

_PHASE = "keras_qat: the phase"
"""Stands for an argument that is True in `trained` and False in `tested`."""


def follow_training(trained: Trace, tested: Trace) -> None:
    """Changes `trained` to compute both phases. Both traces must have the same operations.

    For example, `self.dropout(x, training=training)` was traced as `training=True`. It becomes
    `training=None`, which means the phase of the entire model. Dropout layers may be missing in
    `tested`.

    Raises:
        CannotTrace, OnlyTrains: if the layer computes differently in training.
        MustTraceInline: if a custom inner layer gets the phase in an argument with another name
            than `training`.
    """
    does_nothing = _returns_input(tested) and not trained.weights
    refusal: Exception = CannotTrace("it computes differently in training")
    if does_nothing and len(trained.inputs) == 1 and _is_random_like_layer(trained):
        refusal = OnlyTrains(copy_with_all_arguments(trained.model))
    nodes, test_nodes, noise = _sort_nodes(trained), _sort_nodes(tested), set[Node]()
    expected = list(map(_identify, test_nodes))
    if list(map(_identify, nodes)) != expected:  # As in `if training: x = self.dropout(x)`.
        in_test = {id(node.layer) for node in test_nodes}
        noise = {n for n in nodes if type(n.layer) in NOISE and id(n.layer) not in in_test}
        nodes = [node for node in nodes if node not in noise]
    known = _index_tensors(trained, noise), _index_tensors(tested, set())
    results = [
        [indices.get(id(tensor)) for tensor in tf.nest.flatten(trace.outputs)]
        for indices, trace in zip(known, (trained, tested), strict=True)
    ]
    if list(map(_identify, nodes)) != expected or results[0] != results[1]:
        raise refusal

    def combine(a: Any, b: Any) -> Any:
        if _is_phase(a, b):
            return _PHASE
        is_same = known[0].get(id(a)) == known[1].get(id(b))
        if not is_same or (id(a) not in known[0] and not _is_equal(a, b)):
            raise refusal
        return a

    for node in noise:
        node.call_args, node.call_kwargs = node.call_args[:1], {}
    for node, test_node in zip(nodes, test_nodes, strict=True):
        arguments = [
            bind_options(n.layer, n.call_args, dict(n.call_kwargs)) for n in (node, test_node)
        ]
        try:
            args, kwargs = tf.nest.map_structure(combine, *arguments)
        except (ValueError, TypeError) as error:
            raise refusal from error
        others = [arg for name, arg in kwargs.items() if name != "training"]
        if any(arg is _PHASE for arg in (*args, *others)):  # As in `self.block(x, is_training)`.
            is_known = get_package(type(node.layer)) in KNOWN
            raise refusal if is_known else MustTraceInline(node.layer)
        node.call_args = args
        node.call_kwargs = {key: None if arg is _PHASE else arg for key, arg in kwargs.items()}


def combine_phases(trained: Trace, tested: Trace, refusal: CannotTrace) -> Trace:
    """Returns one trace for traces with different operations, which `follow_training` rejected.

    For example, stochastic depth multiplies by a random mask in training. Such operations stay in
    float. If the layer has no weights, the traces may also differ entirely.

    Raises:
        CannotTrace: `refusal`, if the traces cannot be combined.
    """
    if not _is_random_like_layer(trained):
        raise refusal
    outputs = _TrainingSections(trained, tested).combine()
    if outputs is not None:
        trained.outputs = outputs
        trained.model = trained.make_model(trained.model.inputs, outputs)
        return trained
    ends = [tf.nest.flatten(trace.outputs) for trace in (trained, tested)]
    kinds = [[(tensor.shape.as_list(), tensor.dtype) for tensor in tensors] for tensors in ends]
    has_state = any(x.weights or x.model.weights or x.masks for x in (trained, tested))
    if has_state or len(ends[0]) > 1 or kinds[0] != kinds[1]:
        raise refusal
    layer = TrainingOnly(copy_with_all_arguments(trained.model), name="in_training")
    inputs = list(tested.inputs.values())
    tested.outputs = layer(ends[1][0], given=inputs)
    tested.model = tested.make_model(inputs, tested.outputs)
    return tested


def _returns_input(trace: Trace) -> bool:
    kinds = {get_kind(node.layer) for node in trace.nodes}
    return kinds <= {"identity"} and is_symbolic(trace.outputs)


def _is_random_like_layer(trained: Trace) -> bool:
    """Return True if layer and trace are both random, or if both return equal results in each call.

    Random numbers of NumPy become constants in a trace. Only the layer is then random.
    """
    if any(draws_random_numbers(node.layer) for node in trained.nodes):
        return True  # Two runs may be equal, for example if an example is rarely dropped.
    if trained.weights or trained.model.weights:
        return False  # A run may change weights, such as moving statistics.
    inputs, call = draw_inputs(trained), trained.call
    tensors = dict(zip(trained.inputs, inputs, strict=False))
    args, kwargs = map_values(tensors.__getitem__, (call.args, dict(call.kwargs)))
    runs: Any = (
        lambda: trained.layer(*args, **{**kwargs, "training": True}),
        lambda: trained.model(inputs, training=True),
    )
    return len({all(np.all(run() == run()) for _ in range(8)) for run in runs}) == 1


class _TrainingSections:
    """Finds sections of `trained` that inference skips, and moves each to a layer `TrainingOnly`.

    In `x / keep * mask`, a section starts at `x` and ends at the product. `TrainingOnly` returns
    the product in training, and `x` at inference. Start and end have equal shapes, and a section
    has no weights. A section may read side inputs, which `tested` also computes. For example,
    `mean + deviation * noise` starts at `mean`, and `deviation` is a side input.

    Args:
        trained, tested: traces of training and inference. The trace of training is changed.
    """

    def __init__(self, trained: Trace, tested: Trace) -> None:
        self.trained, self.tested = trained, tested
        self.producers = [_find_producers(trace) for trace in (trained, tested)]
        self.inputs = [
            {id(x): index for index, x in enumerate(trace.model.inputs)}
            for trace in (trained, tested)
        ]
        self.starts: dict[tuple[int, int], Any] = {}
        """Maps `(id(a), id(b))` to the tensor of `trained` that equals `b`. It is `a`, or the start
        of a section that ends at `a`. If no such tensor equals `b`, the entry is None."""
        self.side_inputs: dict[tuple[int, int], list[tuple[Any, Any]]] = {}
        """Maps the ids of a section's start and end to its side inputs, as pairs `(a, b)`."""
        self.rebuilt: set[Node] = set()
        self.sections: dict[int, Any] = {}
        """Maps the id of a section's end to the output of its `TrainingOnly`."""

    def combine(self) -> Any | None:
        """Returns the outputs of `trained` with `TrainingOnly` layers.

        Returns None if the traces also differ outside of such sections.
        """
        ends = [tf.nest.flatten(trace.outputs) for trace in (self.trained, self.tested)]
        if len(ends[0]) != len(ends[1]) or not all(map(self._corresponds, *ends)):
            return None
        return tf.nest.pack_sequence_as(self.trained.outputs, list(map(self._rebuild, *ends)))

    def _corresponds(self, a: KerasTensor, b: KerasTensor) -> bool:
        """Return True if `a` equals `b`, or if `a` ends a section with a start equal to `b`."""
        key = id(a), id(b)
        if key not in self.starts:
            starts = (x for x in self._list_before(a) if self._is_section(x, a, b))
            self.starts[key] = a if self._equals(a, b) else next(starts, None)
        return self.starts[key] is not None

    def _equals(self, a: KerasTensor, b: KerasTensor) -> bool:
        indices = self.inputs[0].get(id(a)), self.inputs[1].get(id(b))
        if indices != (None, None):
            return indices[0] == indices[1]
        nodes = self.producers[0][id(a)], self.producers[1][id(b)]
        outputs = [list(map(id, tf.nest.flatten(node.outputs))) for node in nodes]
        is_same = outputs[0].index(id(a)) == outputs[1].index(id(b))
        if not is_same or _identify(nodes[0]) != _identify(nodes[1]):
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
        is_constant = not is_symbolic(a) and not is_symbolic(b)
        return _is_phase(a, b) or (is_constant and _is_equal(a, b))

    def _list_before(self, end: KerasTensor) -> Iterator[KerasTensor]:
        """Yield all tensors that are needed to compute `end`, the nearest first."""
        queue, seen = [end], {id(end)}
        for tensor in queue:
            for x in self._list_read(tensor):
                if id(x) not in seen:
                    seen.add(id(x))
                    queue.append(x)
                    yield x

    def _list_read(self, tensor: KerasTensor) -> list[KerasTensor]:
        node = self.producers[0].get(id(tensor))
        return [] if node is None else list(filter(is_symbolic, _flatten_arguments(node)))

    def _is_section(self, start: KerasTensor, end: KerasTensor, b: KerasTensor) -> bool:
        kinds = {(tuple(x.shape), x.dtype) for x in (start, end, b)}
        if len(kinds) > 1 or not self._equals(start, b):
            return False
        side_inputs: list[tuple[Any, Any]] = []
        queue, seen = [end], {id(end), id(start)}
        for tensor in queue:
            partner = None if tensor is end else self._find_partner(tensor)
            node = self.producers[0].get(id(tensor))
            if partner is not None:
                side_inputs.append((tensor, partner))
                continue
            if node is None or node.layer.weights:
                return False
            new = {id(x): x for x in self._list_read(tensor) if id(x) not in seen}
            seen.update(new)
            queue += new.values()
        self.side_inputs[id(start), id(end)] = side_inputs
        return True

    def _find_partner(self, a: KerasTensor) -> KerasTensor | None:
        """Return the tensor `b` of `tested` that equals `a`, or None."""
        if (index := self.inputs[0].get(id(a))) is not None:
            b = self.tested.model.inputs[index]
            self.starts[id(a), id(b)] = a
            return b
        layer = self.producers[0][id(a)].layer
        name = name_in_tensorflow(layer)
        for node in self.tested.nodes:
            if node.layer is layer or (name and name_in_tensorflow(node.layer) == name):
                for b in tf.nest.flatten(node.outputs):
                    if self._equals(a, b):
                        self.starts[id(a), id(b)] = a
                        return b
        return None

    def _rebuild(self, a: KerasTensor, b: KerasTensor) -> KerasTensor:
        """Return `a`. If a section ends at `a`, return the output of its `TrainingOnly`."""
        start = self.starts[id(a), id(b)]
        self._rebuild_node(start, b)
        if start is a:
            return a
        if id(a) not in self.sections:
            name = f"in_training_{len(self.sections)}" if self.sections else "in_training"
            side_inputs = self.side_inputs[id(start), id(a)]
            model = keras.Model([start, *(x for x, _ in side_inputs)], a)
            layer = TrainingOnly(copy_with_all_arguments(model), name=name)
            given = [start, *(self._rebuild(x, y) for x, y in side_inputs)]
            self.sections[id(a)] = layer(start, given=given) if side_inputs else layer(start)
        return self.sections[id(a)]

    def _rebuild_node(self, a: KerasTensor, b: KerasTensor) -> None:
        """Replace the inputs of a node by results of `_rebuild`, and `training=True` by None."""
        node = self.producers[0].get(id(a))
        if node is None or node in self.rebuilt:
            return
        self.rebuilt.add(node)

        def rebuild(x: Any, y: Any) -> Any:
            if is_symbolic(x):
                return self._rebuild(x, y)
            return None if _is_phase(x, y) else x

        nodes = node, self.producers[1][id(b)]
        arguments = [(n.call_args, dict(n.call_kwargs)) for n in nodes]
        args, kwargs = tf.nest.map_structure(rebuild, *arguments)
        Node(node.layer, args, kwargs, outputs=node.outputs)


def _find_producers(trace: Trace) -> dict[int, Node]:
    return {id(x): node for node in trace.nodes for x in tf.nest.flatten(node.outputs)}


def _flatten_arguments(node: Node) -> list[Any]:
    return tf.nest.flatten((node.call_args, node.call_kwargs))


def _sort_nodes(trace: Trace) -> list[Node]:
    """Return the nodes of a trace, sorted depth-first from the outputs.

    An additional Dropout in one of two traces does not change the order of the other nodes.
    """
    producers = _find_producers(trace)
    order: dict[Node, None] = {}
    waiting = [producers[id(x)] for x in tf.nest.flatten(trace.outputs)[::-1] if id(x) in producers]
    while waiting:
        read = [producers.get(id(x)) for x in _flatten_arguments(waiting[-1])[::-1]]
        if before := [node for node in read if node is not None and node not in order]:
            waiting += before
        else:
            order[waiting.pop()] = None
    return list(order)


def _index_tensors(trace: Trace, noise: set[Node]) -> dict[int, int]:
    """Number the tensors of a trace. A node in `noise` has the same number for input and output."""
    indices = {id(tensor): index for index, tensor in enumerate(trace.model.inputs)}
    count = len(indices)
    for node in _sort_nodes(trace):
        outputs = tf.nest.flatten(node.outputs)
        if node in noise:
            indices[id(outputs[0])] = indices[id(node.call_args[0])]
            continue
        indices.update((id(tensor), count + index) for index, tensor in enumerate(outputs))
        count += len(outputs)
    return indices


def _identify(node: Node) -> Any:
    """Return a key that is equal for two nodes if they compute the same function.

    Layers without weights, such as those that `keras.layers.add` creates, are equal if their
    configurations are equal.
    """
    layer = node.layer
    if name := name_in_tensorflow(layer):
        return type(layer), name
    if isinstance(layer, OwnGradient):
        return type(layer), layer.operations()
    with contextlib.suppress(Exception):  # A custom `get_config` may fail or return None.
        if not layer.weights:
            return type(layer), {**layer.get_config(), "name": ""}
    return layer


def _is_equal(a: Any, b: Any) -> bool:
    if tf.is_tensor(a) or isinstance(a, np.ndarray):
        x, y = np.asarray(a), np.asarray(b)
        return x.shape == y.shape and bool(np.all((x == y) | ((x != x) & (y != y))))  # NaN == NaN.
    return bool(a is b or a == b)


def _is_phase(a: object, b: object) -> bool:
    """Return True if an argument is True in `trained` and False in `tested`."""
    return a is True and b is False
