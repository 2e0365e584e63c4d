"""Lowers bidirectional recurrent layers, and those that return their state."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Call, Value, flatten_values
from keras_qat.helper_layers.masked_recurrent import MASKED
from keras_qat.helper_layers.operations import LastStep, ReverseSteps
from keras_qat.keras2.backend import layers
from keras_qat.keras2.layers_and_models import clone, list_layers
from keras_qat.lowering.builder import LoweringContext, PartsBuilder
from keras_qat.lowering.mask_tensors import MaskTensors
from keras_qat.ops.registry import match
from keras_qat.tracing.unrolled_loops import MOST_STEPS

DIRECTIONS = ("forward", "backward")

MERGES: dict[str, Any] = {
    "concat": layers.Concatenate,
    "sum": layers.Add,
    "mul": layers.Multiply,
    "ave": layers.Average,
}
"""`merge_mode` -> the layer that merges; None returns both tensors."""


def split_bidirectional(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers Bidirectional to two layers, ReverseSteps of the second one's output, and a merge.

    It stays whole unless both layers have integer operators.
    """
    layer = call.layer
    if call.kwargs.get("training") is not None or why_whole(call):
        return []
    parts, sequences, sequence = PartsBuilder(call, context), [], call.inputs[0]
    merge, outputs = MERGES.get(layer.merge_mode), flatten_values(call.outputs)
    states = [outputs.pop(-2), outputs.pop()] if layer.return_state else []
    for index, direction in enumerate(DIRECTIONS):
        inner = _inner(layer, direction)
        trainable = layer.trainable and inner.trainable
        options = {"trainable": trainable, "weights": inner.weights}
        part = parts.new(direction, clone, inner, **options)
        turns = direction == "backward" and layer.return_sequences
        shape = inner.compute_output_shape(sequence.shape)
        shape = shape[0] if states else shape
        output = None if merge else outputs[index]
        result = output if output and not turns else parts.between(part, shape)
        given = [result, states[index]] if states else result
        parts.add(part, *_arguments(call, direction), kwargs=_mask_of(call), output=given)
        if turns:
            result = parts.add(
                parts.new("reversed", ReverseSteps), result, shape=shape, output=output
            )
        sequences.append(result)
    if merge:
        parts.add(parts.new("", merge), sequences, output=outputs[0])
    return parts.calls


def _mask_of(call: Call) -> dict[str, Any]:
    """Returns the mask that a call is given, as an argument by name."""
    mask = call.kwargs.get("mask")
    return {} if mask is None else {"mask": mask}


def _arguments(call: Call, direction: str) -> Any:
    """Returns the arguments for one direction: the sequence and its half of the states."""
    x, *states = (value for value in call.inputs if value is not call.kwargs.get("mask"))
    half, index = len(states) // 2, DIRECTIONS.index(direction)
    return ([x, *states[index * half :][:half]],) if states else (x,)


