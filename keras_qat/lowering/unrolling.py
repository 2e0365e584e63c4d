"""Unrolls recurrent layers that have no operator, such as layers with custom cells.

The cell is called once for each step. It is traced like a custom layer.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Value, flatten_values
from keras_qat.graph.facts import Facts
from keras_qat.keras2.backend import layers, swap_attributes
from keras_qat.keras2.layers_and_models import is_of_keras, list_layers
from keras_qat.lowering.builder import LoweringContext
from keras_qat.lowering.recurrent import find_float_reason, find_unrolling_obstacle, split_recurrent
from keras_qat.ops.op import SharedRange
from keras_qat.ops.recurrent.lstm import TANH
from keras_qat.ops.recurrent.step_math import HARD_SIGMOID
from keras_qat.ops.recurrent.step_ops import SIGMOID
from keras_qat.ops.recurrent.unrolled import RELU
from keras_qat.ops.registry import match

CELLS = layers.LSTMCell, layers.GRUCell, layers.SimpleRNNCell, layers.StackedRNNCells
"""Keras' cells, which are traced like custom cells."""

UNROLLED = layers.RNN, layers.LSTM, layers.GRU, layers.SimpleRNN
"""Layers that can be unrolled. Subclasses stay unchanged."""


def find_unrolled(call: Call, anyway: bool = False) -> Callable[..., Any] | None:
    """Return a function that computes a recurrent layer step by step, instead of `layer.call`.

    Return None if the layer cannot be unrolled. Also return None if it has an integer operator,
    unless `anyway` is True.
    """
    layer = call.layer
    if type(layer) is layers.Bidirectional:
        if not hasattr(layer.forward_layer, "cell"):  # The inner layer is not a recurrent layer.
            return functools.partial(_run_both_ways, layer)
        inner = Call(layer.forward_layer, call.args, call.kwargs, [], call.name)
        is_needed = anyway or find_float_reason(call) or _starts_out_of_range(inner)
        can_unroll = is_needed and not find_unrolling_obstacle(inner)
        return functools.partial(_run_both_ways, layer) if can_unroll else None
    if type(layer) not in UNROLLED or find_unrolling_obstacle(call):
        return None
    has_row = match(call).op is not None or split_recurrent(call, LoweringContext())
    if has_row and not anyway and not _starts_out_of_range(call):
        return None
    return functools.partial(_run_steps, layer)


def _starts_out_of_range(call: Call) -> bool:
    """Return True if an initial state may exceed the bounds of the layer's activation.

    The operator would clip such a state. Inputs of the model are assumed to be in range, because
    they are usually states that the layer returned before.
    """
    low, high = BOUNDS.get(getattr(call.layer, "activation", None), (-1.0, 1.0))
    facts = Facts()
    states = [facts.find(find_bounds, value) for value in flatten_values(call.args)[1:]]
    return any(bounds[0] < low or bounds[1] > high for bounds in states)


BOUNDS: dict[Any, tuple[float, float]] = {
    **dict.fromkeys(TANH, (-1.0, 1.0)),
    **dict.fromkeys((*SIGMOID.functions, HARD_SIGMOID), (0.0, 1.0)),
    **dict.fromkeys(RELU, (0.0, np.inf)),
}
"""Maps an activation to its smallest and largest result."""


def find_bounds(value: Value) -> Generator[Value, Any, tuple[float, float]]:
    """Find the lowest and the highest possible value of a tensor. Called by `Facts.find`."""
    call = value.producer
    if call is None:
        return 0.0, 0.0
    is_carry = isinstance(call.layer, layers.LSTM) and flatten_values(call.outputs)[-1] is value
    activation = getattr(call.layer, "activation", None)
    if activation in BOUNDS and not (is_carry and call.layer.return_state):
        return BOUNDS[activation]
    op = match(call).op
    if isinstance(getattr(op, "output", None), SharedRange):
        low, high = np.inf, -np.inf
        for x in call.inputs:
            bounds = yield x
            low, high = min(low, bounds[0]), max(high, bounds[1])
        return low, high
    return -np.inf, np.inf


def find_refused_cells(
    traced: Iterable[layers.Layer], refused: Mapping[layers.Layer, str]
) -> dict[layers.Layer, str]:
    """Map each layer in `traced` that has a cell in `refused` to the reason for this cell."""
    return {
        layer: refused[cell]
        for layer in traced
        if type(layer) in UNROLLED
        for cell in list_layers(layer.cell)
        if cell in refused
    }


def combine_gates(cell: layers.Layer) -> contextlib.AbstractContextManager[None]:
    """Return a context that makes a Keras cell compute all gates with one matrix product.

    The cell then applies no dropout, because `_run_steps` already does.
    """
    if type(cell) not in CELLS or type(cell) is layers.StackedRNNCells:
        return contextlib.nullcontext()
    if type(cell) is layers.LSTMCell and cell.use_bias:
        return swap_attributes(cell, call=functools.partial(_run_lstm_step, cell))
    if (
        type(cell) is layers.GRUCell and not cell.reset_after
    ):  # With combined gates, Keras would split off an empty tensor.
        return swap_attributes(cell, implementation=1, dropout=0.0)
    return swap_attributes(cell, implementation=2, dropout=0.0)


