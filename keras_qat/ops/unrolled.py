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

import tensorflow as tf

from keras_qat.keras2.backend import keras
from keras_qat.keras2.graph import Call
from keras_qat.ops.lstm import HIDDEN, TANH, other_form
from keras_qat.ops.op import Arguments, Attributes, Op, OwnRange
from keras_qat.ops.quantize import REQUANTIZE
from keras_qat.ops.recurrence import inner_ranges, names_of_states, step_of
from keras_qat.ops.steps import SIGMOID, Number, computing, writing
from keras_qat.tflite.emission import Emission

if TYPE_CHECKING:
    from keras_qat.resolved.graph import Node
    from keras_qat.resolved.weights import Weights

__all__ = ["GRU", "MOST_STEPS", "SIMPLE_RNN", "SIMPLE_RNN_RELU"]

_layers = keras.layers

MOST_STEPS = 64
"""How many steps files have at most: each adds 13 operators of a GRU, 3 of a SimpleRNN."""


def _compute(a: Arguments) -> Any:
    weights: Weights = a.weights
    m, x, params = computing(a), a.q[0], a.params[0]
    if a.attributes["backwards"]:
        x = tf.reverse(x, [1])
    given = {part: m.given(part, (x, params)) for part in m.parts}
    step, names = step_of(a.attributes), names_of_states(a.attributes)
    of_states = [m.named(name).as_tensors() for name in names]

    def step_once(states: Any, values: dict[str, Any]) -> Any:
        found = {part: (values[part], given[part][1]) for part in values}
        known = tuple(zip(states, of_states, strict=True))
        return tuple(q for q, _ in step(m, found, known))

    in_order = {part: _steps_first(q) for part, (q, _) in given.items()}
    zeros = tf.zeros_like(list(in_order.values())[-1][0])
    found, *_ = tf.scan(step_once, in_order, (zeros,) * len(names))
    found = _steps_first(found) if a.attributes["sequences"] else found[-1]
    if "hidden" not in weights.inner:
        return found
    return m.run(REQUANTIZE, [(found, of_states[0])], a.output)[0]


def _steps_first(x: Any) -> Any:
    """Examples and steps in the place of each other."""
    return tf.transpose(x, [1, 0, *range(2, x.shape.rank)])


def _emit(e: Emission) -> None:
    (x,), (output,), m = e.inputs, e.outputs, writing(e)
    source: Any = x, e.node.inputs[0].params
    given = {part: _steps(e, m.given(part, source), part) for part in m.parts}
    last = list(given.values())[-1]
    step, found = step_of(e.attributes), list[Number]()
    states = tuple(m.zeros(last[0], name) for name in names_of_states(e.attributes))
    for place in range(len(last))[:: -1 if e.attributes["backwards"] else 1]:
        states = step(m, {part: each[place] for part, each in given.items()}, states)
        found.append(states[0])
    hidden, params = states[0]
    native = output
    if "hidden" in e.weights.inner:
        native = e.temporary("native", e.shape(output), params)
    if e.attributes["sequences"]:
        e.add("PACK", [index for index, _ in found], [native], valuesCount=len(found), axis=1)
    else:
        e.reshape(hidden, native)
    if native != output:
        e.add("QUANTIZE", [native], [output])


def _steps(e: Emission, x: Number, name: str) -> list[Number]:
    """The steps of a sequence."""
    index, params = x
    batch, steps, *sizes = e.shape(index)
    assert steps is not None
    found = [e.temporary(f"{name}/{step}", (batch, *sizes), index) for step in range(steps)]
    e.add("UNPACK", [index], found, axis=1, num=steps)
    return [(each, params) for each in found]


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
        if call.layer.stateful:
            return "its states are kept, and it would be unrolled"
        if any(getattr(call.layer, name) not in each for name, each in allowed.items()):
            return f"its activations are others than {activations}"
        steps = call.inputs[0].shape[1]
        if steps is None:
            return "its number of steps is not known, and it would be unrolled"
        return f"more than {MOST_STEPS} steps" if steps > MOST_STEPS else None

    return accepts


def _form(call: Call) -> Attributes:
    """As of `LSTM`; for a GRU whether it resets after products, else whether it has a ReLU."""
    layer = call.layer
    form = {"backwards": bool(layer.go_backwards), "sequences": bool(layer.return_sequences)}
    if isinstance(layer, _layers.GRU):
        return {**form, "reset_after": bool(layer.reset_after)}
    return {**form, "relu": layer.activation in RELU}


RELU = (keras.activations.relu, tf.nn.relu)

GRU = Op(
    "gru",
    _compute,
    _emit,
    doc=f"GRU over up to {MOST_STEPS} steps, unrolled; its output has 256 steps from -1 to 1",
    layers=(_layers.GRU,),
    attributes=_form,
    accepts=_accepts("tanh and sigmoid", activation=TANH, recurrent_activation=SIGMOID.functions),
    integers=(),
    bits=(8,),
    output=HIDDEN,
    inner=inner_ranges,
    weights={"cell.kernel": (-1,), "cell.recurrent_kernel": (-1,)},
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
)
