"""A Keras model as a flat list of layer calls, and back again.

`read` turns a Sequential or functional model into a `Graph`: one `Call` for each time a layer is
called, with the `Value`s that flow between them. Nested models are flattened, and shared layers
appear once per call. `rebuild` makes a model from a graph, call by call.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any

import tensorflow as tf

from keras_qat.graph.loadable_config import as_one_array, loadable
from keras_qat.helper_layers.operations import CarryMask
from keras_qat.keras2 import backend
from keras_qat.keras2.backend import keras
from keras_qat.keras2.layers_and_models import (
    bind_options,
    nested_inputs,
    nested_outputs,
    nodes_of,
    takes_training,
)
from keras_qat.keras2.names_in_configs import note_names
from keras_qat.keras2.readability import check_readable, is_graph_model

_Model = keras.Model


@dataclasses.dataclass(eq=False)
class Value:
    """A tensor of the graph: the output of a call, or an input of the model (no producer).

    `masked` says whether it carries a Keras mask, which some of the following layers use. `rows` is
    how much of an open first axis stands for each example: 1, and 3 behind a reshape from
    (examples, 3, 4) to (-1, 4).
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str
    producer: Call | None = None
    masked: bool = False
    rows: Fraction = Fraction(1)

    @property
    def is_float(self) -> bool:
        """True for a tensor of floating-point numbers, which can be quantized."""
        return tf.as_dtype(self.dtype).is_floating

    @property
    def is_complex(self) -> bool:
        """True for a tensor of complex numbers, which no operator of a file takes."""
        return tf.as_dtype(self.dtype).is_complex

    @property
    def inference_dtype(self) -> str:
        """The type at inference: float32 for any floating-point type."""
        return "float32" if self.is_float else self.dtype

    def __repr__(self) -> str:
        return f"<{self.name} {self.shape}>"


@dataclasses.dataclass(eq=False)
class Call:
    """A call of a layer.

    Args:
        layer: the layer, of the model that was read or made by `lower`.
        args: positional arguments: a structure with `Value`s for the tensors.
        kwargs: keyword arguments, likewise.
        outputs: a structure of `Value`s.
        name: the layer's name, prefixed with the names of the models around it.
        origin: the name of the user's layer that this call is a part of.
        source: the user's layer that this call is a part of.
        within: the layers that were opened to reach this call, outermost first.
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
        self.origin = self.origin or self.name
        self.source = self.layer if self.source is None else self.source
        for value in values_in(self.outputs):
            value.producer = self

    def as_part_of(self, call: Call) -> Call:
        """Marks the call as a part of what `call` became, and returns it."""
        self.origin, self.source, self.within = call.origin, call.source, call.within
        return self

    @property
    def inputs(self) -> list[Value]:
        """The values that the call reads, in order."""
        return values_in((self.args, self.kwargs))

    @property
    def output(self) -> Value:
        """The value that a call with one output writes."""
        return values_in(self.outputs)[0]

    def __repr__(self) -> str:
        return f"<{type(self.layer).__name__} {self.name}>"


@dataclasses.dataclass
class Graph:
    """A model as calls in the order in which they compute.

    Args:
        name: the model's name.
        inputs: a structure of `Value`s, as the model takes it.
        outputs: a structure of `Value`s, as the model returns it.
        output_names: the model's names for its outputs.
        calls: the calls that the outputs depend on.
        weights: layer made by `lower` -> the initial values of its weights.
        loss_only: calls that only added losses and metrics depend on. They are not exported.
        closed: name of each call whose layer could not be opened -> the reason.
        in_float: name of each call that must not read quantized values -> the reason.
    """

    name: str
    inputs: Any
    outputs: Any
    output_names: list[str]
    calls: list[Call]
    weights: dict[Any, list[Any]] = dataclasses.field(default_factory=dict)
    loss_only: list[Call] = dataclasses.field(default_factory=list)
    closed: dict[str, str] = dataclasses.field(default_factory=dict)
    in_float: dict[str, str] = dataclasses.field(default_factory=dict)

    def consumers(self) -> dict[Value, list[Call]]:
        """Returns the calls that read each value, those of `loss_only` included."""
        consumers: dict[Value, list[Call]] = {value: [] for value in self.values()}
        for call in [*self.calls, *self.loss_only]:
            for value in dict.fromkeys(call.inputs):
                consumers.setdefault(value, []).append(call)
        return consumers

    def only_readers(self) -> dict[Value, Call]:
        """Returns value -> the call that alone reads it; model outputs are read outside, too."""
        outputs = set(values_in(self.outputs))
        readers = {value: calls for value, calls in self.consumers().items() if len(calls) == 1}
        return {value: call for value, (call,) in readers.items() if value not in outputs}

    def values(self) -> list[Value]:
        """Returns all values: the model's inputs, then the outputs of each call."""
        return values_in(self.inputs) + [v for call in self.calls for v in values_in(call.outputs)]

    def call_counts(self) -> dict[Any, int]:
        """Returns how often each layer is called."""
        return Counter(call.layer for call in self.calls)