def _run_lstm_step(
    cell: layers.LSTMCell, inputs: tf.Tensor, states: Any, training: bool | None = None
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    hidden, carry = states
    # One FULLY_CONNECTED computes both the product and the bias.
    products = tf.nn.bias_add(tf.matmul(inputs, cell.kernel), cell.bias)
    gates = tf.split(products + tf.matmul(hidden, cell.recurrent_kernel), 4, -1)
    i, f, o = (cell.recurrent_activation(gates[index]) for index in (0, 1, 3))
    carry = f * carry + i * cell.activation(gates[2])
    hidden = o * cell.activation(carry)
    return hidden, [hidden, carry]


def _run_steps(layer: layers.RNN, inputs: Any, mask: tf.Tensor | None = None, **_: object) -> Any:
    """Call the cell of a layer for each step of a sequence.

    The sequence may be a structure of tensors, such as (values, times). If the mask of a step is
    False, the states do not change. The output of this step is the previous output or zeros.
    """
    # A list contains the sequence and states. Any other structure is a sequence.
    sequence, *states = inputs if isinstance(inputs, list) else [inputs]
    cell = layer.cell
    sizes = cell.state_size if tf.nest.is_nested(cell.state_size) else [cell.state_size]
    if getattr(layer, "dropout", 0):  # All steps drop the same inputs.
        sequence = layers.SpatialDropout1D(layer.dropout, name="dropout")(sequence)
    columns = [tf.unstack(x, axis=1) for x in tf.nest.flatten(sequence)]
    steps = [tf.nest.pack_sequence_as(sequence, row) for row in zip(*columns, strict=True)]
    masks = [None] * len(steps) if mask is None else tf.unstack(mask, axis=1)
    if not states:
        first = tf.nest.flatten(steps[0])[0]
        states = _make_initial_states(layer, sequence, first, tf.nest.flatten(sizes))
    states, outputs = tf.nest.pack_sequence_as(sizes, tf.nest.flatten(states)), list[Any]()
    order = -1 if layer.go_backwards else 1
    for x, is_there in list(zip(steps, masks, strict=True))[::order]:
        output, after = cell(x, states)
        after = after if tf.nest.is_nested(after) else [after]
        if is_there is not None:
            has_output = outputs and not getattr(layer, "zero_output_for_mask", False)
            before = outputs[-1] if has_output else tf.zeros_like(output)
            output = _where(is_there, output, before)
            after = tf.nest.map_structure(functools.partial(_where, is_there), after, states)
        states = after
        outputs.append(output)
    result = tf.stack(outputs, 1) if layer.return_sequences else outputs[-1]
    return [result, *tf.nest.flatten(states)] if layer.return_state else result


def _where(is_there: tf.Tensor, after: tf.Tensor, before: tf.Tensor) -> tf.Tensor:
    return tf.where(tf.reshape(is_there, [-1, *[1] * (len(after.shape) - 1)]), after, before)


def _make_initial_states(
    layer: layers.RNN, sequence: Any, step: tf.Tensor, sizes: list[Any]
) -> list[tf.Tensor]:
    """Return the initial states that a custom cell defines. For Keras' cells, return zeros."""
    if hasattr(layer.cell, "get_initial_state") and not is_of_keras(layer.cell):
        return tf.nest.flatten(layer.get_initial_state(sequence))
    states, first = [], (layers.Flatten()(step) if len(step.shape) > 2 else step)[:, :1]
    for size in sizes:
        shape = [size] if isinstance(size, int) else size.as_list()
        one = tf.reshape(first, [-1, *[1] * len(shape)]) if len(shape) > 1 else first
        states.append(one * np.zeros([1, *shape], np.float32))
    return states


def _run_both_ways(
    layer: layers.Bidirectional, inputs: Any, mask: tf.Tensor | None = None, **_: object
) -> Any:
    """Call both layers of a Bidirectional, each with half of the states, and merge the outputs."""
    x, *states = tf.nest.flatten(inputs)
    half, merge = len(states) // 2, layer.merge_mode
    parameters = inspect.signature(layer.forward_layer.call).parameters
    options = {} if mask is None or "mask" not in parameters else {"mask": mask}

    def run(inner: layers.Layer, states: list[tf.Tensor]) -> list[tf.Tensor]:
        if "initial_state" not in parameters:
            return tf.nest.flatten(inner(inputs, **options))
        return tf.nest.flatten(inner([x, *states] if states else x, **options))

    forward, *after = run(layer.forward_layer, states[:half])
    backward, *after_backward = run(layer.backward_layer, states[half:])
    if layer.return_sequences:
        backward = tf.reverse(backward, [1])
    merged = [MERGED[merge](forward, backward)] if merge else [forward, backward]
    outputs = [*merged, *after, *after_backward]
    return outputs if len(outputs) > 1 else outputs[0]


MERGED: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "concat": lambda x, y: tf.concat([x, y], -1),
    "sum": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "ave": lambda x, y: (x + y) * 0.5,
}
"""Maps `merge_mode` to the function that merges two tensors."""
