"""LSTM, which TFLite computes with one operator for all steps of a sequence.

Gates are int16 with 12 fractional bits. Sigmoids and hyperbolic tangents of gates have 15
fractional bits. TFLite and TFLite Micro compute these functions differently. The cell state is
int16 with 11 fractional bits, so its values are below 16. The hidden state and the output are int8,
from -1 to 127/128. TFLite Micro also has a kernel with int16 for the input, the hidden state and
the output.

TFLite's operator keeps its states from one run of a file to the next. If the layer is not
`stateful`, the file first writes zeros into the states.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.lite.python import schema_py_generated as schema

from keras_qat.arithmetic import sigmoid_and_tanh
from keras_qat.arithmetic.fixed_point import divide_floats, saturate
from keras_qat.arithmetic.kernel_families import TFLM
from keras_qat.arithmetic.plain_operations import gather, product
from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.graph.calls import Call
from keras_qat.helper_layers.keras_variants import has_mask_input
from keras_qat.keras2.backend import keras
from keras_qat.ops.emission import Emission
from keras_qat.ops.movement import Part, emit_slice
from keras_qat.ops.op import Arguments, Attributes, FixedRange, Op
from keras_qat.ops.recurrent.kept_states import read_states, store_states
from keras_qat.ops.recurrent.lstm_products import GATE, Products
from keras_qat.ops.recurrent.step_math import count_steps
from keras_qat.ops.weights import Weights

HIDDEN = FixedRange(-1.0, 127 / 128)
"""The range of the hidden state, which is also the output."""

CELL = QuantParams(np.float32(2.0**-11), 0, 16)
"""Quantization parameters of the cell state."""

BITS = 15
"""Fractional bits of sigmoid and tanh."""

TANH = (keras.activations.tanh, tf.tanh)
_SIGMOID = (keras.activations.sigmoid, tf.sigmoid)


def read_form(call: Call) -> Attributes:
    return {
        "backwards": bool(call.layer.go_backwards),
        "sequences": bool(call.layer.return_sequences),
        "keeps": bool(call.layer.stateful),
    }


def _accepts(call: Call, attributes: Attributes) -> str | None:
    layer = call.layer
    if layer.activation not in TANH or layer.recurrent_activation not in _SIGMOID:
        return "its activations are not tanh and sigmoid"
    if layer.return_state or len(call.inputs) > 1:
        return "its states are inputs or outputs"
    return explain_form(call)


def explain_form(call: Call, axes: int = 3) -> str | None:
    """Returns a reason if a recurrent layer's inputs are not supported, otherwise None."""
    layer = call.layer
    is_masked = any(value.masked for value in call.inputs) or call.kwargs.get("mask") is not None
    if is_masked and not has_mask_input(layer):
        return "it has a mask"
    if call.kwargs.get("initial_state") is not None:
        return "it begins with a state that is a constant"
    if layer.time_major or len(call.inputs[0].shape) != axes:
        return "its inputs are not sequences of vectors"
    return None


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """The prepared parameters of an LSTM.

    Args:
        of_input, of_hidden: the weights for inputs and for hidden states, with their multipliers.
        tables: tables of sigmoid(gate), tanh(gate) and tanh(cell state), for all int16 values.
    """

    of_input: Products
    of_hidden: Products
    tables: list[Any]


def _choose_family(a: Arguments) -> Arguments:
    if a.wide and not a.family.int16_lstm:  # Only TFLite Micro has an int16 LSTM.
        return dataclasses.replace(a, family=TFLM)
    return a


def _prepare(a: Arguments) -> _Prepared:
    a = _choose_family(a)
    weights: Weights = a.weights
    assert weights.recurrent is not None
    return _Prepared(
        Products.prepare(a, weights, a.params[0].scale, 255),
        Products.prepare(a, weights.recurrent, a.output.scale, 128),
        _tabulate(a),
    )


