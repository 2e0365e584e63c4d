"""Rewrites recurrent layers that are bidirectional, return states, or read a mask.

The functions return the new calls. An empty list means that the call stays unchanged.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Call, Value, flatten_values
from keras_qat.helper_layers.keras_variants import WITH_MASK_INPUT
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
"""Maps `merge_mode` to the layer that merges the outputs of both directions."""


def split_bidirectional(call: Call, context: LoweringContext) -> list[Call]:
    """Split Bidirectional into a forward layer, a backward layer, and a layer that merges both.

    The call stays unchanged if one of the layers has no integer operator.
    """
    layer = call.layer
    if call.kwargs.get("training") is not None or find_float_reason(call):
        return []
    parts, sequences, sequence = PartsBuilder(call, context), [], call.inputs[0]
    merge, outputs = MERGES.get(layer.merge_mode), flatten_values(call.outputs)
    states = [outputs.pop(-2), outputs.pop()] if layer.return_state else []
    for index, direction in enumerate(DIRECTIONS):
        inner = _get_inner(layer, direction)
        trainable = layer.trainable and inner.trainable
        options = {"trainable": trainable, "weights": inner.weights}
        part = parts.new(direction, clone, inner, **options)
        turns = direction == "backward" and layer.return_sequences
        shape = inner.compute_output_shape(sequence.shape)
        shape = shape[0] if states else shape
        output = None if merge else outputs[index]
        result = output if output and not turns else parts.between(part, shape)
        outputs_of_part = [result, states[index]] if states else result
        args, kwargs = _get_arguments(call, direction), _get_mask(call)
        parts.add(part, *args, kwargs=kwargs, output=outputs_of_part)
        if turns:
            result = parts.add(
                parts.new("reversed", ReverseSteps), result, shape=shape, output=output
            )
        sequences.append(result)
    if merge:
        parts.add(parts.new("", merge), sequences, output=outputs[0])
    return parts.calls


def _get_mask(call: Call) -> dict[str, Value]:
    mask = call.kwargs.get("mask")
    return {} if mask is None else {"mask": mask}


def _get_arguments(call: Call, direction: str) -> tuple[Any, ...]:
    """Return the arguments for one direction: the sequence, and half of the states."""
    x, *states = (value for value in call.inputs if value is not call.kwargs.get("mask"))
    half, index = len(states) // 2, DIRECTIONS.index(direction)
    return ([x, *states[index * half :][:half]],) if states else (x,)


def merge_mask(call: Call, context: LoweringContext) -> list[Call]:
    """Replace `layer(x, mask=mask)` by `new_layer([x, mask])`.

    The call stays unchanged if the new layer has no integer operator.
    """
    layer, mask, (sequence, *others) = (
        call.layer,
        call.kwargs.get("mask"),
        flatten_values(call.args),
    )
    if not isinstance(mask, Value) or mask.dtype != "bool" or type(layer) not in WITH_MASK_INPUT:
        return []
    if others or call.kwargs.keys() - {"mask"} or layer.stateful or layer.return_state:
        return []
    new = context.layer(
        layer, "reading", lambda: _copy_with_mask(layer), context.get_weights(layer)
    )
    trial = Call(new, ([sequence, mask],), {}, call.outputs, call.name)
    has_operator = match(trial).op is not None
    return PartsBuilder(call, context).end(new, *trial.args) if has_operator else []


def pass_mask(call: Call, masks: MaskTensors) -> list[Call]:
    """Pass the Keras mask of a sequence to a recurrent layer as an argument. Return all new calls.

    If one call of a layer has a mask, all its calls get one, because they need the same operator. A
    sequence without a mask gets a mask that is always True. The call stays unchanged if no integer
    operator reads masks and the layer cannot be unrolled.

    Raises:
        CannotTrace: if the mask cannot be traced.
    """
    sequence = flatten_values(call.args)[0]
    if call.kwargs.get("mask") is not None or len(sequence.shape) != 3:
        return []

    def add_mask(mask: Value) -> Call:
        return Call(call.layer, call.args, {**call.kwargs, "mask": mask}, call.outputs, call.name)

    if sequence.masked:
        trial = add_mask(Value("mask", sequence.shape[:2], "bool"))
        is_pair = isinstance(call.layer, layers.Bidirectional)
        inner = dataclasses.replace(trial, layer=call.layer.forward_layer) if is_pair else trial
        is_float = find_float_reason(trial) if is_pair else not merge_mask(trial, LoweringContext())
        if is_float and find_unrolling_obstacle(inner):
            return []
        mask = masks.find([sequence]).get(sequence)
    else:
        mask = masks.make_full_mask(sequence, call)
    if mask is None:
        return []
    return [*masks.take_calls(), add_mask(mask).as_part_of(call)]


def _copy_with_mask(layer: layers.RNN) -> layers.RNN:
    plain = clone(layer)
    config = {**plain.get_config(), "activation": plain.activation}
    if hasattr(plain, "recurrent_activation"):
        config["recurrent_activation"] = plain.recurrent_activation
    return WITH_MASK_INPUT[type(layer)].from_config(config)


def split_recurrent(call: Call, context: LoweringContext) -> list[Call]:
    return merge_mask(call, context) or split_state(call, context)


def split_state(call: Call, context: LoweringContext) -> list[Call]:
    """Replace a layer with `return_state=True` by a layer that returns only outputs.

    The last output is the state. The call stays unchanged if the new layer has no integer operator.
    """
    layer, (output, *states) = call.layer, flatten_values(call.outputs)
    one = Value(output.name, output.shape, output.dtype)
    if not states or match(Call(layer, call.args, call.kwargs, one, call.name)).op is None:
        return []
    parts = PartsBuilder(call, context)
    weights = {"weights": context.get_weights(layer)}
    alone = parts.new("", clone, layer, return_state=False, **weights)
    parts.add(alone, *call.args, kwargs=call.kwargs, output=output)
    make = (LastStep,) if layer.return_sequences else (layers.Activation, "linear")
    parts.add(parts.new("state", *make), output, output=states[0])
    return parts.calls


def find_unrolling_obstacle(call: Call) -> str:
    """Return why the steps of a recurrent layer cannot be unrolled. Return "" if they can."""
    layer, sequence = call.layer, call.inputs[0]
    if layer.stateful:
        return "it is stateful"
    if call.kwargs.get("training") is not None:
        return "its call has a training argument"
    mask = call.kwargs.get("mask")
    is_tensor = isinstance(mask, Value) and mask.dtype == "bool"
    if not is_tensor and (mask is not None or any(value.masked for value in call.inputs)):
        return "it has a mask"
    if layer.time_major or len(sequence.shape) < 3:
        return "its inputs are not sequences of vectors"
    if call.kwargs.get("initial_state") is not None or getattr(layer, "_num_constants", None):
        return "its call has an initial state or constants"
    if any(map(_has_dropout, list_layers(layer.cell))) and not _drops_inputs(layer):
        return "its cell has dropout"
    shapes = [tf.TensorShape(size) for size in tf.nest.flatten(layer.cell.state_size)]
    if not isinstance(layer.cell, layers.Layer) or not all(s.is_fully_defined() for s in shapes):
        return "the sizes of its states are unknown"
    steps = sequence.shape[1]
    is_few = steps is not None and steps <= MOST_STEPS
    return "" if is_few else f"it has more than {MOST_STEPS} steps, or an unknown number"


def _has_dropout(cell: layers.Layer) -> bool:
    rates = (getattr(cell, name, 0) for name in ("dropout", "recurrent_dropout"))
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def _drops_inputs(layer: layers.RNN) -> bool:
    """Return True if a layer drops only inputs, and the same ones in all steps."""
    has_one_mask = getattr(layer, "implementation", 2) == 2
    return type(layer) is not layers.RNN and has_one_mask and not layer.recurrent_dropout


REASONS: dict[type, str] = {
    layers.ConvLSTM3D: "TFLite has no int8 kernel for convolutions along three axes"
}
"""Maps a layer class that always computes in float to the reason."""


def find_float_reason(call: Call) -> str:
    """Return why a recurrent layer computes in float. Return "" if it does not."""
    if type(call.layer) is layers.RNN:
        return find_unrolling_obstacle(call)
    if not isinstance(call.layer, layers.Bidirectional):
        return REASONS.get(type(call.layer), "")
    for direction in DIRECTIONS:
        inner = _get_inner(call.layer, direction)
        output = Value(call.name, tuple(call.output.shape), call.output.dtype)
        part = Call(inner, _get_arguments(call, direction), _get_mask(call), output, call.name)
        op, _, reason = match(part)
        if op is None and not merge_mask(part, LoweringContext()):
            return reason or f"no int8 rule for {type(inner).__name__}"
    return ""


def _get_inner(layer: layers.Bidirectional, direction: str) -> layers.Layer:
    return getattr(layer, f"{direction}_layer")
