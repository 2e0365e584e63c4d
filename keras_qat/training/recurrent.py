"""Recurrent layers in training: fake-quantizes the tensors of the steps in `step_math.py`.

An LSTM fake-quantizes its states from step to step. Other layers are unrolled in files, so all
tensors of a step are fake-quantized. The states that layers with `stateful=True` keep are the
variables of Keras' layers: float32 holds every integer state of a TFLite kernel, so training,
inference and `reset_states` share them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic import fake_quant
from keras_qat.graph.calls import Call, Value
from keras_qat.helper_layers.keras_variants import has_mask_input
from keras_qat.keras2 import backend
from keras_qat.keras2.backend import keras
from keras_qat.keras2.layers_and_models import list_layers
from keras_qat.ops.recurrent.lstm import CELL, HIDDEN
from keras_qat.ops.recurrent.step_math import (
    CONV_LSTMS,
    Part,
    compute_offsets,
    find_weight_parts,
    make_step,
    names_of_states,
    select_columns,
)
from keras_qat.ops.recurrent.step_ops import get_fixed_params
from keras_qat.ops.registry import match
from keras_qat.training.fake_quantization.activation_quantizer import ActivationQuantizer
from keras_qat.training.fake_quantization.phase import Phase
from keras_qat.training.fake_quantization.weight_quantizer import replace_weights

Round = Callable[[str, tf.Tensor], tf.Tensor]
"""Function that fake-quantizes a tensor to the range with a name."""

Linear = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
"""Function that multiplies inputs and a kernel."""


class _InTraining:
    """The arithmetic of a step in training, which collects tensors by the name of their range.

    Args:
        multiply: multiplies a hidden state by a named part of the recurrent weights.
        quantize: fake-quantizes a tensor inside a step.
    """

    def __init__(self, multiply: Round, quantize: Round) -> None:
        self._multiply_weights, self._quantize = multiply, quantize
        self.seen: dict[str, list[tf.Tensor]] = {}

    def note(self, name: str, x: tf.Tensor) -> Any:
        self.seen.setdefault(name, []).append(x)
        return self._quantize(name, x)

    def product(self, part: str, hidden: tf.Tensor) -> Any:
        return self.note(f"state_{part}", self._multiply_weights(part, hidden))

    def add(
        self, first: tf.Tensor, second: tf.Tensor, name: str, maximum: float | None = None
    ) -> Any:
        total = first + second
        if maximum is not None:
            finite = maximum < math.inf
            total = tf.clip_by_value(total, 0.0, maximum) if finite else tf.nn.relu(total)
        return self.note(name, total)

    def multiply(self, first: tf.Tensor, second: tf.Tensor, name: str) -> Any:
        return self.note(name, first * second)

    def sigmoid(self, x: tf.Tensor, name: str) -> Any:
        return self.note(name, tf.sigmoid(x))

    def tanh(self, x: tf.Tensor, name: str) -> Any:
        return self.note(name, tf.tanh(x))

    def subtract_from_one(self, x: tf.Tensor) -> Any:
        return self.note("sigmoid", 1.0 - x)

    def split(self, x: tf.Tensor, count: int) -> list[Any]:
        return tf.split(x, count, -1)


def simulate_unrolled(
    layer: keras.layers.Layer,
    inner: Mapping[str, ActivationQuantizer],
    x: tf.Tensor,
    weights: dict[str, tf.Tensor],
    phase: Phase,
) -> tf.Tensor:
    """Computes a recurrent layer with quantized weights, and observes the tensors of its steps.

    Tensors inside a step are rounded to the ranges from before the call.
    """
    ranges = {name: x.observe(None, training=False) for name, x in inner.items()}
    applies = {name: x.applies(phase, *ranges[name]) for name, x in inner.items()}

    def quantize(name: str, x: tf.Tensor) -> tf.Tensor:
        if name in inner:
            return fake_quant.fake_quantize_if(applies[name], x, *ranges[name])
        own = get_fixed_params(name)
        if own.bits == 16 and name != "cell":
            return x  # It is finer than its operands, and its range never clips.
        low, high = (
            tf.constant(float((end - own.zero_point) * own.scale))
            for end in (own.lowest, own.highest)
        )
        return fake_quant.fake_quantize_if(phase.quantizing, x, low, high, own.bits)

    def quantize_inputs(name: str, x: tf.Tensor) -> tf.Tensor:
        return inner[name](x, phase)

    outputs, seen = simulate_steps(layer, x, weights, phase, quantize_inputs, quantize)
    for name, tensors in seen.items():
        inner[name].observe_only(tf.stack(tensors), phase)
    return outputs


def simulate_steps(
    layer: keras.layers.Layer,
    x: tf.Tensor,
    weights: dict[str, Any],
    phase: Phase,
    quantize_inputs: Round,
    quantize: Round,
) -> tuple[Any, dict[str, list[Any]]]:
    """Returns the output of a layer, and the tensors inside its steps by the name of their range.

    Args:
        layer: the layer.
        x: its input, or a list of the input and the initial state, or of the input and its mask.
        weights: the weights to use, by their paths.
        phase: the phase of the call.
        quantize_inputs: fake-quantizes the products of all inputs.
        quantize: fake-quantizes a tensor inside a step.
    """
    cell, dtype, part_of = layer.cell, layer.compute_dtype, find_weight_parts(layer)
    x, *initial_state = tf.nest.flatten(x)
    mask = initial_state.pop() if has_mask_input(layer) else None
    op, attributes, reason = match(Call(layer, (_value(x),), {}, _value(x), ""))
    assert op is not None, reason
    step_once, inner = make_step(attributes), op.inner(attributes)
    kernel, recurrent = (
        tf.cast(weights[f"cell.{name}"], dtype) for name in ("kernel", "recurrent_kernel")
    )
    bias, own_bias = get_biases(layer, dtype, weights.get("cell.bias"))
    x = tf.cast(x, dtype)
    backend.reset_dropout_mask(layer)
    masks, of_blocks = None, isinstance(layer, CONV_LSTMS)
    if 0 < cell.dropout < 1:
        step_masks = cell.get_dropout_mask_for_cell(x[:, 0], phase.training, count=4)
        masks = [mask[:, None] for mask in step_masks]
        x, masks = (x, masks) if of_blocks else (x * masks[0], None)
    linear, linear_again = _get_linear(layer)
    inputs = {
        name: quantize_inputs(f"input_{name}", _multiply(linear, x, (kernel, bias), part, masks))
        for name, part in part_of.items()
    }

    def step(values: Any, states: Any) -> tuple[dict[str, Any], list[Any]]:
        (hidden, *other_states), is_there = states, None
        if mask is not None:
            *values, is_there = values
        masks = None
        if 0 < cell.recurrent_dropout < 1:
            masks = cell.get_recurrent_dropout_mask_for_cell(hidden, phase.training, count=4)
            hidden, masks = (hidden, masks) if of_blocks else (hidden * masks[0], None)

        def product(name: str, hidden: tf.Tensor) -> Any:
            return _multiply(linear_again, hidden, (recurrent, own_bias), part_of[name], masks)

        arithmetic = _InTraining(product, quantize)
        after = step_once(
            arithmetic, dict(zip(part_of, values, strict=True)), (hidden, *other_states)
        )
        if is_there is not None:
            pairs = zip(after, states, strict=True)
            after = tuple(tf.where(is_there, *pair) for pair in pairs)
        output = after[0]
        if is_there is not None and attributes["zeroes"]:
            output = tf.where(is_there, output, tf.zeros_like(output))
        seen = {name: tensors for name, tensors in arithmetic.seen.items() if name in inner}
        return {"sequence": output, "seen": seen}, list(after)

    states = [quantize("hidden", tf.cast(state, dtype)) for state in initial_state]
    if not states:
        zeros = tf.zeros_like(list(inputs.values())[-1][:, 0])
        states = layer.states if layer.stateful else [zeros] * len(names_of_states(attributes))
    of_steps = [*inputs.values(), *([] if mask is None else [mask[..., None]])]
    if layer.unroll:
        outputs, last = _unroll(step, of_steps, states, layer.go_backwards)
    else:
        _, outputs, last = backend.keras.backend.rnn(
            step,
            of_steps,
            states,
            go_backwards=layer.go_backwards,
            input_length=x.shape[1],
            return_all_outputs=True,
        )
    if layer.stateful:
        keep_states(layer, last)
    sequence, seen = outputs["sequence"], outputs["seen"]
    if initial_state and "hidden" in seen:  # The range of a ReLU has no negative states.
        seen["hidden"] = [tf.concat([tf.nn.relu(states[0])[:, None], *seen["hidden"]], 1)]
    return sequence if layer.return_sequences else sequence[:, -1], seen


def _unroll(step: Any, inputs: list[Any], states: Any, go_backwards: bool) -> Any:
    """Computes a known number of steps, because Keras' unrolling does not support dictionaries.

    Returns:
        The results of the steps, with an axis of steps, and the last states.
    """
    steps = list(zip(*(tf.unstack(x, axis=1) for x in inputs), strict=True))
    outputs = []
    for values in reversed(steps) if go_backwards else steps:
        output, states = step(values, states)
        outputs.append(output)
    return tf.nest.map_structure(lambda *tensors: tf.stack(tensors, 1), *outputs), states


def _get_linear(layer: keras.layers.Layer) -> tuple[Linear, Linear]:
    """Returns the functions that multiply a kernel by all inputs and by a hidden state."""
    if not isinstance(layer, CONV_LSTMS):
        return lambda x, kernel: tf.tensordot(x, kernel, 1), tf.matmul
    cell = layer.cell

    def convolve_inputs(x: tf.Tensor, kernel: tf.Tensor) -> Any:
        folded = tf.reshape(x, [-1, *x.shape[2:]])
        y = cell.input_conv(folded, kernel, padding=cell.padding)
        return tf.reshape(y, [-1, *x.shape[1:2], *y.shape[1:]])

    return convolve_inputs, cell.recurrent_conv


def _multiply(
    linear: Linear, x: tf.Tensor, weights: tuple[Any, Any], part: Part, masks: Any
) -> Any:
    """Multiplies `x` by a part of the weights and adds its bias. Each block has a dropout mask."""
    kernel, bias = weights
    if masks is None:
        y = linear(x, select_columns(kernel, part))
    else:
        size = part.blocks[0].stop - part.blocks[0].start
        products = [
            linear(x * masks[block.start // size], kernel[..., block]) for block in part.blocks
        ]
        y = tf.concat(products, -1)
    y = y if bias is None else y + select_columns(bias, part)
    return y if part.slope == 1 else y * part.slope


def _value(x: tf.Tensor) -> Value:
    return Value("x", tuple(x.shape), x.dtype.name)


def get_biases(
    layer: keras.layers.Layer, dtype: tf.DType, bias: tf.Tensor = None
) -> tuple[Any, Any]:
    """Returns a layer's biases for the inputs and for the hidden state, each may be None.

    The bias for the inputs includes the offsets of its components. `bias` has to include them too.
    """
    if bias is None:
        bias, offset = layer.cell.bias, compute_offsets(layer)
        if bias is None and not offset.any():
            return None, None
        if bias is not None and bias.shape.rank == 2:
            offset = np.stack([offset, np.zeros_like(offset)])
        offset = tf.constant(offset, dtype)
        bias = offset if bias is None else tf.cast(bias, dtype) + offset
    bias = tf.cast(bias, dtype)
    if bias.shape.rank == 1:
        return bias, None
    return bias[0], bias[1]


def simulate_lstm(
    layer: keras.layers.Layer, x: tf.Tensor, weights: dict[str, Any], phase: Phase, bits: int = 8
) -> Any:
    """Computes an LSTM with given weights, and fake-quantizes its states from step to step."""
    limits = HIDDEN.wide if bits == 16 else (HIDDEN.minimum, HIDDEN.maximum)
    highest = float(CELL.highest * CELL.scale)

    def step(x: tf.Tensor, states: Any) -> tuple[Any, list[Any]]:
        _, (hidden, cell) = layer.cell(x, states, training=phase.training)
        low, high = map(tf.constant, limits)  # Here, because tf2onnx needs constants in the loop.
        hidden = fake_quant.fake_quantize_if(phase.quantizing, hidden, low, high, bits)
        # The cell has 16 bits, which are so fine that only its limits matter.
        cell = tf.clip_by_value(cell, -highest, highest)
        return hidden, [hidden, cell]

    backend.reset_dropout_mask(layer)
    with replace_weights(layer, weights):
        last, outputs, states = backend.keras.backend.rnn(
            step,
            x,
            layer.states if layer.stateful else layer.get_initial_state(x),
            go_backwards=layer.go_backwards,
            unroll=layer.unroll,
            input_length=x.shape[1],
            return_all_outputs=layer.return_sequences,
        )
    if layer.stateful:
        keep_states(layer, states)
    return outputs if layer.return_sequences else last


def list_states(model: keras.Model) -> list[Any]:
    """Returns the variables that hold the states of a model."""
    layers = [layer for layer in list_layers(model) if isinstance(layer, keras.layers.RNN)]
    return [state for rnn in layers if rnn.stateful for state in tf.nest.flatten(rnn.states)]


def kept_batch(states: Sequence[Any]) -> int | None:
    """Returns the number of sequences in a model's states; None without states."""
    return int(states[0].shape[0]) if states else None


def keep_states(layer: keras.layers.Layer, states: Sequence[Any]) -> None:
    """Assigns the states after the last step to a layer's variables."""
    for variable, state in zip(layer.states, states, strict=True):
        variable.assign(tf.cast(state, variable.dtype))


class Stream:
    """A separate set of states for a model, which starts at zeros.

    Within `with stream:` the model has the states of the stream, afterwards its own again.
    """

    def __init__(self, states: Sequence[Any]) -> None:
        self._variables = states
        self._others = [tf.zeros_like(state) for state in self._variables]

    def _swap(self) -> None:
        current = [tf.identity(state) for state in self._variables]
        for variable, value in zip(self._variables, self._others, strict=True):
            variable.assign(value)
        self._others = current

    def __enter__(self) -> None:
        self._swap()

    def __exit__(self, *error: Any) -> None:
        self._swap()


@contextlib.contextmanager
def restore_states(states: list[Any]) -> Iterator[None]:
    """Runs a block, possibly a traced one, and restores states afterwards."""
    before = [tf.identity(state) for state in states]
    try:
        yield
    finally:
        for variable, value in zip(states, before, strict=True):
            variable.assign(value)