def values_in(structure: Any) -> list[Value]:
    """Returns the `Value`s in a structure, in order."""
    return [leaf for leaf in tf.nest.flatten(structure) if isinstance(leaf, Value)]


def map_values(function: Callable[[Value], Any], structure: Any) -> Any:
    """Returns the structure with each `Value` replaced by `function(value)`."""
    return tf.nest.map_structure(
        lambda leaf: function(leaf) if isinstance(leaf, Value) else leaf, structure
    )


def read(model: Any) -> Graph:
    """Reads a built Sequential or functional model.

    Raises:
        ValueError: if the model cannot be read, or has tensors without elements.
    """
    check_readable(model)
    tensors: dict[int, Value] = {}
    masks: dict[Value, Any] = {}
    """Value that carries a mask -> a tensor or a value of that mask's shape and type."""

    def new_value(tensor: Any, name: str, mask: Any = None) -> Value | None:
        if _is_none(tensor):
            return None
        mask = backend.mask_of(tensor) if mask is None else mask
        if tensor.shape.rank is None:
            raise ValueError(
                f"The number of axes of the output of layer '{name}' of '{model.name}' is not "
                f"known. Set its shape in the layer: x = tf.ensure_shape(x, (None, ...))."
            )
        value = Value(name, tuple(tensor.shape), tensor.dtype.name, masked=mask is not None)
        if value.masked:
            masks[value] = mask
        return value

    def value_of(leaf: Any) -> Any:
        return tensors.get(id(leaf), leaf) if hasattr(leaf, "_keras_history") else leaf

    inputs = tf.nest.map_structure(
        lambda tensor: new_value(tensor, tensor._keras_history.layer.name), nested_inputs(model)
    )

    def keep(symbols: Iterable[Any], values: Iterable[Value]) -> None:
        tensors.update(zip(map(id, symbols), values, strict=True))

    calls: list[Call] = []
    counts: Counter[Any] = Counter()

    def with_mask(value: Value, mask: Value | None, path: str) -> Value:
        """Returns a value that carries the mask with which a nested model is called."""
        if mask is None:
            return value
        counts[path] += 1
        layer = CarryMask(name=f"masked_{counts[path]}", dtype=value.dtype)
        name = f"{path}/{layer.name}"
        masked = Value(name, value.shape, value.dtype, masked=True)
        calls.append(Call(layer, (value,), {"mask": mask}, masked, name))
        masks[masked] = mask
        return masked

    def trace(model: Any, inputs: Iterable[Value], path: str, training: Any) -> Any:
        keep(model.inputs, inputs)
        for node in nodes_of(model):
            args, kwargs = tf.nest.map_structure(value_of, (node.call_args, dict(node.call_kwargs)))
            args = tuple(map(as_one_array, args))
            layer, name = node.layer, path + node.layer.name
            args, kwargs = bind_options(layer, args, kwargs)
            if isinstance(layer, keras.layers.InputLayer):
                # It passes its input on. Keras cannot load a file with such a call.
                keep([node.outputs], values_in((args, kwargs)))
                continue
            if is_graph_model(layer):
                inner = kwargs.get("training")
                flat = layer._flatten_to_reference_inputs(args[0] if args else kwargs["inputs"])
                if kwargs.get("mask") is not None:
                    given = zip(flat, tf.nest.flatten(kwargs["mask"]), strict=True)
                    flat = [with_mask(value, mask, name) for value, mask in given]
                outputs = trace(layer, flat, f"{name}/", training if inner is None else inner)
                keep(tf.nest.flatten(node.outputs), values_in(outputs))
                continue
            if training is not None and kwargs.get("training") is None and takes_training(layer):
                kwargs["training"] = training
            counts[layer] += 1
            labels = iter(_output_names(name, counts[layer], node.outputs))
            handed = iter(_masks_handed_on(layer, args, kwargs, masks) if path else ())
            outputs = tf.nest.map_structure(
                lambda tensor, labels=labels, handed=handed: new_value(
                    tensor, next(labels), next(handed, None)
                ),
                node.outputs,
            )
            known = [symbol for symbol in tf.nest.flatten(node.outputs) if not _is_none(symbol)]
            keep(known, values_in(outputs))
            calls.append(Call(layer, args, kwargs, outputs, name))
        return tf.nest.map_structure(value_of, nested_outputs(model))

    outputs = trace(model, values_in(inputs), "", None)
    needed, loss_only = split_loss_only(calls, outputs)
    if empty := [value.name for value in tensors.values() if 0 in value.shape[1:]]:
        raise ValueError(
            f"'{model.name}' has tensors without elements, which TFLite cannot compute: "
            f"{', '.join(dict.fromkeys(empty))}. Take these layers out."
        )
    return Graph(model.name, inputs, outputs, list(model.output_names), needed, loss_only=loss_only)