def with_mask(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers a layer that is given a mask to one that reads it beside the sequence.

    It stays whole where the layer has no integer operator.
    """
    layer, mask, (sequence, *others) = (
        call.layer,
        call.kwargs.get("mask"),
        flatten_values(call.args),
    )
    if not isinstance(mask, Value) or mask.dtype != "bool" or type(layer) not in MASKED:
        return []
    if others or call.kwargs.keys() - {"mask"} or layer.stateful or layer.return_state:
        return []
    new = context.layer(layer, "reading", lambda: _reading_mask(layer), context.weights_of(layer))
    trial = Call(new, ([sequence, mask],), {}, call.outputs, call.name)
    has_operator = match(trial).op is not None
    return PartsBuilder(call, context).end(new, *trial.args) if has_operator else []


def given_mask(call: Call, masks: MaskTensors) -> list[Call]:
    """Gives a recurrent layer the mask of its sequence as an argument, and returns all calls.

    A sequence without one gets a mask of all steps: other calls of the layer have masks, and all
    become the same operator. A layer stays as it is if it has no integer operator that reads one.

    Raises:
        CannotTrace: if the mask cannot be traced.
    """
    sequence = flatten_values(call.args)[0]
    if call.kwargs.get("mask") is not None or len(sequence.shape) != 3:
        return []

    def masked(mask: Value, outputs: Any) -> Call:
        return Call(call.layer, call.args, {**call.kwargs, "mask": mask}, outputs, call.name)

    if sequence.masked:
        trial = masked(Value("mask", sequence.shape[:2], "bool"), call.outputs)
        is_pair = isinstance(call.layer, layers.Bidirectional)
        inner = dataclasses.replace(trial, layer=call.layer.forward_layer) if is_pair else trial
        is_whole = why_whole(trial) if is_pair else not with_mask(trial, LoweringContext())
        if is_whole and why_not_unrolled(inner):
            return []
        mask = masks.of([sequence]).get(sequence)
    else:
        mask = masks.of_all_steps(sequence, call)
    if mask is None:
        return []
    return [*masks.take_calls(), masked(mask, call.outputs).as_part_of(call)]


def _reading_mask(layer: Any) -> Any:
    """Returns a copy of a layer, of the class that reads a mask."""
    plain = clone(layer)
    config = {**plain.get_config(), "activation": plain.activation}
    if hasattr(plain, "recurrent_activation"):
        config["recurrent_activation"] = plain.recurrent_activation
    return MASKED[type(layer)].from_config(config)


def split_recurrent(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers what a mask or states make of a layer, in this order."""
    return with_mask(call, context) or split_state(call, context)


def split_state(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers a layer that returns its state to one that does not, and its output's last step.

    It stays whole unless the layer without states has integer operators.
    """
    layer, (output, *states) = call.layer, flatten_values(call.outputs)
    one = Value(output.name, output.shape, output.dtype)
    if not states or match(Call(layer, call.args, call.kwargs, one, call.name)).op is None:
        return []
    parts = PartsBuilder(call, context)
    weights = {"weights": context.weights_of(layer)}
    alone = parts.new("", clone, layer, return_state=False, **weights)
    parts.add(alone, *call.args, kwargs=call.kwargs, output=output)
    make = (LastStep,) if layer.return_sequences else (layers.Activation, "linear")
    parts.add(parts.new("state", *make), output, output=states[0])
    return parts.calls


def why_not_unrolled(call: Call) -> str:
    """Returns why the steps of a recurrent layer cannot be written out; "" if they can."""
    layer, sequence = call.layer, call.inputs[0]
    if layer.stateful:
        return "its states are kept"
    if call.kwargs.get("training") is not None:
        return "it is told whether it trains"
    mask = call.kwargs.get("mask")
    is_tensor = isinstance(mask, Value) and mask.dtype == "bool"
    if not is_tensor and (mask is not None or any(value.masked for value in call.inputs)):
        return "it has a mask"
    if layer.time_major or len(sequence.shape) < 3:
        return "its sequences are in another form"
    if call.kwargs.get("initial_state") is not None or getattr(layer, "_num_constants", None):
        return "it is given constants"
    if any(map(_drops, list_layers(layer.cell))) and not _drops_inputs(layer):
        return "its cell has dropout"
    shapes = [tf.TensorShape(size) for size in tf.nest.flatten(layer.cell.state_size)]
    if not isinstance(layer.cell, layers.Layer) or not all(s.is_fully_defined() for s in shapes):
        return "its states are of any size"
    steps = sequence.shape[1]
    is_few = steps is not None and steps <= MOST_STEPS
    return "" if is_few else f"it has more than {MOST_STEPS} steps, or any number"


def _drops(cell: Any) -> bool:
    """Returns whether one of Keras' cells has dropout."""
    rates = (getattr(cell, name, 0) for name in ("dropout", "recurrent_dropout"))
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def _drops_inputs(layer: Any) -> bool:
    """Returns whether a layer drops the same inputs in all steps, and no states."""
    has_one_mask = getattr(layer, "implementation", 2) == 2
    return type(layer) is not layers.RNN and has_one_mask and not layer.recurrent_dropout


REASONS: dict[type, str] = {
    layers.ConvLSTM3D: "TFLite has no int8 kernel for convolutions along three axes",
}
"""Layer class -> why it computes in float."""


def why_whole(call: Call) -> str:
    """Returns why an unlisted recurrent layer has no integer operators; "" for other layers.

    For a Bidirectional, the reason is that of the first inner layer without integer operators.
    """
    if type(call.layer) is layers.RNN:
        return why_not_unrolled(call)
    if not isinstance(call.layer, layers.Bidirectional):
        return REASONS.get(type(call.layer), "")
    for direction in DIRECTIONS:
        inner = _inner(call.layer, direction)
        output = Value(call.name, tuple(call.output.shape), call.output.dtype)
        part = Call(inner, _arguments(call, direction), _mask_of(call), output, call.name)
        op, _, reason = match(part)
        if op is None and not with_mask(part, LoweringContext()):
            return reason or f"no int8 rule for {type(inner).__name__}"
    return ""


def _inner(layer: Any, direction: str) -> Any:
    return getattr(layer, f"{direction}_layer")
