"""Unrolls GRU, SimpleRNN, ConvLSTM, and LSTM with a mask, because TFLite has no operators for them.

Each step adds operators to the file. First, one operator multiplies the inputs of all steps by the
weights. A step then only multiplies the hidden state and computes elementwise operations. All steps
share weights and ranges. `step_math` defines a step and the sections of the weights. `step_ops`
computes the step in integers, and emits it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Call, flatten_values
from keras_qat.helper_layers import keras_variants
from keras_qat.keras2.backend import keras, layers
from keras_qat.ops.composed import Computing, Preparing, Quantized
from keras_qat.ops.conv import CONV
from keras_qat.ops.emission import Emission
from keras_qat.ops.movement import emit_slice
from keras_qat.ops.op import Arguments, Attributes, Op, OwnRange, get_held_dtype
from keras_qat.ops.recurrent.kept_states import StateVariable, read_states, store_states
from keras_qat.ops.recurrent.lstm import HIDDEN, TANH, explain_form, read_form
from keras_qat.ops.recurrent.step_math import (
    CONV_LSTMS,
    HARD_SIGMOID,
    States,
    convolves,
    count_steps,
    inner_ranges,
    make_step,
    names_of_states,
)
from keras_qat.ops.recurrent.step_ops import SIGMOID, Steps, make_emitting_steps, make_steps
from keras_qat.ops.weights import Weights

MOST_STEPS = 64
"""The maximum number of steps. Each step of a SimpleRNN adds 3 operators to the file. A GRU adds 13
for each step, and a ConvLSTM adds 18."""


def _prepare(a: Arguments) -> dict[str, Any]:
    """Prepare the constants of all operators, for `_compute`.

    "inputs" has the constants for products of the inputs. "first" is for the initial state, "step"
    for one step, and "last" for the output. "weights" keeps only the ranges inside a step.
    """
    weights: Weights = a.weights
    prepared: dict[str, Any] = {name: [] for name in ("inputs", "first", "step", "last")}
    m = {name: make_steps(a, Preparing(a, own), weights) for name, own in prepared.items()}
    x, params = a.q[0], a.params[0]
    source = tf.TensorSpec([None, *x.shape[2:]], x.dtype), params
    inputs = {part: m["inputs"].multiply_input(part, source) for part in m["inputs"].parts}
    of_states = [m["step"].get_params(name) for name in names_of_states(a.attributes)]
    assert weights.recurrent is not None
    units = weights.recurrent.q.shape[-2]
    states = tuple((tf.TensorSpec([None, units], get_held_dtype(own)), own) for own in of_states)
    if has_initial_state(a):
        m["first"].requantize((a.q[1], a.params[1]), of_states[0])
    make_step(a.attributes)(m["step"], inputs, states)
    if "hidden" in weights.inner:
        m["last"].requantize(states[0], a.output)
    cleared: dict[str, Any] = {"q": None, "scale": None, "bias": None, "reach": None}
    recurrent = dataclasses.replace(weights.recurrent, **cleared)
    return prepared | {"weights": dataclasses.replace(weights, **cleared, recurrent=recurrent)}


def _compute(a: Arguments) -> Any:
    prepared, weights = a.prepared, a.prepared["weights"]

    def machine(name: str) -> Steps:
        return make_steps(a, Computing(a, prepared[name]), weights)

    m, x, params = machine("inputs"), a.q[0], a.params[0]
    if a.attributes["backwards"]:
        x = tf.reverse(x, [1])
    inputs = {part: _multiply_inputs(m, part, (x, params)) for part in m.parts}
    step, names = make_step(a.attributes), names_of_states(a.attributes)
    state_params = [m.get_params(name).as_tensors() for name in names]

    def step_once(states: Any, values: dict[str, Any]) -> Any:
        products = {part: (values[part], inputs[part][1]) for part in inputs}
        prepared = tuple(zip(states, state_params, strict=True))
        after = tuple(q for q, _ in step(machine("step"), products, prepared))
        if _MASK not in values:
            return after
        is_there = values[_MASK][:, None]
        return tuple(tf.where(is_there, *pair) for pair in zip(after, states, strict=True))

    in_order = {part: _swap_steps(q) for part, (q, _) in inputs.items()}
    zeros, layer = tf.zeros_like(list(in_order.values())[-1][0]), a.call.layer
    if a.attributes["masked"]:
        mask = tf.cast(a.q[1], tf.bool)
        in_order[_MASK] = _swap_steps(tf.reverse(mask, [1]) if a.attributes["backwards"] else mask)
    initial = [zeros] * len(names)
    if has_initial_state(a):
        initial = [machine("first").requantize((a.q[1], a.params[1]), state_params[0])[0]]
    if a.attributes["keeps"]:
        initial = read_states(layer, state_params)
    initial = [tf.cast(q, get_held_dtype(p)) for q, p in zip(initial, state_params, strict=True)]
    states = tf.scan(step_once, in_order, tuple(initial))
    result = states[0]
    if a.attributes["zeroes"]:
        result = tf.where(in_order[_MASK][..., None], result, tf.zeros_like(result))
    if a.attributes["keeps"]:
        result = store_states(layer, state_params, [state[-1] for state in states], result)
    result = _swap_steps(result) if a.attributes["sequences"] else result[-1]
    if "hidden" not in weights.inner:
        return result
    return machine("last").requantize((result, state_params[0]), a.output)[0]


_MASK = "mask"
"""The key of the mask in a dict of a step's inputs. All other keys name sections of the weights."""