def _masks_handed_on(layer: Any, args: Any, kwargs: Any, masks: Mapping[Value, Any]) -> list[Any]:
    """Returns the masks of a call's outputs that come from those of its inputs.

    Of a nested model Keras' own symbolic tensors do not tell: its masks come from outside.
    """
    first = args[0] if args else next(iter(kwargs.values()))
    like = lambda tensor: None if tensor is None else symbolic(tensor.shape, tensor.dtype)  # noqa: E731
    given = kwargs.get("mask")
    read = map_values(lambda value: like(masks.get(value)), first)
    read = read if given is None else map_values(like, given)
    if not layer.supports_masking or all(mask is None for mask in tf.nest.flatten(read)):
        return []
    return tf.nest.flatten(layer.compute_mask(map_values(like, first), read))


def _is_none(symbol: Any) -> bool:
    """Returns whether an output stands for None, which some layers return beside tensors."""
    return not hasattr(symbol.type_spec, "shape")


def _output_names(name: str, call_number: int, outputs: Any) -> list[str]:
    """Returns the names of a call's outputs: that of the layer, marked by call and by output."""
    label = f"{name}#{call_number}" if call_number > 1 else name
    count = len(tf.nest.flatten(outputs))
    return [label] if count == 1 else [f"{label}:{index}" for index in range(count)]


def symbols(model: Any) -> dict[str, Any]:
    """Returns the symbolic tensors of a model without nested ones, by the names `read` gives."""
    tensors: dict[str, Any] = {}
    counts: Counter[Any] = Counter()
    for node in nodes_of(model):
        counts[node.layer] += 1
        names = _output_names(node.layer.name, counts[node.layer], node.outputs)
        tensors.update(zip(names, tf.nest.flatten(node.outputs), strict=True))
    return tensors