def _compute(a: Arguments) -> Any:
    a = _choose_family(a)
    (x,), prepared = a.q, a.prepared
    if a.attributes["backwards"]:
        x = tf.reverse(x, [1])
    rows = prepared.of_input.multiply(a, tf.reshape(x, [-1, x.shape[-1]]))
    shape = tf.concat([tf.shape(x)[:2], rows.shape[1:]], 0)
    products = tf.reshape(saturate(rows, BITS), shape)
    own_bits, held = 15 if a.wide else 7, prepared.of_hidden.kernel.dtype
    sigmoid, tanh, tanh_of_cell = prepared.tables

    def step(states: Any, products: Any) -> Any:
        hidden, cell = states
        fed_back = prepared.of_hidden.multiply(a, hidden)
        if a.family.lstm == "tflite_micro":
            fed_back = saturate(fed_back, BITS)
        gates = tf.split(saturate(products + fed_back, BITS), 4, -1)
        accepts, keeps, outputs = (_look_up(sigmoid, gates[index]) for index in (0, 1, 3))
        remains = _divide(a, product(keeps, cell), BITS)
        added = _divide(a, product(accepts, _look_up(tanh, gates[2])), 2 * BITS - 11)
        cell = saturate(remains + added, BITS)
        hidden = product(outputs, _look_up(tanh_of_cell, cell))
        hidden = _divide_twice(hidden, 2 * BITS - own_bits)
        return tf.cast(saturate(hidden, own_bits), held), cell

    hidden, cells = tf.scan(step, tf.transpose(products, [1, 0, 2]), _find_first_states(a, x))
    if a.attributes["keeps"]:
        last = hidden[-1], cells[-1]
        hidden = store_states(a.call.layer, _get_state_params(a), last, hidden)
    hidden = tf.cast(hidden, a.q[0].dtype)
    return tf.transpose(hidden, [1, 0, 2]) if a.attributes["sequences"] else hidden[-1]


def _find_first_states(a: Arguments, x: Any) -> tuple[Any, Any]:
    kernel = a.prepared.of_hidden.kernel
    if a.attributes["keeps"]:
        hidden, cell = read_states(a.call.layer, _get_state_params(a))
        return tf.cast(hidden, kernel.dtype), tf.cast(cell, tf.float64)
    batch = x.shape[0] if x.shape[0] is not None else tf.shape(x)[0]
    shape = [batch, kernel.shape[0]]
    return tf.zeros(shape, kernel.dtype), tf.zeros(shape, tf.float64)


def _get_state_params(a: Arguments) -> tuple[QuantParams, QuantParams]:
    return HIDDEN.params(a.params[0].bits).as_tensors(), CELL.as_tensors()


def _divide(a: Arguments, x: Any, bits: int) -> Any:
    if a.family.lstm == "tflite_micro":
        return _divide_twice(x, bits)
    return divide_floats(x, bits)


def _divide_twice(x: Any, bits: int) -> Any:
    """Compute x / 2^bits. Like TFLite's 31-bit multipliers, round x / 2, and then the result."""
    return divide_floats(tf.floor(x * 0.5 + 0.5), bits - 1)


def _tabulate(a: Arguments) -> list[Any]:
    if a.family.lstm == "tflite":
        tables: Any = (
            sigmoid_and_tanh.sigmoid_table(3),
            sigmoid_and_tanh.tanh_table(3),
            sigmoid_and_tanh.tanh_table(4),
        )
    else:
        q = tf.range(-(2**15), 2**15, dtype=tf.int64)
        gate, cell = (params.as_tensors().scale for params in (GATE, CELL))
        tables = (
            sigmoid_and_tanh.compute_int16_sigmoid(
                q, sigmoid_and_tanh.prepare_sigmoid(a.family, gate)
            ),
            sigmoid_and_tanh.compute_int16_tanh(q, sigmoid_and_tanh.prepare_tanh(a.family, gate)),
            sigmoid_and_tanh.compute_int16_tanh(q, sigmoid_and_tanh.prepare_tanh(a.family, cell)),
        )
    return [tf.cast(table, tf.float64) for table in tables]


