"""Inference with ranges and weights as of one moment.

Folding BatchNormalization, quantizing weights, the multipliers of kernels: all of that follows from
ranges and weights alone and takes many small operations. So it is prepared once after the weights
have changed, not for each batch. What was prepared lies in variables, and inference is traced once
to read those. It is traced anew only where other numbers take other branches.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.control_flow import Choice
from keras_qat.graph.calls import Graph, flatten_values
from keras_qat.integer_graph.execute import Prepared
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.keras2.backend import trace_after_few_calls

DECIDES = 3
"""Times that inference is traced for the branches that ranges and weights choose. If they go on
changing, it is traced with all branches."""

Resolve = Callable[[], ResolvedGraph]
Prepare = Callable[[ResolvedGraph], Prepared]
Compute = Callable[[ResolvedGraph, Prepared, list[Any]], list[Any]]


class CachedInference:
    """A function of a model's inputs that computes with the ranges and weights of `refresh`.

    Args:
        model: a quantization-aware model.
        graph: its calls.
        resolve: returns the resolved graph, with tensors for ranges and weights as they are now.
        prepare: computes what follows from ranges and weights.
        compute: computes tensors from the resolved graph, what was prepared, and the inputs.
    """

    def __init__(
        self, model: Any, graph: Graph, resolve: Resolve, prepare: Prepare, compute: Compute
    ) -> None:
        self.graph = graph
        self._resolve, self._prepare, self._compute = resolve, prepare, compute
        self.version = 0
        """Times that inference was traced. Functions of an earlier version are out of date."""
        self.resolved: ResolvedGraph | None = None
        """The graph that `resolve` made of the weights that `look` has seen, if it was kept."""
        self._weights: list[Any] = []
        """The values of the model's weights in the last `look`."""
        self._changes = self._prepared = 0
        """Times that `look` has seen other weights, and the one that the last `refresh` took."""
        self._eager: Callable[..., list[Any]] | None = None
        """Inference that is not traced, if the last `refresh` asked for it."""
        # In a function, as reading them one by one takes ten times as long.
        self._read = trace_after_few_calls(lambda: [weight.value() for weight in model.weights])

    def look(self) -> None:
        """Forgets `resolved` if ranges or weights have changed."""
        weights = self._read()
        if not self._weights or not all(map(_unchanged, self._weights, weights)):
            self._weights, self.resolved = weights, None
            self._changes += 1

    def refresh(self, eagerly: bool = False) -> None:
        """Takes ranges and weights as they are now; `eagerly` says not to trace inference."""
        self.look()
        changes, is_same = self._changes, eagerly is (self._eager is not None)
        if changes == self._prepared and is_same:
            return
        resolved = self._resolve()
        numbers: Any = self._prepare(resolved)
        finite = all(map(_is_finite, self._weights))
        numbers = ones_unless(finite, numbers), tf.constant(0.0 if finite else np.nan)
        self._eager = functools.partial(self._computed, resolved, numbers) if eagerly else None
        is_new = not self.is_ready and not eagerly
        if is_new:
            self._store = NumberStore(numbers)
        if is_new or not (eagerly or self._store.assign(numbers)):
            self._trace(resolved)
        self._prepared = changes

    @property
    def is_ready(self) -> bool:
        """Whether inference was traced."""
        return self.version > 0

    def __call__(self, *inputs: Any) -> list[Any]:
        """Computes the tensors, given one tensor for each input."""
        if self._eager is not None and tf.executing_eagerly():
            return self._eager(*inputs)
        return list(self._traced(*inputs))

    def _computed(self, resolved: ResolvedGraph, numbers: Any, *inputs: Any) -> list[Any]:
        """Computes the tensors; `numbers` are prepared ones, and what is added to real outputs."""
        prepared, offset = numbers
        tensors = self._compute(resolved, prepared, list(inputs))
        return [add_to_real(offset, tensor) for tensor in tensors]

    def _trace(self, resolved: ResolvedGraph) -> None:
        """Traces the inference, for any batch size: Keras lets that of an input vary, too."""
        inputs = [
            tf.TensorSpec(value.shape, value.dtype) for value in flatten_values(self.graph.inputs)
        ]
        open_inputs = [tf.TensorSpec([None, *spec.shape[1:]], spec.dtype) for spec in inputs]

        def compute(*inputs: Any) -> list[Any]:
            return self._computed(known[0], self._store.read(self.version < DECIDES), *inputs)

        known = [resolved]
        traced = tf.function(compute, autograph=False)
        try:
            self._traced = traced.get_concrete_function(*open_inputs)
        except (TypeError, ValueError):  # A layer reads the batch size: x.shape[0].
            if open_inputs == inputs:
                raise
            self._traced = traced.get_concrete_function(*inputs)
        known.clear()  # It holds weights: no reason to keep them with what was traced.
        self.version += 1


def add_to_real(offset: Any, tensor: Any) -> Any:
    """Adds NaN to real numbers where weights are not finite, as a float model would return NaN."""
    return tensor + tf.cast(offset, tensor.dtype) if tensor.dtype.is_floating else tensor


