"""Recurrent layers in training: fake quantization of the tensors inside time steps.

In a file, an LSTM is one operator, so only its states are fake-quantized after each step. Other
recurrent layers are several operators for each step, so all tensors inside a step are
fake-quantized. Layers with `stateful=True` keep their states in float32 variables. Float32 can
represent the integer states of TFLite exactly.

A part of the weights is a group of columns with the same activation function. For example, the
columns of all gates with a sigmoid are one part.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic import fake_quant
from keras_qat.config.specs import QuantSpec
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
from keras_qat.ops.recurrent.step_ops import NEVER_CLIPPED, get_fixed_params
from keras_qat.ops.registry import match
from keras_qat.training.fake_quantization.activation_quantizer import ActivationQuantizer
from keras_qat.training.fake_quantization.phase import Phase
from keras_qat.training.recurrent_steps import run_steps

Round = Callable[[str, tf.Tensor], tf.Tensor]
"""A function `(name, x)` that fake-quantizes `x` to the range called `name`."""

Linear = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
"""A function `(inputs, kernel)` that returns a product, such as `tf.matmul`."""


class _InTraining:
    """The operations of a step (`step_math.Arithmetic`) for training, with fake quantization.

    `seen` collects the tensors before quantization, to observe their ranges.
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
    """Computes a recurrent layer with quantized weights, and observes the tensors inside steps.

    These tensors are quantized to the ranges from earlier batches. For the first batch, ranges are
    computed from the batch itself.
    """
    ranges = {name: x.observe(None, training=False) for name, x in inner.items()}
    observes = phase.calibrated and phase.training is not False  # Other phases allow empty ranges.
    if observes and any(x.current_range() == (0, 0) for x in inner.values()):
        ranges = _find_first_ranges(layer, inner, x, weights, phase, ranges)
    applies = {name: x.applies(phase, *ranges[name]) for name, x in inner.items()}

    def quantize(name: str, x: tf.Tensor) -> tf.Tensor:
        if name in inner:
            return fake_quant.fake_quantize_if(applies[name], x, *ranges[name])
        own = get_fixed_params(name)
        if any(own is params for params in NEVER_CLIPPED):
            return x  # The scale is finer than the operands' scales, and the range never clips.
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


def _find_first_ranges(
    layer: keras.layers.Layer,
    inner: Mapping[str, ActivationQuantizer],
    x: tf.Tensor,
    weights: dict[str, tf.Tensor],
    phase: Phase,
    ranges: dict[str, Any],
) -> Any:
    """Return `ranges`. Empty ranges are replaced by ranges of this batch, computed in float."""

    def compute_in_float() -> dict[str, Any]:
        states = [tf.identity(state) for state in layer.states] if layer.stateful else []
        own = phase._replace(training=False)
        _, seen = simulate_steps(layer, x, weights, own, lambda _, x: x, lambda _, x: x)
        if states:
            keep_states(layer, states)
        found = dict(ranges)
        for name, tensors in seen.items():
            spec, (low, high) = inner[name].spec, ranges[name]
            assert isinstance(spec, QuantSpec)
            first = fake_quant.find_range(tf.stack(tensors), 8, spec.symmetric, spec.narrow_range)
            found[name] = tuple(map(partial(tf.where, low < high), (low, high), first))
        return found

    has_data = tf.reduce_all([low < high for low, high in ranges.values()])
    found = tf.cond(has_data, lambda: ranges, compute_in_float)
    return tf.nest.map_structure(tf.stop_gradient, found)


