"""Inference with cached weights and ranges.

Folded weights and multipliers depend only on weights and ranges, but need many small operations.
These "prepared parameters" are computed when weights change, and are stored in variables. The
traced inference function reads the variables. Some branches of the function also depend on weights.
To be fast, the first traces omit branches that the current weights do not need. If new weights need
other branches, inference is traced again.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.control_flow import Choice
from keras_qat.graph.calls import Graph, flatten_values
from keras_qat.integer_graph.execute import Prepared
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.keras2.backend import keras, trace_after_few_calls, trace_for_any_batch

DECIDES = 3
"""Number of traces that omit branches. Later traces have all branches."""

LARGE = 1 << 26
"""Weights with at least this number of bytes are compared by their hashes."""

Resolve = Callable[[], ResolvedGraph]
Prepare = Callable[[ResolvedGraph], Prepared]
Compute = Callable[[ResolvedGraph, Prepared, list[tf.Tensor]], list[tf.Tensor]]
Structure = TypeVar("Structure")


class CachedInference:
    """Computes outputs with the weights and ranges that the model had in the last `refresh`.

    Args:
        model: a quantization-aware model.
        graph: the calls of `model`.
        resolve: function that returns the resolved graph, whose ranges and weights are tensors.
        prepare: function that returns the prepared parameters of the resolved graph.
        compute: function that returns the results. Its arguments are the resolved graph, the
            prepared parameters and the inputs.
    """

    def __init__(
        self, model: keras.Model, graph: Graph, resolve: Resolve, prepare: Prepare, compute: Compute
    ) -> None:
        self.graph = graph
        self._resolve, self._prepare, self._compute = resolve, prepare, compute
        self.version = 0
        """Number of traces. Functions that call an earlier trace are out of date."""
        self.resolved: ResolvedGraph | None = None
        """A resolved graph that callers store here. `look` removes it if weights have changed."""
        self._weights: list[tf.Tensor | bytes] = []
        """The model's weights in the last `look`, or their hashes if they are large."""
        self.weights_version = self._prepared_version = 0
        """Number of weight changes. `_prepared_version` is the number at the last `refresh`."""
        self.seconds = 0.0
        """The duration of the last `refresh` in seconds, without tracing."""
        self._eager: Callable[..., list[tf.Tensor]] | None = None
        """Inference function for eager execution. None unless the last `refresh` had `eagerly`."""
        # Reading the weights one by one in eager mode takes ten times as long.
        self._read = trace_after_few_calls(lambda: [weight.value() for weight in model.weights])

    def look(self) -> None:
        """Clears `resolved` if a range or weight has changed since the last `look`."""
        weights = list(map(_remember, self._read()))
        if not self._weights or not all(map(_is_unchanged, self._weights, weights)):
            self._weights, self.resolved = weights, None
            self.weights_version += 1

    def refresh(self, eagerly: bool = False) -> None:
        """Prepares inference with the current weights. Does not trace if `eagerly`."""
        self.look()
        version, is_same = self.weights_version, eagerly is (self._eager is not None)
        if version == self._prepared_version and is_same:
            return
        start, resolved = time.perf_counter(), self._resolve()
        finite = all(map(_is_finite, self._read()))
        prepared = replace_unless_finite(finite, self._prepare(resolved))
        self.seconds = time.perf_counter() - start
        offset = tf.constant(0.0 if finite else np.nan)
        self._eager = (
            functools.partial(self._compute_all, resolved, prepared, offset) if eagerly else None
        )
        is_new = not self.is_ready and not eagerly
        if is_new:
            self._store = PreparedStore((prepared, offset))
        if is_new or not (eagerly or self._store.assign((prepared, offset))):
            self._trace(resolved)
        self._prepared_version = version

    @property
    def is_ready(self) -> bool:
        """Whether inference has been traced."""
        return self.version > 0

    def __call__(self, *inputs: tf.Tensor) -> list[tf.Tensor]:
        if self._eager is not None and tf.executing_eagerly():
            return self._eager(*inputs)
        return list(self._traced(*inputs))

    def _compute_all(
        self, resolved: ResolvedGraph, prepared: Prepared, offset: tf.Tensor, *inputs: tf.Tensor
    ) -> list[tf.Tensor]:
        tensors = self._compute(resolved, prepared, list(inputs))
        return [add_to_floats(offset, tensor) for tensor in tensors]

    def _trace(self, resolved: ResolvedGraph) -> None:
        values = flatten_values(self.graph.inputs)
        specs = [tf.TensorSpec(value.shape, value.dtype) for value in values]
        graphs = [resolved]

        def compute(*inputs: tf.Tensor) -> list[tf.Tensor]:
            prepared, offset = self._store.read(self.version < DECIDES)
            return self._compute_all(graphs[0], prepared, offset, *inputs)

        self._traced = trace_for_any_batch(compute, specs)
        graphs.clear()  # The traced function must not keep the weights alive.
        self.version += 1