def _unchanged(before: Any, now: Any) -> bool:
    """Whether a variable has the value it had. What is still held is never overwritten."""
    one, other = np.asarray(before), np.asarray(now)
    return one.ctypes.data == other.ctypes.data or np.array_equal(one, other)


def _is_finite(weight: Any) -> bool:
    values = np.asarray(weight)
    return values.dtype.kind != "f" or bool(np.isfinite(values).all())


class _Slot:
    """Stands for a tensor in a structure, by its index among all tensors."""

    def __init__(self, index: int) -> None:
        self.index = index


class NumberStore:
    """Holds the tensors of a structure. Scalars of a type share a variable, as do vectors.

    Args:
        numbers: tuples, lists, dicts and dataclasses, with eager tensors among their leaves.
    """

    def __init__(self, numbers: Any) -> None:
        tensors = _tensors_in(numbers)
        indices = iter(range(len(tensors)))
        self._structure = _map_tensors(lambda tensor: _Slot(next(indices)), numbers)
        packs: dict[Any, list[int]] = {}
        for index, tensor in enumerate(tensors):
            key = (tensor.dtype.name, tensor.shape.rank) if tensor.shape.rank < 2 else index
            packs.setdefault(key, []).append(index)
        self._packs, self._shapes = packs, [tensor.shape for tensor in tensors]
        self._choices: dict[int, Choice] = {}
        packed = self._packed(tensors)
        with tf.init_scope():
            self._variables = [tf.Variable(pack, trainable=False) for pack in packed]

    def assign(self, numbers: Any) -> bool:
        """Assigns other numbers of the same structure to the variables.

        Returns:
            Whether what was traced with `read` computes with them: they choose the same branches.
        """
        packed = self._packed(_tensors_in(numbers))
        for variable, value in zip(self._variables, packed, strict=True):
            variable.assign(value)
        active = [(index, choice) for index, choice in self._choices.items() if choice.is_taken]
        return all(choice.value is self._conditions[index] for index, choice in active)

    def read(self, decides: bool) -> Any:
        """Returns the structure with tensors of the graph that is being traced.

        Args:
            decides: whether scalar conditions are `Choice`s instead of tensors.
        """
        tensors: dict[int, Any] = {}
        for pack, variable in zip(self._packs.values(), self._variables, strict=True):
            value, shapes = variable.value(), [self._shapes[index] for index in pack]
            tensors |= zip(pack, _unpacked(value, shapes), strict=True)
        conditions = self._conditions.items() if decides else ()
        self._choices = {index: Choice(value, tensors[index]) for index, value in conditions}
        known = tensors | self._choices

        def filled(leaf: Any) -> Any:
            return known[leaf.index] if isinstance(leaf, _Slot) else leaf

        return _mapped(filled, self._structure)

    def _packed(self, tensors: list[Any]) -> list[Any]:
        """Returns the values of the variables, and notes which conditions are true."""
        scalars = self._packs.get(("bool", 0), [])
        self._conditions = {index: bool(np.asarray(tensors[index])) for index in scalars}
        packs = [[tensors[index] for index in pack] for pack in self._packs.values()]
        return [_pack(pack) for pack in packs]


def ones_unless(finite: Any, numbers: Any) -> Any:
    """Returns the same structure, with ones for all real numbers unless weights are finite.

    Tables have no entry for NaN.

    Args:
        finite: a bool, or a scalar tensor.
        numbers: as for `NumberStore`.
    """
    if finite is True:
        return numbers

    def one_unless(x: Any) -> Any:
        return tf.where(finite, x, tf.ones_like(x)) if x.dtype.is_floating else x

    return _map_tensors(one_unless, numbers)


def _pack(tensors: list[Any]) -> Any:
    """Joins scalars, or vectors, to one tensor."""
    if len(tensors) == 1:
        return tensors[0]
    return tf.stack(tensors) if tensors[0].shape.rank == 0 else tf.concat(tensors, 0)


def _unpacked(value: Any, shapes: list[Any]) -> list[Any]:
    """Splits a tensor that `_pack` made into tensors of the given shapes."""
    if len(shapes) == 1:
        return [value]
    return tf.unstack(value) if shapes[0].rank == 0 else tf.split(value, [n for (n,) in shapes])


def _tensors_in(numbers: Any) -> list[Any]:
    tensors: list[Any] = []
    _map_tensors(tensors.append, numbers)
    return tensors


def _map_tensors(change: Callable[[Any], Any], numbers: Any) -> Any:
    return _mapped(lambda leaf: change(leaf) if tf.is_tensor(leaf) else leaf, numbers)


def _mapped(change: Callable[[Any], Any], numbers: Any) -> Any:
    """Returns a structure with other leaves."""
    if isinstance(numbers, (tuple, list)):
        parts = [_mapped(change, part) for part in numbers]
        return type(numbers)(*parts) if hasattr(numbers, "_fields") else tuple(parts)
    if isinstance(numbers, dict):
        return {name: _mapped(change, part) for name, part in numbers.items()}
    if dataclasses.is_dataclass(numbers) and not isinstance(numbers, type):
        names = [field.name for field in dataclasses.fields(numbers)]
        fields = {name: _mapped(change, getattr(numbers, name)) for name in names}
        return dataclasses.replace(numbers, **fields)
    return change(numbers)