def has_initial_state(a: Arguments | Emission) -> bool:
    """Returns True if the second input is the initial state, and not a mask."""
    count = len(a.inputs) if isinstance(a, Emission) else len(a.q)
    return count > 1 and not a.attributes["masked"]


def _multiply_inputs(m: Steps, part: str, x: Quantized) -> Quantized:
    q, params = x
    if not convolves(m.attributes):
        return m.multiply_input(part, x)
    steps = q.shape[1]
    products, params = m.multiply_input(part, (tf.reshape(q, [-1, *q.shape[2:]]), params))
    return tf.reshape(products, [-1, steps, *products.shape[1:]]), params


def _swap_steps(x: Any) -> Any:
    return tf.transpose(x, [1, 0, *range(2, x.shape.rank)])


def _emit(e: Emission) -> None:
    (output,), m = e.outputs, make_emitting_steps(e)
    products, steps = _emit_products(e, m), e.shape(e.inputs[0])[1]
    assert steps is not None
    step, hidden_states = make_step(e.attributes), list[Quantized]()
    masks = _emit_masks(e, steps) if e.attributes["masked"] else None
    states: States = ()
    stored: StateVariable | None = None
    for index in range(steps)[:: -1 if e.attributes["backwards"] else 1]:
        inputs = products(index)
        if not states:
            first, stored = _emit_first_states(e, m, list(inputs.values())[-1])
            states = first
        after = step(m, inputs, states)
        states = after if masks is None else _emit_selection(e, masks[index], after, states)
        returned = states[:1]
        if masks is not None and e.attributes["zeroes"]:
            returned = _emit_selection(e, masks[index], returned, first[:1])
        hidden_states.append(returned[0])
    if stored:
        hidden_states[-1] = stored.write(states[0][0]), stored.params
    _emit_output(e, hidden_states, output)


def _emit_first_states(
    e: Emission, m: Steps, like: Quantized
) -> tuple[States, StateVariable | None]:
    """Add the first states: zeros, an input, or the last states of the file's previous run."""
    hidden = m.get_params("hidden")
    if e.attributes["keeps"]:
        stored = StateVariable(e, e.shape(like[0]), hidden)
        return ((stored.read(), hidden),), stored
    if has_initial_state(e):
        initial: Any = e.inputs[1], e.node.inputs[1].params
        return (initial if initial[1] == hidden else m.requantize(initial, hidden),), None
    return tuple(m.zeros(like, name) for name in names_of_states(e.attributes)), None


