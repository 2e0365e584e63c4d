"""GRU and SimpleRNN: TFLite has no operator for them, so they are unrolled into those that it has.

The inputs of all steps are multiplied at once; then each step multiplies its hidden state and does
the rest value by value. What a step is made of is said once, in `recurrence`, and done three ways:
here in integers and in files, in `layers.unrolled` in training. All steps share one range for each
tensor, and the weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.qparams import QuantParams
from keras_qat.keras2.backend import keras
from keras_qat.keras2.graph import Call, values_in
from keras_qat.ops import elementwise
from keras_qat.ops.activations import ACTIVATIONS
from keras_qat.ops.dense import DENSE
from keras_qat.ops.kept import InFile, keep, kept
from keras_qat.ops.lstm import HIDDEN, TANH, form_of, other_form
from keras_qat.ops.op import Arguments, Attributes, FixedRange, Op, OwnRange
from keras_qat.ops.quantize import REQUANTIZE
from keras_qat.ops.recurrence import columns, inner_ranges, step_of
from keras_qat.tflite.emission import Emission

if TYPE_CHECKING:
    from keras_qat.resolved.graph import Node, Tensor
    from keras_qat.resolved.weights import Weights

__all__ = [
    "FIXED",
    "GRU",
    "MOST_STEPS",
    "SIMPLE_RNN",
    "SIMPLE_RNN_RELU",
    "params_named",
]

_layers = keras.layers

MOST_STEPS = 64
"""How many steps files have at most: each adds 13 operators of a GRU, 3 of a SimpleRNN."""

SIGMOID, TANH_ROW = (
    next(op for op in ACTIVATIONS if op.name == name) for name in ("sigmoid", "tanh")
)
GATE = SIGMOID.output
assert isinstance(GATE, FixedRange)

FIXED: dict[str, FixedRange] = {"hidden": HIDDEN, "sigmoid": GATE}
"""Ranges that kernels fix, unless there is an inner one of that name."""

ONE = QuantParams(np.float32(1 / 128), -128, 8)
"""Of the constant 1: its quantized value is 0."""


# In integers.

Number = tuple[Any, QuantParams]
"""Quantized values less their zero point, and what they stand for."""


class _InIntegers:
    """Steps in the rounding of a family: what the rows compute."""

    def __init__(self, a: Arguments) -> None:
        self.a = a

    def run(self, op: Op, inputs: list[Number], params: QuantParams, **more: Any) -> Number:
        """What a row computes of numbers."""
        params = params.as_tensors()
        a = dataclasses.replace(
            self.a,
            q=[q for q, _ in inputs],
            params=[each.as_tensors() for _, each in inputs],
            output=params,
            **{"attributes": op.defaults, "weights": None, **more},
        )
        q = op.compute(a)
        low, high = (
            tf.cast(end - params.zero_point, q.dtype) for end in (params.lowest, params.highest)
        )
        return tf.minimum(tf.maximum(q, low), high), params

    def named(self, name: str) -> QuantParams:
        return params_named(self.a.weights, name)

    def product(self, x: Number, part: str, weights: Weights, name: str) -> Number:
        held = _part_of(weights, columns(self.a.call.layer)[part])
        return self.run(DENSE, [x], self.named(name), weights=held)

    def dense(self, part: str, hidden: Number) -> Number:
        return self.product(hidden, part, self.a.weights.recurrent, f"state_{part}")

    def add(self, first: Number, second: Number, name: str, relu: bool = False) -> Number:
        return self.run(elementwise.ADD, [first, second], self.named(name), merges_relu=relu)

    def multiply(self, first: Number, second: Number, name: str) -> Number:
        return self.run(elementwise.MULTIPLY, [first, second], self.named(name))

    def sigmoid(self, x: Number) -> Number:
        return self.run(SIGMOID, [x], self.named("sigmoid"))

    def tanh(self, x: Number) -> Number:
        return self.run(TANH_ROW, [x], HIDDEN.params(8))

    def from_one(self, x: Number) -> Number:
        one = tf.constant(float(-ONE.zero_point)), ONE
        return self.run(elementwise.SUBTRACT, [one, x], self.named("sigmoid"))

    def halves(self, x: Number) -> tuple[Number, Number]:
        q, params = x
        first, second = tf.split(q, 2, -1)
        return (first, params), (second, params)


def params_named(weights: Weights, name: str) -> QuantParams:
    """Those of a tensor inside of a step."""
    return weights.inner[name] if name in weights.inner else FIXED[name].params(8)


def _part_of(weights: Weights, where: slice) -> Weights:
    """Some columns of weights, with their scales and biases."""
    bias = None if weights.bias is None else weights.bias[where]
    scale = weights.scale[:, where] if weights.per_channel else weights.scale
    return dataclasses.replace(weights, q=weights.q[:, where], scale=scale, bias=bias, inner={})


def _compute(a: Arguments) -> Any:
    weights: Weights = a.weights
    assert weights.recurrent is not None
    m, x, params = _InIntegers(a), a.q[0], a.params[0]
    if a.attributes["backwards"]:
        x = tf.reverse(x, [1])
    given = {
        part: m.product((x, params), part, weights, f"input_{part}")
        for part in columns(a.call.layer)
    }
    known, step, of_hidden = (
        step_of(a.attributes),
        given,
        params_named(weights, "hidden").as_tensors(),
    )

    def step_once(hidden: Any, values: dict[str, Any]) -> Any:
        found = {part: (values[part], step[part][1]) for part in values}
        return known(m, found, (hidden, of_hidden))[0]

    batch = x.shape[0] if x.shape[0] is not None else tf.shape(x)[0]
    first, layer = tf.zeros([batch, weights.recurrent.q.shape[0]], x.dtype), a.call.layer
    if len(a.q) > 1:
        first = m.run(REQUANTIZE, [(a.q[1], a.params[1])], of_hidden)[0]
    if a.attributes["keeps"]:
        first = tf.cast(kept(layer, [of_hidden])[0], x.dtype)
    in_order = {part: tf.transpose(q, [1, 0, 2]) for part, (q, _) in given.items()}
    found = tf.scan(step_once, in_order, first)
    if a.attributes["keeps"]:
        found = keep(layer, [of_hidden], [found[-1]], found)
    found = tf.transpose(found, [1, 0, 2]) if a.attributes["sequences"] else found[-1]
    if "hidden" not in weights.inner:
        return found
    return m.run(REQUANTIZE, [(found, of_hidden)], a.output)[0]


# In files.

Written = tuple[int, QuantParams]
"""A tensor of a file, and what its values stand for."""


class _InFile:
    """Steps as operators of a file: what the rows write."""

    def __init__(self, e: Emission, batch: int | None, units: int) -> None:
        self.e, self.batch, self.units, self.count = e, batch, units, 0

    def run(
        self,
        op: Op,
        inputs: list[Written],
        params: QuantParams,
        shape: tuple[int | None, ...],
        **more: Any,
    ) -> Written:
        """Writes the operator of a row, with a result of its own."""
        from keras_qat.resolved.graph import Node, Tensor

        self.count += 1
        name = f"{self.e.node.name}/{self.count}"

        def tensor(label: str, index: int, params: QuantParams) -> Tensor:
            return Tensor(f"{name}/{label}", self.e.shape(index), "float32", params)

        target = self.e.temporary(str(self.count), shape, params)
        read = tuple(tensor(str(at), *each) for at, each in enumerate(inputs))
        made = (tensor("output", target, params),)
        how: dict[str, Any] = {"attributes": op.defaults, **more}
        node = Node(name, op, call=self.e.node.call, inputs=read, outputs=made, **how)
        op.emit(Emission(self.e.builder, node, [index for index, _ in inputs], [target]))
        return target, params

    def named(self, name: str) -> QuantParams:
        return params_named(self.e.weights, name)

    def product(self, x: Written, part: str, weights: Weights, name: str) -> Written:
        where = columns(self.e.node.call.layer)[part]
        shape = (*self.e.shape(x[0])[:-1], where.stop - where.start)
        return self.run(DENSE, [x], self.named(name), shape, weights=_part_of(weights, where))

    def each(self, op: Op, inputs: list[Written], params: QuantParams, **more: Any) -> Written:
        """An operator value by value."""
        return self.run(op, inputs, params, self.e.shape(inputs[-1][0]), **more)

    def dense(self, part: str, hidden: Written) -> Written:
        assert self.e.weights.recurrent is not None
        return self.product(hidden, part, self.e.weights.recurrent, f"state_{part}")

    def add(self, first: Written, second: Written, name: str, relu: bool = False) -> Written:
        maximum = np.inf if relu else None
        return self.each(elementwise.ADD, [first, second], self.named(name), maximum=maximum)

    def multiply(self, first: Written, second: Written, name: str) -> Written:
        return self.each(elementwise.MULTIPLY, [first, second], self.named(name))

    def sigmoid(self, x: Written) -> Written:
        return self.each(SIGMOID, [x], self.named("sigmoid"))

    def tanh(self, x: Written) -> Written:
        return self.each(TANH_ROW, [x], HIDDEN.params(8))

    def from_one(self, x: Written) -> Written:
        one = self.e.constant("one", np.array(0, np.int8), ONE)
        return self.each(elementwise.SUBTRACT, [(one, ONE), x], self.named("sigmoid"))

    def halves(self, x: Written) -> tuple[Written, Written]:
        index, params = x
        self.count += 1
        first, second = (
            self.e.temporary(f"{self.count}/{half}", (self.batch, self.units), index)
            for half in range(2)
        )
        self.e.add("SPLIT", [self.e.constant("axis", 1), index], [first, second], numSplits=2)
        return (first, params), (second, params)

    def steps(self, x: Written, steps: int) -> list[Written]:
        """The steps of a sequence."""
        index, params = x
        self.count += 1
        found = [
            self.e.temporary(f"{self.count}/{step}", (self.batch, self.e.shape(index)[-1]), index)
            for step in range(steps)
        ]
        self.e.add("UNPACK", [index], found, axis=1, num=steps)
        return [(each, params) for each in found]

    def given(self, state: Written) -> Written:
        """A hidden state that is an input."""
        hidden = self.named("hidden")
        return state if state[1] == hidden else self.each(REQUANTIZE, [state], hidden)

    def zeros(self, like: Written) -> Written:
        """A hidden state of zeros for each example: a number of it, times zero."""
        hidden = self.named("hidden")
        zero = self.e.constant("zero", np.array(0, np.int8), QuantParams(np.float32(1.0), 0, 8))
        given = [like, (zero, QuantParams(np.float32(1.0), 0, 8))]
        return self.run(elementwise.MULTIPLY, given, hidden, (self.batch, self.units))


def _emit(e: Emission) -> None:
    (x, *_), (output,), weights = e.inputs, e.outputs, e.weights
    assert weights.recurrent is not None
    batch, steps, _ = e.shape(x)
    assert steps is not None
    m = _InFile(e, batch, weights.recurrent.q.shape[0])
    ends: list[Any] = [each.params for each in e.node.inputs]
    source, *first = zip(e.inputs, ends, strict=True)
    given = {
        part: m.steps(m.product(source, part, weights, f"input_{part}"), steps)
        for part in columns(e.node.call.layer)
    }
    step, found = step_of(e.attributes), list[Written]()
    stored = None
    if e.attributes["keeps"]:
        stored = InFile(e, (batch, m.units), m.named("hidden"))
        hidden = stored.read(), stored.params
    else:
        hidden = m.given(*first) if first else m.zeros(list(given.values())[-1][0])
    order = range(steps)[:: -1 if e.attributes["backwards"] else 1]
    for place in order:
        hidden = step(m, {part: each[place] for part, each in given.items()}, hidden)
        found.append(hidden)
    if stored:
        hidden = stored.write(hidden[0]), stored.params
        found[-1] = hidden
    native = output
    if "hidden" in weights.inner:
        native = e.temporary("native", e.shape(output), hidden[1])
    if e.attributes["sequences"]:
        e.add("PACK", [index for index, _ in found], [native], valuesCount=steps, axis=1)
    else:
        e.reshape(hidden[0], native)
    if native != output:
        e.add("QUANTIZE", [native], [output])


def _products(node: Node) -> int:
    """Each step multiplies with all weights."""
    steps = node.inputs[0].shape[1]  # type: ignore[union-attr]
    assert node.weights is not None
    assert steps is not None
    return steps * node.weights.count


# The rows.


def _accepts(activations: str, **allowed: tuple[Any, ...]) -> Callable[..., str | None]:
    """What takes layers with these functions, in their attributes of these names."""

    def accepts(call: Call, attributes: Attributes) -> str | None:
        if (reason := other_form(call)) is not None:
            return reason
        if call.layer.stateful and len(call.inputs) > 1:
            return "its state is kept and given"
        if any(getattr(call.layer, name) not in each for name, each in allowed.items()):
            return f"its activations are others than {activations}"
        steps = call.inputs[0].shape[1]
        if steps is None:
            return "its number of steps is not known, and it would be unrolled"
        if steps > MOST_STEPS:
            return f"more than {MOST_STEPS} steps"
        return "its state is read" if len(values_in(call.outputs)) > 1 else None

    return accepts


def _form(call: Call) -> Attributes:
    """As of `LSTM`; for a GRU whether it resets after products, else whether it has a ReLU."""
    layer, form = call.layer, form_of(call)
    if isinstance(layer, _layers.GRU):
        return {**form, "reset_after": bool(layer.reset_after)}
    return {**form, "relu": layer.activation in RELU}


RELU = (keras.activations.relu, tf.nn.relu)

GRU = Op(
    "gru",
    _compute,
    _emit,
    doc=f"GRU over up to {MOST_STEPS} steps, unrolled; its output has 256 steps from -1 to 1; "
    "its state may be given",
    layers=(_layers.GRU,),
    attributes=_form,
    accepts=_accepts("tanh and sigmoid", activation=TANH, recurrent_activation=SIGMOID.functions),
    integers=(),
    bits=(8,),
    output=HIDDEN,
    inner=inner_ranges,
    weights={"cell.kernel": (-1,), "cell.recurrent_kernel": (-1,)},
    converts={1: HIDDEN},
    products=_products,
)

SIMPLE_RNN = dataclasses.replace(
    GRU,
    name="simple_rnn",
    doc=f"SimpleRNN over up to {MOST_STEPS} steps, unrolled, with tanh; its output as that of GRU",
    layers=(_layers.SimpleRNN,),
    accepts=_accepts("tanh and relu", activation=TANH),
)

SIMPLE_RNN_RELU = dataclasses.replace(
    SIMPLE_RNN,
    name="simple_rnn_relu",
    doc="the same with ReLU",
    accepts=_accepts("tanh and relu", activation=RELU),
    output=OwnRange(non_negative=True),
    converts={},
)
