"""Opens a layer: traces its `call` on symbolic tensors into calls of other layers and operations.

Python code in a layer runs only once, while it is traced. So a layer is opened only if the traced
operations compute on random numbers what the layer computes, and the same in training.
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
from keras_qat.keras2.layer_names import use_unique_names
from keras_qat.keras2.layers_and_models import accepts_training, list_nodes
from keras_qat.keras2.readability import describe_error, get_first_line
from keras_qat.tracing.cannot_trace import READS_OTHERS, CannotTrace, ReadsWeights
from keras_qat.tracing.check_trace import find_deviation, without_none
from keras_qat.tracing.concrete_sizes import make_symbols_of_values
from keras_qat.tracing.inner_calls import MustTraceInline, keeping_symbols, without_nodes
from keras_qat.tracing.layer_weights import find_weight_holders, make_stand_in, regularizers_of
from keras_qat.tracing.patches import apply_patches
from keras_qat.tracing.training_phase import follow_training, with_both_phases

_NOT_DENSE = (tf.SparseTensorSpec, tf.RaggedTensorSpec)


@dataclasses.dataclass(frozen=True)
class TracedLayer:
    """A layer's `call` as calls of other layers and TensorFlow operations.

    Args:
        graph: the calls. Its inputs are the tensors that the layer reads, their masks, then its
            weights.
        weights: input of the graph -> the variable that it stands for.
        regularizers: id of a variable -> its regularizer.
        carries_masks: whether the outputs carry the masks of the calls inside, not the layer's own.
    """

    graph: Graph
    weights: dict[Value, Any]
    regularizers: dict[int, Any]
    carries_masks: bool


@one_at_a_time
def trace_layer(
    call: Call, masks: Mapping[Value, Value] | None = None, lenders: Sequence[Any] = ()
) -> TracedLayer:
    """Opens the layer of a call. The layer itself stays as it is.

    Args:
        call: the call.
        masks: input of the call -> the mask that it carries.
        lenders: other layers whose weights it reads, and variables that no layer holds. Calls of
            these layers inside are opened, too, and the variables count as constants.

    Raises:
        CannotTrace: if that is not possible.
        ReadsWeights: if it reads weights of layers that are no `lenders`.
        OnlyTrains: if it does something in training only.
    """
    layer = call.layer
    _check(call)
    trained = accepts_training(layer) and call.kwargs.get("training") is None
    # tf.init_scope stops the tapes that look for weights of other layers.
    eagerly = contextlib.nullcontext() if tf.executing_eagerly() else tf.init_scope()
    with eagerly, without_nodes(layer), use_unique_names(layer):
        traces: tuple[Trace, ...] = ()
        while not traces:
            try:
                traces = _traces(call, masks or {}, trained, lenders)
            except MustTraceInline as error:
                lenders = [*lenders, error.layer]
        with keeping_symbols(layer):
            if reason := find_deviation(call, traces[-1]):
                raise CannotTrace(reason)
    return traces[0].read()


def _traces(
    call: Call, masks: Mapping[Value, Value], follows_training: bool, lenders: Sequence[Any]
) -> tuple[Trace, ...]:
    """Returns traces of the layer of a call: one to read, then one of inference if they differ."""
    if not follows_training:
        return (Trace(call, masks, None, lenders),)
    trained, tested = (Trace(call, masks, phase, lenders) for phase in (True, False))
    try:
        follow_training(trained, tested)
    except CannotTrace as error:
        # `trained` has been changed.
        trained = Trace(call, masks, True, lenders)
        return with_both_phases(trained, tested, error), tested
    return trained, tested


def _check(call: Call) -> None:
    layer = call.layer
    if layer.activity_regularizer is not None:
        raise CannotTrace("it has an activity regularizer")
    if len(layer._callable_losses) > len(regularizers_of(layer)):
        raise CannotTrace("it adds to the loss")
    if layer.compute_dtype != layer.variable_dtype:
        raise CannotTrace("it computes in mixed precision")


class Trace:
    """A symbolic run of a layer's `call`."""

    def __init__(
        self,
        call: Call,
        masks: Mapping[Value, Value],
        training: bool | None,
        lenders: Sequence[Any] = (),
    ) -> None:
        self.call, self.layer, self.training = call, call.layer, training
        layer = call.layer
        self.outside = {id(v) for v in lenders if isinstance(v, tf.Variable)}
        lenders = self.lenders = [x for x in lenders if id(x) not in self.outside]
        self.holders = [x for owner in (layer, *lenders) for x in find_weight_holders(owner)]
        variables = tf.nest.flatten([list(held.values()) for _, held in self.holders])
        weights = {id(w): w for w in variables if isinstance(w, tf.Variable)}
        self.stand_ins = {key: make_stand_in(weight) for key, weight in weights.items()}
        symbols = {key: tensor for key, tensor in self.stand_ins.items() if is_symbolic(tensor)}
        self.weights = [weights[key] for key in symbols]
        self.assigned: dict[int, Any] = {}
        """Id of a variable -> what the layer assigns to it."""
        self.inputs = {value: make_input(value.shape, value.dtype) for value in call.inputs}
        self.masks = {value: make_input(mask.shape, mask.dtype) for value, mask in masks.items()}
        for value, mask in self.masks.items():
            set_keras_mask(self.inputs[value], mask)
        args, kwargs = map_values(self.inputs.__getitem__, (call.args, dict(call.kwargs)))
        if training is not None:
            kwargs["training"] = training
        elif accepts_training(layer):
            kwargs.setdefault("training", None)
        if not accepts_mask(layer):
            kwargs.pop("mask", None)
        elif not has_mask_argument(layer, args, kwargs):
            first = map_values(self.masks.get, get_first_argument(call))
            if any(mask is not None for mask in tf.nest.flatten(first)):
                kwargs["mask"] = first
        self.added: list[Any] = []
        """Functions that add a loss or a metric of the layer to a model."""
        self.replacements = {
            "add_loss": self._add_loss,
            "add_metric": self._add_metric,
            "add_update": _refuse_updates,
        }
        with tf.GradientTape(watch_accessed_variables=True) as self.tape:
            try:
                with apply_patches(self):
                    self.outputs = without_autograph(lambda: layer.call(*args, **kwargs))()
            except (CannotTrace, MustTraceInline):
                raise
            except Exception as error:  # Whatever a user's own code may raise.
                raise CannotTrace(describe_error(error)) from error
        tensors = [*self.inputs.values(), *self.masks.values(), *symbols.values()]
        self.outputs = make_symbols_of_values(self.outputs)
        outputs = without_none(self.outputs)
        if len(outputs) < len(tf.nest.flatten(self.outputs)):
            self.outputs = outputs
        if foreign := [output for output in outputs if isinstance(output, tf.Variable)]:
            raise ReadsWeights(foreign)
        if not outputs or not all(map(is_symbolic, outputs)):
            raise CannotTrace("its outputs do not depend on its inputs")
        try:
            self.model = self.model_of(tensors, self.outputs)
        except ValueError as error:
            is_foreign = "Graph disconnected" in str(error)
            raise CannotTrace(READS_OTHERS if is_foreign else get_first_line(error)) from error
        arguments = tf.nest.flatten([(node.call_args, node.call_kwargs) for node in self.nodes])
        read = [leaf for leaf in arguments if isinstance(leaf, tf.Variable)]
        if read := [
            v for v in [*self.tape.watched_variables(), *read] if id(v) not in self.outside
        ]:
            raise ReadsWeights(read)
        try:
            if self.assigned:
                keras.Model(list(symbols.values()), list(self.assigned.values()))
        except ValueError as error:
            raise CannotTrace("it assigns what depends on its input to a weight") from error

    @allow_any_batch_sizes()
    def model_of(self, inputs: Any, outputs: Any) -> Any:
        """Returns a model of traced tensors, with the losses and metrics of the layer."""
        model = keras.Model(inputs, outputs)
        for add in self.added:
            add(model)
        return model

    def _add_loss(self, losses: Any, **_: Any) -> None:
        for loss in tf.nest.flatten(losses):
            if read_scalar(loss) == 0.0:  # As TabNet adds in its last step.
                continue
            if not is_symbolic(loss):
                raise CannotTrace("it calls add_loss with what does not depend on its inputs")
            self.added.append(lambda model, loss=loss: model.add_loss(loss))

    def _add_metric(self, value: Any, name: Any = None, aggregation: Any = "mean") -> None:
        if not is_symbolic(value) or name is None:
            raise CannotTrace("it calls add_metric with a metric of Keras")
        self.added.append(lambda model: model.add_metric(value, name, aggregation=aggregation))

    @property
    def nodes(self) -> list[Any]:
        """Keras' nodes of the traced calls, in order."""
        return list_nodes(self.model)

    def read(self) -> TracedLayer:
        """Returns the trace as a graph."""
        results = tf.nest.flatten([node.outputs for node in self.nodes])
        if any(isinstance(result.type_spec, _NOT_DENSE) for result in results):
            raise CannotTrace("it computes with sparse or ragged tensors")
        try:
            graph = read_model(self.model)
        except ValueError as error:
            raise CannotTrace(get_first_line(error)) from error
        if self.outside:
            graph = dataclasses.replace(graph, calls=list(map(_with_constants, graph.calls)))
        values = flatten_values(graph.inputs)
        own = values[len(self.inputs) + len(self.masks) :]
        # The layer's own output structure: Keras turns a list of one output into a tensor.
        flat = iter(flatten_values(graph.outputs))
        outputs = tf.nest.map_structure(lambda _: next(flat), self.outputs)
        graph = dataclasses.replace(graph, outputs=outputs)
        weights = dict(zip(own, self.weights, strict=True))
        all_masked = all(value.masked for value in flatten_values(graph.outputs))
        carries_masks = all_masked or not self.layer.supports_masking
        regularizers = [regularizers_of(layer) for layer in (*self.lenders, self.layer)]
        return TracedLayer(graph, weights, dict(ChainMap(*regularizers)), carries_masks)

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Computes the traced operations on numbers."""
        weights = map(tf.convert_to_tensor, self.weights)  # Keras warns of variables in a Lambda.
        return tf.nest.flatten(self.model([*inputs, *weights], training=False))


def _refuse_updates(*args: Any, **kwargs: Any) -> None:
    raise CannotTrace("it calls add_update")


def _with_constants(call: Call) -> Call:
    """Returns a call that reads the values of variables among its arguments."""

    def value_of(leaf: Any) -> Any:
        return tf.constant(leaf.numpy()) if isinstance(leaf, tf.Variable) else leaf

    args, kwargs = tf.nest.map_structure(value_of, (call.args, call.kwargs))
    return dataclasses.replace(call, args=args, kwargs=kwargs)