def _emit_masks(e: Emission, steps: int) -> list[int]:
    """Split the mask into a mask [batch, 1] for each step."""
    mask, (batch, _) = e.inputs[1], e.shape(e.inputs[1])
    masks = [e.temporary(f"mask/{step}", (batch, 1), "bool") for step in range(steps)]
    for step, target in enumerate(masks):
        emit_slice(e, mask, target, [(None, None, 1), (step, step + 1, 1)])
    return masks


def _emit_selection(e: Emission, mask: int, after: States, before: States) -> States:
    """Select the states `after` a step if the mask is True, otherwise those `before` it."""
    states = list[Quantized]()
    for (new, params), (old, _) in zip(after, before, strict=True):
        chosen = e.temporary("state", e.shape(new), new)
        e.add("SELECT_V2", [mask, new, old], [chosen])
        states.append((chosen, params))
    return tuple(states)


def _emit_products(e: Emission, m: Steps) -> Callable[[int], dict[str, Quantized]]:
    """Return a function that returns the products of the input and the weights at a step.

    One operator computes the products of all steps. A ConvLSTM would need too much memory for this,
    so each step of a ConvLSTM has its own operator.
    """
    source: Any = e.inputs[0], e.node.inputs[0].params
    if not convolves(e.attributes):
        of_steps = {part: _emit_steps(e, m.multiply_input(part, source), part) for part in m.parts}
        return lambda index: {part: products[index] for part, products in of_steps.items()}
    (x, params), (batch, steps, *sizes) = source, e.shape(e.inputs[0])
    if len(sizes) == 2:
        x = e.make_reshaped(x, (batch, steps, 1, *sizes), "images")
    images = _emit_steps(e, (x, params), "image")
    return lambda index: {part: m.multiply_input(part, images[index]) for part in m.parts}


def _emit_output(e: Emission, hidden_states: list[Quantized], output: int) -> None:
    hidden, params = hidden_states[-1]
    native = output
    if "hidden" in e.weights.inner:
        native = e.temporary("native", e.shape(output), params)
    written = hidden
    if e.attributes["sequences"]:
        batch, *sizes = e.shape(hidden)
        shape = batch, len(hidden_states), *sizes
        written = native if shape == e.shape(native) else e.temporary("packed", shape, hidden)
        e.add(
            "PACK",
            [index for index, _ in hidden_states],
            [written],
            valuesCount=len(hidden_states),
            axis=1,
        )
    if written != native:
        e.reshape(written, native)
    if native != output:
        e.builder.quantize(native, output)


def _emit_steps(e: Emission, x: Quantized, name: str) -> list[Quantized]:
    index, params = x
    batch, steps, *sizes = e.shape(index)
    assert steps is not None
    targets = [e.temporary(f"{name}/{step}", (batch, *sizes), index) for step in range(steps)]
    e.add("UNPACK", [index], targets, axis=1, num=steps)
    return [(target, params) for target in targets]


# The operators.


def _accepts(
    activations: str, allowed: Mapping[str, tuple[Any, ...]], call: Call, attributes: Attributes
) -> str | None:
    is_image = convolves(attributes)
    axes = 3 + len(attributes["strides"]) if is_image else 3
    if (reason := explain_form(call, axes)) is not None:
        return reason
    keeps = call.layer.stateful
    is_given = len(call.inputs) > 1 and not attributes["masked"]
    if attributes["masked"] and (keeps or len(call.inputs) > 2 or call.layer.return_state):
        return "it has a mask, and is stateful or reads or returns states"
    if is_image and (keeps or is_given or call.layer.return_state):
        return "it is stateful or reads or returns states"
    if keeps and is_given:
        return "it is stateful and has an initial state"
    if any(getattr(call.layer, name) not in values for name, values in allowed.items()):
        return f"its activations are not {activations}"
    if is_image and attributes["data_format"] == "channels_first":
        return "its channels come first"
    steps, *sizes = call.inputs[0].shape[1:]
    if is_image and None in sizes:
        return "its image size is unknown"
    if steps is None:
        return "it would be unrolled, but the number of steps is unknown"
    if steps > MOST_STEPS:
        return f"more than {MOST_STEPS} steps"
    return "it returns its state" if len(flatten_values(call.outputs)) > 1 else None