def _look_up(table: Any, q: Any) -> Any:
    return gather(table, tf.cast(q + 2.0**15, tf.int32))


def _emit(e: Emission) -> None:
    (x,), (output,) = e.inputs, e.outputs
    weights = e.weights
    assert weights.recurrent is not None
    assert weights.bias is not None
    batch, steps, _ = e.shape(x)
    units = weights.recurrent.q.shape[0]
    input_scale = np.float32(e.input_params.scale)
    if e.attributes["backwards"]:
        reversed_ = e.temporary("reversed", e.shape(x), x)
        e.add("REVERSE_V2", [x, e.constant("time", [1])], [reversed_])
        x = reversed_
    hidden, cell = (
        e.builder.variable(e.temporary(name, (batch, units), like))
        for name, like in (("hidden", HIDDEN.params(16 if e.wide else 8)), ("cell", CELL))
    )
    kernels, scales = _emit_gates(e, weights, "kernel")
    recurrent, _ = _emit_gates(e, weights.recurrent, "recurrent")
    bias_type = np.int64 if e.wide else np.int32
    biases = [
        e.constant(f"bias_{gate}", part.astype(bias_type), scales=input_scale * scale)
        for gate, (part, scale) in enumerate(
            zip(np.split(np.asarray(weights.bias).reshape(-1), 4), scales, strict=True)
        )
    ]
    sequence = output
    if not e.attributes["sequences"]:
        sequence = e.temporary("sequence", (batch, steps, units), output)
    e.add(
        "UNIDIRECTIONAL_SEQUENCE_LSTM",
        # No peepholes, no projection, no layer normalization.
        [x, *kernels, *recurrent, *[-1] * 3, *biases, *[-1] * 2, hidden, cell, *[-1] * 4],
        [sequence],
        intermediates=[
            *(e.temporary(f"gate_{gate}", (0,), GATE) for gate in range(4)),
            e.temporary("gate_4", (0,), output),
        ],
        fusedActivationFunction=schema.ActivationFunctionType.TANH,
    )
    if not e.attributes["keeps"]:
        times = _count_sequences(e, x)
        e.builder.once_known(lambda: _emit_zeros(e, x, (hidden, cell), times))
    if sequence != output:
        whole_axis = (None, None, 1)
        emit_slice(e, sequence, output, [whole_axis, (-1, None, 1), whole_axis], dropped=[1])


def _emit_gates(e: Emission, weights: Weights, name: str) -> tuple[list[int], list[np.float32]]:
    """Add the weights of each gate, transposed for TFLite. Return the tensors and the scales."""
    parts = np.split(np.asarray(weights.q).astype(np.int8), 4, -1)
    scales = [np.float32(part.flat[0]) for part in np.split(np.asarray(weights.scale), 4, -1)]
    tensors = [
        e.constant(f"{name}_{gate}", part.T, QuantParams(scale, 0))
        for gate, (part, scale) in enumerate(zip(parts, scales, strict=True))
    ]
    return tensors, scales


def _count_sequences(e: Emission, x: int) -> int:
    """Return the number of sequences in one example of the file's input, usually 1.

    A TimeDistributed(LSTM) is lowered to an LSTM with several sequences per example.
    """
    sequences, examples = e.shape(x)[0], e.shape(FIRST)[0]
    if sequences and examples:
        return sequences // examples
    tensors, codes = e.builder.graph.tensors, e.builder.model.operatorCodes
    producers = {int(index): op for op in e.builder.graph.operators for index in op.outputs}
    ways, seen = [(x, Fraction(1))], {x}
    while ways:  # Searches upstream for an input, through tensors that begin with a batch axis.
        after, times = ways.pop()
        if after not in producers:
            return int(times)
        operator = producers[after]
        is_reshape = codes[operator.opcodeIndex].builtinCode == schema.BuiltinOperator.RESHAPE
        for before in reversed([int(index) for index in operator.inputs if index >= 0]):
            sizes = e.builder.sizes(before), e.builder.sizes(after)
            is_constant = tensors[before].buffer or tensors[before].isVariable
            if before in seen or is_constant or sizes[0][:1] != [-1]:
                continue
            seen.add(before)
            folds = is_reshape and all(-1 not in axes[1:] for axes in sizes)
            factor = Fraction(*(int(np.prod(axes[1:])) for axes in sizes)) if folds else 1
            ways.append((before, times * factor))
    return 1


