"""Represents a Keras model as a list of layer calls in topological order.

The package `lowering` replaces calls by calls of layers that can be quantized.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

import tensorflow as tf

from keras_qat.keras2.backend import keras


@dataclasses.dataclass(eq=False)
class Value:
    """A tensor of the graph.

    Values are mutable, because producers and inferred shapes are set later.

    Args:
        producer: the call that computes the tensor, or None for a model input.
        masked: True if the tensor has a Keras mask.
        rows: the size of the first axis divided by the batch size. Usually 1. It is 3 after a
            reshape from [batch, 3, 4] to [-1, 4]. Only used if `shape[0]` is None.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str
    producer: Call | None = None
    masked: bool = False
    rows: Fraction = Fraction(1)

    @property
    def is_float(self) -> bool:
        """True for floating-point tensors. Only these tensors can be quantized."""
        return tf.as_dtype(self.dtype).is_floating

    @property
    def is_complex(self) -> bool:
        """True for complex tensors, which exported files do not support."""
        return tf.as_dtype(self.dtype).is_complex

    @property
    def elements(self) -> int | None:
        """The number of values in one example, or None if a size is unknown."""
        first, *sizes = self.shape or (1,)
        rest = multiply_sizes(sizes)
        return rest if rest is None else int(rest * (self.rows if first is None else first))

    @property
    def inference_dtype(self) -> str:
        """The data type at inference. It is float32 for all floating-point types."""
        return "float32" if self.is_float else self.dtype

    def __repr__(self) -> str:
        return f"<{self.name} {self.shape}>"


@dataclasses.dataclass(eq=False, frozen=True)
class Call:
    """A call of a layer.

    A new call becomes the `producer` of those outputs that have no producer yet. When a `Graph` is
    created, each of its calls becomes the producer of all outputs of the call.

    Args:
        layer: the layer, from the model or created by lowering.
        args: positional arguments. Tensors are `Value`s, also in nested lists.
        kwargs: keyword arguments. Tensors are `Value`s, also in nested lists.
        outputs: a `Value`, or a nested list or dict of `Value`s.
        name: the layer's name, preceded by names of nested models, such as "encoder/dense".
        origin: the name of a layer in the user's model. If several calls replace this layer, all of
            them have this `origin`.
        source: the user's layer with the name `origin`.
        within: custom layers that were traced and replaced by this and other calls, outermost
            first.
    """

    layer: Any
    args: Any
    kwargs: dict[str, Any]
    outputs: Any
    name: str
    origin: str = ""
    source: Any = None
    within: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "origin", self.origin or self.name)
        object.__setattr__(self, "source", self.layer if self.source is None else self.source)
        for value in flatten_values(self.outputs):
            value.producer = value.producer or self

    def as_part_of(self, call: Call) -> Call:
        """Returns a copy of this call with the `origin`, `source` and `within` of another call."""
        return self.replace(origin=call.origin, source=call.source, within=call.within)

    def replace(self, **changes: Any) -> Call:
        """Returns a copy with changed fields. The copy becomes the producer of the outputs."""
        call = dataclasses.replace(self, **changes)
        call.take_over_outputs()
        return call

    def take_over_outputs(self) -> None:
        for value in flatten_values(self.outputs):
            value.producer = self

    @functools.cached_property
    def inputs(self) -> list[Value]:
        return flatten_values((self.args, self.kwargs))

    @property
    def output(self) -> Value:
        return flatten_values(self.outputs)[0]

    def __repr__(self) -> str:
        return f"<{type(self.layer).__name__} {self.name}>"


@dataclasses.dataclass
class Graph:
    """A model as a list of calls in topological order.

    Args:
        name: the model's name.
        inputs: a `Value`, or a list or dict of `Value`s, as in the Keras model.
        outputs: a `Value`, or a list or dict of `Value`s, as in the Keras model.
        output_names: names of the outputs in the Keras model.
        calls: the calls that the outputs depend on.
        weights: maps layers created by lowering to initial weights.
        loss_only: calls that only compute added losses and metrics. They are not exported.
        opaque: maps names of calls to reasons why a layer could not be traced.
        in_float: maps names of calls to reasons why a call must not read quantized values.
    """

    name: str
    inputs: Any
    outputs: Any
    output_names: list[str]
    calls: list[Call]
    weights: dict[Any, list[Any]] = dataclasses.field(default_factory=dict)
    loss_only: list[Call] = dataclasses.field(default_factory=list)
    opaque: dict[str, str] = dataclasses.field(default_factory=dict)
    in_float: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for call in [*self.calls, *self.loss_only]:
            call.take_over_outputs()

    def consumers(self, losses: bool = True) -> dict[Value, list[Call]]:
        """Returns the calls that read each value. If `losses`, includes `loss_only` calls."""
        consumers: dict[Value, list[Call]] = {value: [] for value in self.values()}
        for call in [*self.calls, *(self.loss_only if losses else ())]:
            for value in dict.fromkeys(call.inputs):
                consumers.setdefault(value, []).append(call)
        return consumers

    def find_single_consumers(self) -> dict[Value, Call]:
        """Returns {value: consumer} for values with one consumer. Model outputs are omitted."""
        outputs = set(flatten_values(self.outputs))
        consumers = {value: calls for value, calls in self.consumers().items() if len(calls) == 1}
        return {value: call for value, (call,) in consumers.items() if value not in outputs}

    def values(self) -> list[Value]:
        """Returns the model's inputs, then the outputs of each call."""
        return flatten_values([self.inputs, *(call.outputs for call in self.calls)])

    def count_calls(self) -> dict[Any, int]:
        return Counter(call.layer for call in self.calls)


def multiply_sizes(sizes: Iterable[int | None]) -> int | None:
    """Returns the product of sizes, or None if a size is unknown."""
    known = list(sizes)
    return None if None in known else math.prod(known)  # type: ignore[arg-type]


def flatten_values(structure: object) -> list[Value]:
    """Returns the `Value`s in a structure, in order."""
    return [leaf for leaf in tf.nest.flatten(structure) if isinstance(leaf, Value)]


def map_values(function: Callable[[Value], object], structure: object) -> Any:
    """Replaces each `Value` in a structure by `function(value)`."""
    return tf.nest.map_structure(
        lambda leaf: function(leaf) if isinstance(leaf, Value) else leaf, structure
    )


def split_loss_only(calls: list[Call], outputs: object) -> tuple[list[Call], list[Call]]:
    """Returns the calls that `outputs` depend on, and all remaining calls."""
    read, needed = set(flatten_values(outputs)), set()
    for call in reversed(calls):
        if read.intersection(flatten_values(call.outputs)):
            needed.add(call)
            read.update(call.inputs)
    return [c for c in calls if c in needed], [c for c in calls if c not in needed]


def drop_unused_calls(graph: Graph) -> Graph:
    read = flatten_values([graph.outputs, *(call.inputs for call in graph.loss_only)])
    return dataclasses.replace(graph, calls=split_loss_only(graph.calls, read)[0])


def is_batch_norm(call: Call) -> bool:
    return isinstance(call.layer, keras.layers.BatchNormalization)
