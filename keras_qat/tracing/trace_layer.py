"""Traces a layer: runs its `call` on symbolic tensors, and records the calls inside.

Python code of the layer runs only once, during tracing. Its results could differ in later calls.
Therefore the results of the trace and the layer are compared at inference, for random inputs.
The traces of training and inference are compared too.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, flatten_values, map_values
from keras_qat.graph.keras_masks import get_first_argument
from keras_qat.graph.operations import read_scalar
from keras_qat.graph.read_model import read_model
from keras_qat.keras2.backend import (
    Node,
    accepts_mask,
    allow_any_batch_sizes,
    has_mask_argument,
    is_symbolic,
    keras,
    make_input,
    one_at_a_time,
    set_keras_mask,
    without_autograph,
)
from keras_qat.keras2.layers_and_models import accepts_training, list_nodes, use_unique_names
from keras_qat.keras2.readability import describe_error, get_first_line
from keras_qat.tracing.cannot_trace import CannotTrace, MustTraceInline, ReadsWeights
from keras_qat.tracing.check_trace import drop_none, find_deviation
from keras_qat.tracing.concrete_sizes import make_symbols_of_values
from keras_qat.tracing.inner_calls import keep_symbols, remove_nodes
from keras_qat.tracing.layer_weights import find_weight_holders, get_regularizers, make_substitute
from keras_qat.tracing.patches import apply_patches
from keras_qat.tracing.training_phase import combine_phases, follow_training


@dataclasses.dataclass(frozen=True)
class TracedLayer:
    """The result of tracing a layer: the layers and operations inside `call`.

    Args:
        graph: the calls. The graph's inputs are the layer's inputs, followed by Keras masks of
            inputs, followed by the layer's weights.
        weights: maps inputs of `graph` to variables.
        regularizers: maps the id of a variable to a regularizer.
        carries_masks: True if `graph` also computes the Keras masks of the outputs. Otherwise,
            `layer.compute_mask` computes them.
    """

    graph: Graph
    weights: dict[Value, Any]
    regularizers: dict[int, Any]
    carries_masks: bool


@one_at_a_time
def trace_layer(
    call: Call, masks: Mapping[Value, Value] | None = None, lenders: Sequence[Any] = ()
) -> TracedLayer:
    """Traces the layer of a call. The layer itself is not changed.

    Args:
        call: the call.
        masks: maps inputs of `call` to Keras masks.
        lenders: other layers, such as an Embedding, that share weights with this layer. Also
            variables that belong to no layer. They become constants.

    Raises:
        CannotTrace: if the layer cannot be traced.
        ReadsWeights: if the layer reads weights of other layers, except `lenders`.
        OnlyTrains: if the layer changes its input only in training.
    """
    layer = call.layer
    _check(layer)
    has_phases = accepts_training(layer) and call.kwargs.get("training") is None
    # tf.init_scope only if needed, because it pauses tapes that find weights of other layers.
    eagerly = contextlib.nullcontext() if tf.executing_eagerly() else tf.init_scope()
    with eagerly, remove_nodes(layer), use_unique_names(layer):
        traces: tuple[Trace, ...] = ()
        while not traces:
            try:
                traces = _trace_phases(call, masks or {}, has_phases, lenders)
            except MustTraceInline as error:
                lenders = [*lenders, error.layer]
        with keep_symbols(layer):
            if reason := find_deviation(call, traces[-1]):
                raise CannotTrace(reason)
    return traces[0].read()


def _trace_phases(
    call: Call, masks: Mapping[Value, Value], has_phases: bool, lenders: Sequence[Any]
) -> tuple[Trace, ...]:
    """Return a trace of training and inference. If `has_phases`, also return one of inference."""
    if not has_phases:
        return (Trace(call, masks, None, lenders),)
    trained, tested = (Trace(call, masks, phase, lenders) for phase in (True, False))
    try:
        follow_training(trained, tested)
    except CannotTrace as error:
        # `follow_training` has changed `trained`.
        trained = Trace(call, masks, True, lenders)
        return combine_phases(trained, tested, error), tested
    return trained, tested


def _check(layer: keras.layers.Layer) -> None:
    if layer.activity_regularizer is not None:
        raise CannotTrace("it has an activity regularizer")
    if len(layer._callable_losses) > len(get_regularizers(layer)):
        raise CannotTrace("it adds to the loss")
    if layer.compute_dtype != layer.variable_dtype:
        raise CannotTrace("it computes in mixed precision")


class Trace:
    """A run of a layer's `call` on symbolic tensors."""

    tape: tf.GradientTape
    layer: keras.layers.Layer
    lenders: list[Any]
    substitutes: dict[int, Any]
    replacements: dict[str, Any]

    def __init__(
        self,
        call: Call,
        masks: Mapping[Value, Value],
        training: bool | None,
        lenders: Sequence[Any] = (),
    ) -> None:
        self.call, self.layer, self.training = call, call.layer, training
        self.outside = {id(x) for x in lenders if isinstance(x, tf.Variable)}
        """Ids of the variables in `lenders` that belong to no layer."""
        self.lenders = [x for x in lenders if id(x) not in self.outside]
        owners = self.layer, *self.lenders
        self.holders = [holder for owner in owners for holder in find_weight_holders(owner)]
        variables = tf.nest.flatten([list(held.values()) for _, held in self.holders])
        weights = {id(w): w for w in variables if isinstance(w, tf.Variable)}
        self.substitutes = {key: make_substitute(weight) for key, weight in weights.items()}
        symbols = {key: tensor for key, tensor in self.substitutes.items() if is_symbolic(tensor)}
        self.weights = [weights[key] for key in symbols]
        self.assigned: dict[int, Any] = {}
        """Maps the id of a variable to the tensor that `call` assigns to it."""
        self.inputs = {value: make_input(value.shape, value.dtype) for value in call.inputs}
        self.masks = {value: make_input(mask.shape, mask.dtype) for value, mask in masks.items()}
        for value, mask in self.masks.items():
            set_keras_mask(self.inputs[value], mask)
        self.added: list[Any] = []
        """Functions of a model. Each adds one loss or metric of the layer to the model."""
        self.replacements = {
            "add_loss": self._add_loss,
            "add_metric": self._add_metric,
            "add_update": _refuse_updates,
        }
        self.outputs = make_symbols_of_values(self._run())
        outputs = drop_none(self.outputs)
        if len(outputs) < len(tf.nest.flatten(self.outputs)):
            self.outputs = outputs
        if foreign := [output for output in outputs if isinstance(output, tf.Variable)]:
            raise ReadsWeights(foreign)
        if not outputs or not all(map(is_symbolic, outputs)):
            raise CannotTrace("its outputs do not depend on its inputs")
        try:
            tensors = [*self.inputs.values(), *self.masks.values(), *symbols.values()]
            self.model = self.make_model(tensors, self.outputs)
        except ValueError as error:
            is_foreign = "Graph disconnected" in str(error)
            reason = "it reads a tensor that is not one of its arguments"
            raise CannotTrace(reason if is_foreign else get_first_line(error)) from error
        arguments = tf.nest.flatten([(node.call_args, node.call_kwargs) for node in self.nodes])
        read = [leaf for leaf in arguments if isinstance(leaf, tf.Variable)]
        read = [*self.tape.watched_variables(), *read]
        if read := [variable for variable in read if id(variable) not in self.outside]:
            raise ReadsWeights(read)
        try:
            if self.assigned:
                keras.Model(list(symbols.values()), list(self.assigned.values()))
        except ValueError as error:
            raise CannotTrace("it assigns a value that depends on its input to a weight") from error

    def _run(self) -> Any:
        layer = self.layer
        arguments = self.call.args, dict(self.call.kwargs)
        args, kwargs = map_values(self.inputs.__getitem__, arguments)
        if self.training is not None:
            kwargs["training"] = self.training
        elif accepts_training(layer):
            kwargs.setdefault("training", None)
        if not accepts_mask(layer):
            kwargs.pop("mask", None)
        elif not has_mask_argument(layer, args, kwargs):
            first = map_values(self.masks.get, get_first_argument(self.call))
            if any(mask is not None for mask in tf.nest.flatten(first)):
                kwargs["mask"] = first
        with tf.GradientTape(watch_accessed_variables=True) as self.tape:
            try:
                with apply_patches(self):
                    return without_autograph(lambda: layer.call(*args, **kwargs))()
            except (CannotTrace, MustTraceInline):
                raise
            except Exception as error:  # Custom code may raise anything.
                raise CannotTrace(describe_error(error)) from error

    @allow_any_batch_sizes()
    def make_model(self, inputs: Any, outputs: Any) -> keras.Model:
        """Returns a model from `inputs` to `outputs`, with the layer's losses and metrics."""
        model = keras.Model(inputs, outputs)
        for add in self.added:
            add(model)
        return model

    def _add_loss(self, losses: object, **_: object) -> None:
        for loss in tf.nest.flatten(losses):
            if read_scalar(loss) == 0.0:  # TabNet adds losses of 0 in its last step.
                continue
            if not is_symbolic(loss):
                raise CannotTrace("it calls add_loss with a value independent of its inputs")
            self.added.append(lambda model, loss=loss: model.add_loss(loss))

    def _add_metric(
        self, value: object, name: str | None = None, aggregation: str = "mean"
    ) -> None:
        if not is_symbolic(value) or name is None:
            raise CannotTrace("it calls add_metric with a Metric object, or without a name")
        self.added.append(lambda model: model.add_metric(value, name, aggregation=aggregation))

    @property
    def nodes(self) -> list[Node]:
        return list_nodes(self.model)

    def read(self) -> TracedLayer:
        results = tf.nest.flatten([node.outputs for node in self.nodes])
        not_dense = tf.SparseTensorSpec, tf.RaggedTensorSpec
        if any(isinstance(result.type_spec, not_dense) for result in results):
            raise CannotTrace("it computes with sparse or ragged tensors")
        try:
            graph = read_model(self.model)
        except ValueError as error:
            raise CannotTrace(get_first_line(error)) from error
        if self.outside:
            graph = dataclasses.replace(graph, calls=list(map(_fold_variables, graph.calls)))
        own = flatten_values(graph.inputs)[len(self.inputs) + len(self.masks) :]
        # Keras turns a list of one output into a tensor. The layer's structure is kept.
        flat = iter(flatten_values(graph.outputs))
        outputs = tf.nest.map_structure(lambda _: next(flat), self.outputs)
        graph = dataclasses.replace(graph, outputs=outputs)
        weights = dict(zip(own, self.weights, strict=True))
        all_masked = all(value.masked for value in flatten_values(graph.outputs))
        carries_masks = all_masked or not self.layer.supports_masking
        regularizers = [get_regularizers(layer) for layer in (*self.lenders, self.layer)]
        return TracedLayer(graph, weights, dict(ChainMap(*regularizers)), carries_masks)

    def __call__(self, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        weights = map(tf.convert_to_tensor, self.weights)  # Keras warns of variables in a Lambda.
        return tf.nest.flatten(self.model([*inputs, *weights], training=False))


def _refuse_updates(*args: object, **kwargs: object) -> None:
    raise CannotTrace("it calls add_update")


def _fold_variables(call: Call) -> Call:

    def fold(leaf: Any) -> Any:
        return tf.constant(leaf.numpy()) if isinstance(leaf, tf.Variable) else leaf

    args, kwargs = tf.nest.map_structure(fold, (call.args, call.kwargs))
    return dataclasses.replace(call, args=args, kwargs=kwargs)