def add_to_floats(offset: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """Adds 0 to a float tensor, or NaN if a weight of the model is infinite or NaN."""
    return tensor + tf.cast(offset, tensor.dtype) if tensor.dtype.is_floating else tensor


def _remember(weight: tf.Tensor) -> tf.Tensor | bytes:
    """Return a small weight, or a hash of a large weight, such as an embedding table.

    TensorFlow copies a variable when it is read. A copy of a large weight would need too much
    memory.
    """
    values = np.asarray(weight)
    if values.nbytes < LARGE:
        return weight
    return hashlib.sha256(values.reshape(-1).view(np.uint8).data).digest()


def _is_unchanged(before: tf.Tensor | bytes, now: tf.Tensor | bytes) -> bool:
    if isinstance(now, bytes):
        return before == now
    # TensorFlow does not overwrite a buffer that is in use, so equal addresses mean equal values.
    one, other = np.asarray(before), np.asarray(now)
    return one.ctypes.data == other.ctypes.data or np.array_equal(one, other)


def _is_finite(weight: tf.Tensor) -> bool:
    values = np.asarray(weight)
    return values.dtype.kind != "f" or bool(np.isfinite(values).all())


class _Slot:
    """Stands for a tensor in a nested structure. `index` is the position among all tensors."""

    def __init__(self, index: int) -> None:
        self.index = index


class PreparedStore:
    """Stores prepared parameters in variables, which traced graphs read.

    All scalars of a dtype share one variable, and all vectors share another.

    Args:
        prepared: nested tuples, lists, dicts and dataclasses that contain eager tensors.
    """

    def __init__(self, prepared: object) -> None:
        tensors = _list_tensors(prepared)
        indices = iter(range(len(tensors)))
        self._structure = _map_tensors(lambda tensor: _Slot(next(indices)), prepared)
        packs: dict[Any, list[int]] = {}
        for index, tensor in enumerate(tensors):
            key = (tensor.dtype.name, tensor.shape.rank) if tensor.shape.rank < 2 else index
            packs.setdefault(key, []).append(index)
        self._packs, self._shapes = packs, [tensor.shape for tensor in tensors]
        self._choices: dict[int, Choice] = {}
        packed = self._pack(tensors)
        with tf.init_scope():
            self._variables = [tf.Variable(pack, trainable=False) for pack in packed]

    def assign(self, prepared: object) -> bool:
        """Assigns new parameters with the same structure to the variables.

        Returns False if the last traced graph lacks a branch that these parameters need.
        """
        packed = self._pack(_list_tensors(prepared))
        for variable, value in zip(self._variables, packed, strict=True):
            variable.assign(value)
        active = [(index, choice) for index, choice in self._choices.items() if choice.is_taken]
        return all(choice.value is self._conditions[index] for index, choice in active)

    def read(self, decides: bool) -> Any:
        """Returns the parameters as tensors that a traced graph reads from the variables.

        Args:
            decides: True to return boolean scalars as `Choice`s instead. A `Choice` has a known
                value, so only one branch is traced.
        """
        tensors: dict[int, Any] = {}
        for pack, variable in zip(self._packs.values(), self._variables, strict=True):
            value, shapes = variable.value(), [self._shapes[index] for index in pack]
            tensors |= zip(pack, _unpack(value, shapes), strict=True)
        conditions = self._conditions.items() if decides else ()
        self._choices = {index: Choice(value, tensors[index]) for index, value in conditions}
        known = tensors | self._choices
        return _map_leaves(
            lambda leaf: known[leaf.index] if isinstance(leaf, _Slot) else leaf, self._structure
        )

    def _pack(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Return the values for the variables. Store boolean scalars in `_conditions`."""
        scalars = self._packs.get(("bool", 0), [])
        self._conditions = {index: bool(np.asarray(tensors[index])) for index in scalars}
        return [_pack([tensors[index] for index in pack]) for pack in self._packs.values()]


def replace_unless_finite(finite: bool | tf.Tensor, prepared: Structure) -> Structure:
    """Replaces all float tensors in `prepared` by ones, unless `finite`.

    If a weight is NaN, kernels would otherwise use NaN as an index of a lookup table.
    """
    if finite is True:
        return prepared

    def replace(x: tf.Tensor) -> tf.Tensor:
        return tf.where(finite, x, tf.ones_like(x)) if x.dtype.is_floating else x

    return _map_tensors(replace, prepared)


def _pack(tensors: list[tf.Tensor]) -> tf.Tensor:
    if len(tensors) == 1:
        return tensors[0]
    return tf.stack(tensors) if tensors[0].shape.rank == 0 else tf.concat(tensors, 0)


def _unpack(value: tf.Tensor, shapes: Sequence[tf.TensorShape]) -> list[tf.Tensor]:
    if len(shapes) == 1:
        return [value]
    return tf.unstack(value) if shapes[0].rank == 0 else tf.split(value, [n for (n,) in shapes])


def _list_tensors(structure: object) -> list[tf.Tensor]:
    tensors: list[tf.Tensor] = []
    _map_tensors(tensors.append, structure)
    return tensors


def _map_tensors(change: Callable[[tf.Tensor], Any], structure: Structure) -> Structure:
    return _map_leaves(lambda leaf: change(leaf) if tf.is_tensor(leaf) else leaf, structure)


def _map_leaves(change: Callable[[Any], Any], structure: Any) -> Any:
    if isinstance(structure, (tuple, list)):
        items = [_map_leaves(change, item) for item in structure]
        return type(structure)(*items) if hasattr(structure, "_fields") else tuple(items)
    if isinstance(structure, dict):
        return {name: _map_leaves(change, item) for name, item in structure.items()}
    if dataclasses.is_dataclass(structure) and not isinstance(structure, type):
        names = [field.name for field in dataclasses.fields(structure)]
        fields = {name: _map_leaves(change, getattr(structure, name)) for name in names}
        return dataclasses.replace(structure, **fields)
    return change(structure)