def _read_attributes(call: Call) -> Attributes:
    """Return the options of a recurrent layer.

    If `masked` is True, the second input is a mask. A masked step repeats the previous output. If
    `zeroes` is True, it returns zeros instead. Keras sets this option inside Bidirectional. `hard`
    is True if the gates are hard sigmoids.
    """
    layer, masked = call.layer, keras_variants.has_mask_input(call.layer)
    form = {
        **read_form(call),
        "masked": masked,
        "zeroes": masked and bool(getattr(layer, "zero_output_for_mask", False)),
    }
    if isinstance(layer, layers.SimpleRNN):
        return {**form, "relu": layer.activation in RELU}
    form = {**form, "hard": layer.recurrent_activation is HARD_SIGMOID}
    if isinstance(layer, layers.GRU):
        return {**form, "reset_after": bool(layer.reset_after)}
    if isinstance(layer, layers.LSTM):
        return form
    return {**form, **CONV.attributes(call)}


RELU = (keras.activations.relu, tf.nn.relu)
GATES = {"activation": TANH, "recurrent_activation": (*SIGMOID.functions, HARD_SIGMOID)}

GRU = Op(
    "gru",
    _compute,
    _emit,
    prepare=_prepare,
    doc=f"GRU over up to {MOST_STEPS} steps, unrolled; its output has 256 steps from -1 to 1; "
    "its initial state may be an input",
    layers=(layers.GRU, keras_variants.WITH_MASK_INPUT[layers.GRU]),
    attributes=_read_attributes,
    accepts=partial(_accepts, "tanh and sigmoid or hard_sigmoid", GATES),
    integers=(),
    bits=(8,),
    output=HIDDEN,
    inner=inner_ranges,
    weights={"cell.kernel": (-1,), "cell.recurrent_kernel": (-1,)},
    converts={1: HIDDEN},
    products=partial(count_steps, 3),
)

CONV_LSTM = dataclasses.replace(
    GRU,
    name="conv_lstm",
    doc=f"ConvLSTM over up to {MOST_STEPS} steps, unrolled; same output range as GRU",
    layers=CONV_LSTMS,
    converts={},
    products=partial(count_steps, 4),
)

MASKED_LSTM = dataclasses.replace(
    GRU,
    name="masked_lstm",
    doc=f"LSTM with a mask over up to {MOST_STEPS} steps, unrolled; same output range as GRU",
    layers=(keras_variants.WITH_MASK_INPUT[layers.LSTM],),
    converts={},
    products=partial(count_steps, 4),
)

SIMPLE_RNN = dataclasses.replace(
    GRU,
    name="simple_rnn",
    doc=f"SimpleRNN over up to {MOST_STEPS} steps, unrolled, with tanh; same output range as GRU",
    layers=(layers.SimpleRNN, keras_variants.WITH_MASK_INPUT[layers.SimpleRNN]),
    products=partial(count_steps, 1),
    accepts=partial(_accepts, "tanh and relu", {"activation": TANH}),
)

SIMPLE_RNN_RELU = dataclasses.replace(
    SIMPLE_RNN,
    name="simple_rnn_relu",
    doc=f"SimpleRNN over up to {MOST_STEPS} steps, unrolled, with ReLU",
    accepts=partial(_accepts, "tanh and relu", {"activation": RELU}),
    output=OwnRange(non_negative=True),
    converts={},
)