def split_loss_only(calls: list[Call], outputs: Any) -> tuple[list[Call], list[Call]]:
    """Splits calls into those that the outputs depend on and all others."""
    read, needed = set(values_in(outputs)), set()
    for call in reversed(calls):
        if read.intersection(values_in(call.outputs)):
            needed.add(call)
            read.update(call.inputs)
    return [c for c in calls if c in needed], [c for c in calls if c not in needed]


def config_of(model: Any) -> dict[str, Any]:
    """Returns a model's configuration as a functional one, for `keras.Model.from_config`."""
    inputs, outputs = nested_inputs(model), nested_outputs(model)
    functional = _Model(inputs, outputs, name=model.name)
    functional.use_legacy_config = getattr(model, "use_legacy_config", None)  # Set for .h5 files.
    for node in nodes_of(model):
        if add := _ADDED.get(type(node.layer).__name__):
            add(functional, node.layer, node.call_args[0])
    config = loadable(functional, functional.get_config())
    note_names(functional, config)
    return config


_ADDED: dict[str, Callable[[Any, Any, Any], None]] = {
    "AddLoss": lambda model, layer, tensor: model.add_loss(tensor),
    "AddMetric": lambda model, layer, tensor: model.add_metric(
        tensor, layer.metric_name, aggregation=layer.aggregation
    ),
}
"""Class of a layer that `add_loss` or `add_metric` makes -> a function that adds it to a copy."""


def _call_layer(call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
    return call.layer(*args, **kwargs)


Apply = Callable[[Call, Any, dict[str, Any]], Any]
"""Computes the outputs of a call from its arguments."""


def rebuild(graph: Graph, model_class: Any = _Model, apply: Apply = _call_layer) -> Any:
    """Makes a model from a graph, with the layers of its calls or with what `apply` calls."""
    inputs = map_values(lambda value: symbolic(value.shape, value.dtype, value.name), graph.inputs)
    tensors = dict(zip(values_in(graph.inputs), tf.nest.flatten(inputs), strict=True))
    _compute(graph.calls, tensors, apply)
    outputs = map_values(tensors.__getitem__, graph.outputs)
    model = model_class(inputs=inputs, outputs=outputs, name=graph.name)
    added = {call: _ADDED.get(type(call.layer).__name__) for call in graph.loss_only}
    _compute([call for call, add in added.items() if not add], tensors, apply)
    for call, add in added.items():
        if add:
            add(model, call.layer, tensors[call.inputs[0]])
    return model


def symbolic(shape: Any, dtype: Any, name: str | None = None) -> Any:
    """Returns a symbolic input whose shape includes the batch."""
    return keras.Input(type_spec=tf.TensorSpec(shape, dtype), name=name)


def evaluate(graph: Graph, inputs: list[Any], apply: Apply = _call_layer) -> Any:
    """Computes a graph on a flat list of inputs and returns the structure of its outputs.

    `apply` computes the outputs of a call from its arguments; by default it calls the layer.
    """
    tensors = dict(zip(values_in(graph.inputs), inputs, strict=True))
    last_readers = {value: call for call in graph.calls for value in call.inputs}
    outputs = set(values_in(graph.outputs))
    for call in graph.calls:
        _compute([call], tensors, apply)
        for value in set(call.inputs) - outputs:
            if last_readers[value] is call:  # Frees memory where nothing is traced.
                del tensors[value]
    return map_values(tensors.__getitem__, graph.outputs)


def _compute(calls: list[Call], tensors: dict[Value, Any], apply: Apply) -> None:
    """Computes calls in order and adds their outputs to `tensors`."""
    for call in calls:
        args, kwargs = map_values(tensors.__getitem__, (call.args, call.kwargs))
        outputs = tf.nest.flatten(call.outputs), tf.nest.flatten(apply(call, args, kwargs))
        tensors.update(zip(*outputs, strict=True))


def is_batch_norm(call: Call) -> bool:
    """Returns whether a call is a BatchNormalization."""
    return isinstance(call.layer, backend.keras.layers.BatchNormalization)
