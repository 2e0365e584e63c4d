"""GRU and SimpleRNN in training: Keras' loop over the steps, with all tensors fake-quantized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_qat import fake_quant
from keras_qat.keras2 import backend
from keras_qat.keras2.graph import Call, Value
from keras_qat.layers.scheduled import Phase
from keras_qat.layers.states import keep_states
from keras_qat.ops.recurrence import columns, step_of
from keras_qat.ops.registry import match
from keras_qat.ops.unrolled import FIXED

__all__ = ["biases", "steps_quantized", "unrolled_quantized"]

Round = Callable[[str, Any], Any]
"""Fake-quantizes a tensor in the range of that name."""


class _InTraining:
    """Steps in real numbers; what is rounded is noted by the name of its range."""

    def __init__(self, weights: tuple[Any, Any], parts: dict[str, slice], rounded: Round) -> None:
        self.kernel, self.bias = weights
        self.parts, self.rounded = parts, rounded
        self.seen: dict[str, list[Any]] = {}

    def note(self, name: str, x: Any) -> Any:
        self.seen.setdefault(name, []).append(x)
        return self.rounded(name, x)

    def dense(self, part: str, hidden: Any) -> Any:
        where = self.parts[part]
        y = tf.matmul(hidden, self.kernel[:, where])
        y = y if self.bias is None else y + self.bias[where]
        return self.note(f"state_{part}", y)

    def add(self, first: Any, second: Any, name: str, relu: bool = False) -> Any:
        total = first + second
        return self.note(name, tf.nn.relu(total) if relu else total)

    def multiply(self, first: Any, second: Any, name: str) -> Any:
        return self.note(name, first * second)

    def sigmoid(self, x: Any) -> Any:
        return self.note("sigmoid", tf.sigmoid(x))

    def tanh(self, x: Any) -> Any:
        return self.note("hidden", tf.tanh(x))

    def from_one(self, x: Any) -> Any:
        return self.note("sigmoid", 1.0 - x)

    def halves(self, x: Any) -> tuple[Any, Any]:
        first, second = tf.split(x, 2, -1)
        return first, second


def unrolled_quantized(wrapper: Any, x: Any, weights: dict[str, Any], phase: Phase) -> Any:
    """A layer in a wrapper with other weights; its inner quantizers see the tensors of all steps.

    What is inside of a step is rounded to the ranges of before.
    """
    inner = wrapper.inner
    ranges = {name: each.observe(None, training=False) for name, each in inner.items()}
    applies = {name: each.applies(phase, *ranges[name]) for name, each in inner.items()}

    def rounded(name: str, x: Any) -> Any:
        if name not in inner:
            limits = map(tf.constant, (FIXED[name].minimum, FIXED[name].maximum))
            return fake_quant.fake_quantize_if(phase.quantizing, x, *limits)
        return fake_quant.fake_quantize_if(applies[name], x, *ranges[name])

    def first(name: str, x: Any) -> Any:
        return inner[name](x, phase)

    outputs, seen = steps_quantized(wrapper.layer, x, weights, phase, first, rounded)
    for name, tensors in seen.items():
        inner[name].take_in(tf.stack(tensors), phase)
    return outputs


def steps_quantized(
    layer: Any, x: Any, weights: dict[str, Any], phase: Phase, first: Round, rounded: Round
) -> tuple[Any, dict[str, list[Any]]]:
    """What a layer gives, and the tensors inside of its steps, by the name of their range.

    Args:
        layer: the layer, without masks.
        x: its input, or a list of that and the state that it begins with.
        weights: by their paths, instead of its own.
        phase: what the call does.
        first: rounds the products of all inputs.
        rounded: rounds what is inside of a step.
    """
    cell, dtype, parts = layer.cell, layer.compute_dtype, columns(layer)
    x, *given_state = tf.nest.flatten(x)
    op, attributes, reason = match(Call(layer, (_value(x),), {}, _value(x), ""))
    assert op is not None, reason
    step_once, inner = step_of(attributes), op.inner(attributes)
    kernel, recurrent = (
        tf.cast(weights[f"cell.{name}"], dtype) for name in ("kernel", "recurrent_kernel")
    )
    bias, own_bias = biases(layer, dtype, weights.get("cell.bias"))
    x = tf.cast(x, dtype)
    backend.forget_dropout(layer)
    if 0 < cell.dropout < 1:
        x *= cell.get_dropout_mask_for_cell(x[:, 0], phase.training, count=3)[0][:, None]

    def product(part: str, where: slice) -> Any:
        y = tf.tensordot(x, kernel[:, where], 1)
        return first(f"input_{part}", y if bias is None else y + bias[where])

    given = {part: product(part, where) for part, where in parts.items()}

    def step(values: Any, states: Any) -> tuple[dict[str, Any], list[Any]]:
        (hidden,) = states
        if 0 < cell.recurrent_dropout < 1:
            masks = cell.get_recurrent_dropout_mask_for_cell(hidden, phase.training, count=3)
            hidden *= masks[0]
        m = _InTraining((recurrent, own_bias), parts, rounded)
        hidden = step_once(m, dict(zip(parts, values, strict=True)), hidden)
        seen = {name: each for name, each in m.seen.items() if name in inner}
        return {"sequence": hidden, "seen": seen}, [hidden]

    states = [rounded("hidden", tf.cast(each, dtype)) for each in given_state]
    states = states or (layer.states if layer.stateful else layer.get_initial_state(x))
    _, outputs, last = backend.keras.backend.rnn(
        step,
        list(given.values()),
        states,
        go_backwards=layer.go_backwards,
        input_length=x.shape[1],
        return_all_outputs=True,
    )
    if layer.stateful:
        keep_states(layer, last)
    sequence, seen = outputs["sequence"], outputs["seen"]
    if given_state and "hidden" in seen:  # Of what ReLUs give: a state below zero is zero.
        seen["hidden"] = [tf.concat([tf.nn.relu(states[0])[:, None], *seen["hidden"]], 1)]
    return sequence if layer.return_sequences else sequence[:, -1], seen


def _value(x: Any) -> Value:
    return Value("x", tuple(x.shape), x.dtype.name)


def biases(layer: Any, dtype: Any, bias: Any = None) -> tuple[Any, Any]:
    """A layer's or cell's, of inputs and of the hidden state; None for none."""
    cell = getattr(layer, "cell", layer)
    if not cell.use_bias:
        return None, None
    bias = tf.cast(cell.bias if bias is None else bias, dtype)
    if bias.shape.rank == 1:
        return bias, None
    return bias[0], bias[1]