def simulate_steps(
    layer: keras.layers.Layer,
    x: tf.Tensor,
    weights: dict[str, Any],
    phase: Phase,
    quantize_inputs: Round,
    quantize: Round,
) -> tuple[Any, dict[str, list[Any]]]:
    """Returns the output of a layer, and {name of a range: list of tensors inside the steps}.

    Args:
        layer: the layer.
        x: the input, or a list: the input, then initial states (optional), then a mask (optional).
        weights: the weights by path, such as "cell.kernel".
        phase: the phase of the call.
        quantize_inputs: function that fake-quantizes the products of the inputs and the kernel.
        quantize: function that fake-quantizes a tensor inside a step.
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
    x = swap_steps(tf.cast(x, dtype))
    backend.reset_dropout_mask(layer)
    has_masks_of_blocks = len(names_of_states(attributes)) == 2 and (
        getattr(cell, "implementation", 1) == 1
    )
    linear, linear_again = _get_linear(layer)

    def drop(x: tf.Tensor, masks: Any) -> tuple[tf.Tensor, Any]:
        """Apply dropout. If each gate has its own mask, return `masks` to apply them later."""
        return (x, masks) if has_masks_of_blocks else (x * masks[0], None)

    masks = recurrent_masks = None
    if 0 < cell.dropout < 1:
        x, masks = drop(x, cell.get_dropout_mask_for_cell(x[0], phase.training, count=4))
    inputs = {
        name: quantize_inputs(
            f"input_{name}", _multiply(linear, masks, part, x, *_select(part, kernel, bias))
        )
        for name, part in part_of.items()
    }
    states = [quantize("hidden", tf.cast(state, dtype)) for state in initial_state]
    if not states:
        zeros = tf.zeros_like(list(inputs.values())[-1][0])
        states = layer.states if layer.stateful else [zeros] * len(names_of_states(attributes))
    if 0 < cell.recurrent_dropout < 1:
        recurrent_masks = cell.get_recurrent_dropout_mask_for_cell(
            states[0], phase.training, count=4
        )

    def multiply(name: str, hidden: tf.Tensor, *weights: Any) -> Any:
        masks = recurrent_masks if has_masks_of_blocks else None
        return _multiply(linear_again, masks, part_of[name], hidden, *weights)

    def step(multiply: Round, values: Mapping[str, Any], states: Any) -> Any:
        hidden, *other_states = states
        if recurrent_masks is not None:
            hidden, _ = drop(hidden, recurrent_masks)
        arithmetic = _InTraining(multiply, quantize)
        after = step_once(arithmetic, values, (hidden, *other_states))
        if mask is not None:
            pairs = zip(after, states, strict=True)
            after = tuple(tf.where(values[_MASK], *pair) for pair in pairs)
        return after, {name: tensors for name, tensors in arithmetic.seen.items() if name in inner}

    in_steps = dict(inputs)
    if mask is not None:
        in_steps[_MASK] = swap_steps(mask)[..., None]
    if layer.go_backwards:
        in_steps = {name: tf.reverse(x, [0]) for name, x in in_steps.items()}
    own_weights = {name: _select(part, recurrent, own_bias) for name, part in part_of.items()}
    states = [tf.convert_to_tensor(state) for state in states]
    after, seen = run_steps(step, multiply, own_weights, in_steps, states, layer.unroll)
    if layer.stateful:
        keep_states(layer, [x[-1] for x in after])
    sequence = after[0]
    if mask is not None and attributes["zeroes"]:
        sequence = tf.where(in_steps[_MASK], sequence, tf.zeros_like(sequence))
    if initial_state and "hidden" in seen:
        seen["hidden"] = [tf.concat([states[0][None], *seen["hidden"]], 0)]
    return swap_steps(sequence) if layer.return_sequences else sequence[-1], seen


_MASK = "mask"
"""Key of the mask in a dict of the inputs of the steps. The other keys are the names of parts."""


def _get_linear(layer: keras.layers.Layer) -> tuple[Linear, Linear]:
    """Return the functions that multiply the inputs and the hidden state: matmul or convolution."""
    if not isinstance(layer, CONV_LSTMS):
        return tf.matmul, tf.matmul
    return partial(layer.cell.input_conv, padding=layer.cell.padding), layer.cell.recurrent_conv


def _apply(linear: Linear, x: tf.Tensor, kernel: tf.Tensor) -> Any:
    """Multiply `x` by a kernel. If `x` has all time steps, they are treated as one batch."""
    if x.shape.rank == kernel.shape.rank:
        return linear(x, kernel)
    y = linear(tf.reshape(x, [-1, *x.shape[2:]]), kernel)
    sizes = tf.concat([tf.shape(x)[:2], tf.shape(y)[1:]], 0)
    return tf.ensure_shape(tf.reshape(y, sizes), [*x.shape[:2], *y.shape[1:]])


def _select(part: Part, kernel: tf.Tensor, bias: tf.Tensor | None) -> list[Any]:
    """Return the columns of one part (such as all gates) of the kernel and, if any, of the bias."""
    return [select_columns(x, part) for x in (kernel, bias) if x is not None]


def _multiply(
    linear: Linear, masks: Any, part: Part, x: tf.Tensor, kernel: tf.Tensor, *bias: tf.Tensor
) -> Any:
    """Multiply `x` by a part of the weights and add the bias. `masks` are dropout masks."""
    if masks is None:
        y = _apply(linear, x, kernel)
    else:
        blocks = zip(part.blocks, tf.split(kernel, len(part.blocks), -1), strict=True)
        size = part.blocks[0].stop - part.blocks[0].start
        y = tf.concat(
            [_apply(linear, x * masks[of.start // size], block) for of, block in blocks], -1
        )
    y = y + bias[0] if bias else y
    return y if part.slope == 1 else y * part.slope


def swap_steps(x: tf.Tensor) -> Any:
    """Transposes [batch, steps, ...] to [steps, batch, ...], or back."""
    return tf.transpose(x, [1, 0, *range(2, x.shape.rank)])


def _value(x: tf.Tensor) -> Value:
    return Value("x", tuple(x.shape), x.dtype.name)


def get_biases(
    layer: keras.layers.Layer, dtype: tf.DType, bias: tf.Tensor = None
) -> tuple[Any, Any]:
    """Returns the biases of a layer for the inputs and for the hidden state. Each may be None.

    Keras's hard sigmoid is 0.2 * (x + 2.5). The offset 2.5 is added to the first bias, unless
    `bias` is given, which must already include it.
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
    """Computes an LSTM with given weights, and fake-quantizes the states after each step."""
    limits = HIDDEN.wide if bits == 16 else (HIDDEN.minimum, HIDDEN.maximum)
    highest = float(CELL.highest * CELL.scale)

    def quantize(name: str, x: tf.Tensor) -> Any:
        if name == "hidden":
            low, high = map(tf.constant, limits)
            return fake_quant.fake_quantize_if(phase.quantizing, x, low, high, bits)
        # The cell state has 16 bits, so it is only clipped.
        return (
            tf.raw_ops.ClipByValue(t=x, clip_value_min=-highest, clip_value_max=highest)
            if name == "cell"
            else x
        )

    return simulate_steps(layer, x, weights, phase, lambda _, x: x, quantize)[0]


def list_states(model: keras.Model) -> list[Any]:
    """Returns the variables for the states of all layers with `stateful=True`."""
    layers = [layer for layer in list_layers(model) if isinstance(layer, keras.layers.RNN)]
    return [state for rnn in layers if rnn.stateful for state in tf.nest.flatten(rnn.states)]


def kept_batch(states: Sequence[Any]) -> int | None:
    """Returns the batch size of a model's states. Returns None without states."""
    return int(states[0].shape[0]) if states else None


def keep_states(layer: keras.layers.Layer, states: Sequence[Any]) -> None:
    for variable, state in zip(layer.states, states, strict=True):
        variable.assign(tf.cast(state, variable.dtype))


class Stream:
    """Keeps the states of a second sequence for a model with `stateful=True`.

    Inside `with stream:`, the model continues the second sequence. The states of this sequence are
    zero at first. Outside, the model continues the first sequence.
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
    """Restores the values of states after a `with` block. This also works in a traced graph."""
    before = [tf.identity(state) for state in states]
    try:
        yield
    finally:
        for variable, value in zip(states, before, strict=True):
            variable.assign(value)