def _emit_zeros(e: Emission, x: int, states: tuple[int, int], times: int) -> None:
    """Add operators that write zeros into the states.

    States have a row for each example, but the number of examples may be unknown. The operators
    therefore multiply one value of each example of `x` by zeros. If the file computes shapes at run
    time, they use its first input, because the states must be allocated before `x` has a shape.
    """
    hidden, cell = states
    batch, units = e.shape(cell)
    fine = QuantParams(np.float32(CELL.scale / 2), 0, 16)
    if e.builder.knows_sizes:
        some = _cast_to_int16(e, _emit_first_values(e, x, batch))
    else:
        of_file = batch if batch is None else batch // times
        some = _emit_first_values(e, _cast_to_int16(e, FIRST), of_file)
        if times > 1:
            folded = e.temporary("folded", (of_file, times), CELL)
            e.add("MUL", [some, e.constant("none", np.zeros((1, times), np.int16), fine)], [folded])
            some = e.make_reshaped(folded, (batch, 1), "some_of_step")
    zeros = e.constant("zeros", np.zeros((1, units or 1), np.int16), fine)
    if units == 1:
        # LiteRT may store a product in the memory of an input of the same size, and allocate no
        # memory for the state. A CAST to a type of another size avoids this.
        product = e.temporary("product", (batch, units), CELL)
        e.add("MUL", [some, zeros], [product])
        is_wide = e.dtype(hidden) == "int16"
        narrow = e.temporary("narrow", (batch, units), HIDDEN.params(8)) if is_wide else hidden
        e.cast(product, narrow)
        for state in (cell, hidden) if is_wide else (cell,):
            e.cast(narrow, state)
        return
    e.add("MUL", [some, zeros], [cell])
    if e.dtype(hidden) == "int16":
        e.add("MUL", [some, zeros], [hidden])
        return
    e.cast(cell, hidden)


FIRST = 0
"""Index of a file's first tensor, which is its first input."""


def _cast_to_int16(e: Emission, source: int) -> int:
    if e.dtype(source) == "int16":
        return source
    target = e.temporary("as_int16", e.shape(source), QuantParams(np.float32(1.0), 0, 16))
    e.cast(source, target)
    return target


def _emit_first_values(e: Emission, source: int, batch: int | None) -> int:
    """Slice the first value of each example. Return a tensor [batch, 1]."""
    rank = len(e.shape(source))
    if rank == 1:
        return e.make_reshaped(source, (batch, 1), "some")
    some = e.temporary("some", (batch, 1), source)
    firsts: list[Part] = [(0, 1, 1)] * (rank - 1)
    emit_slice(e, source, some, [(None, None, 1), *firsts], dropped=range(1, rank - 1))
    return some


LSTM = Op(
    "lstm",
    _compute,
    _emit,
    prepare=_prepare,
    doc="LSTM over a sequence; its output has 256 steps from -1 to 1",
    layers=(keras.layers.LSTM,),
    attributes=read_form,
    accepts=_accepts,
    integers=(),
    families={16: lambda family: family.int16_lstm},
    output=HIDDEN,
    weights={"cell.kernel": (-1,), "cell.recurrent_kernel": (-1,)},
    gates=4,
    products=partial(count_steps, 4),
)
