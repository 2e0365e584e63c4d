"""Random recurrent layers of all kinds, alone and nested, with states as inputs and outputs."""

from typing import Any

import numpy as np

from tests.helpers import layers
from tests.ops.examples.example import chosen, sizes
from tests.random_graphs.fitting import fitted

UNITS = 3


def recurrent(tensors: list[Any], numbers: np.random.Generator) -> Any:
    """Applies one layer, or several that share states, or one layer twice."""
    return chosen(numbers, _alone, _alone, _with_states, _translated, _twice)(tensors, numbers)


def _said(numbers: np.random.Generator, *names: str) -> dict[str, bool]:
    """Returns random booleans for options."""
    return {name: bool(numbers.random() < 0.5) for name in names}


def _drawn(kind: Any, numbers: np.random.Generator, **options: Any) -> Any:
    """Returns a random layer for sequences."""
    own = _said(numbers, "use_bias", "go_backwards")
    if kind is layers.GRU:
        own |= _said(numbers, "reset_after")
        own["recurrent_activation"] = chosen(numbers, "sigmoid", "sigmoid", "hard_sigmoid")
    if kind is layers.SimpleRNN:
        own["activation"] = chosen(numbers, "tanh", "tanh", "relu")
    return kind(UNITS, **{**own, **options})


def _of_images(numbers: np.random.Generator, **options: Any) -> Any:
    """Returns a ConvLSTM and the input shape that it needs."""
    axes = int(numbers.integers(1, 3))
    layer = (layers.ConvLSTM1D, layers.ConvLSTM2D)[axes - 1](
        UNITS,
        sizes(numbers, 1, 4, axes),
        padding=chosen(numbers, "same", "valid"),
        strides=int(numbers.integers(1, 3)),
        recurrent_activation=chosen(numbers, "sigmoid", "hard_sigmoid"),
        **_said(numbers, "use_bias", "go_backwards"),
        **options,
    )
    return layer, (int(numbers.integers(1, 4)), *(5, 4)[:axes], 2)


def _alone(tensors: list[Any], numbers: np.random.Generator) -> Any:
    """Applies one layer, in both directions, to each of several sequences, or plainly."""
    options = _said(numbers, "return_sequences")
    if numbers.random() < 0.4:
        layer, shape = _of_images(numbers, **options)
    else:
        kind = chosen(numbers, layers.LSTM, layers.GRU, layers.SimpleRNN)
        layer, shape = _drawn(kind, numbers, **options), (int(numbers.integers(1, 5)), 3)
    within = chosen(numbers, None, "both", "each", "both of each")
    if within in ("both", "both of each"):
        layer = layers.Bidirectional(layer, chosen(numbers, "concat", "sum", "mul", "ave"))
    if within in ("each", "both of each"):
        layer, shape = layers.TimeDistributed(layer), (2, *shape)
    return layer(fitted(tensors[0], shape))


def _with_states(tensors: list[Any], numbers: np.random.Generator) -> Any:
    """Applies a layer with a state as input or output or both. An LSTM then stays in float."""
    kind = chosen(numbers, layers.GRU, layers.GRU, layers.SimpleRNN, layers.SimpleRNN, layers.LSTM)
    options = _said(numbers, "return_sequences", "return_state")
    x, given = fitted(tensors[0], (4, 3)), {}
    if numbers.random() < 0.7:
        states = [fitted(tensor, (UNITS,)) for tensor in tensors[1:]][: 1 + (kind is layers.LSTM)]
        given = {"initial_state": states if len(states) > 1 else states[0]}
    result = _drawn(kind, numbers, **options)(x, **given)
    return _some_of(result, numbers) if options["return_state"] else result


def _translated(tensors: list[Any], numbers: np.random.Generator) -> Any:
    """Applies an encoder and a decoder that begins with its states, in one or both directions."""
    kinds = [chosen(numbers, layers.GRU, layers.SimpleRNN) for _ in range(2)]
    both = numbers.random() < 0.4
    first, second = (
        _drawn(kind, numbers, return_state=True, return_sequences=True, go_backwards=False)
        for kind in kinds
    )
    if both:
        first, second = layers.Bidirectional(first), layers.Bidirectional(second)
    x, *states = first(fitted(tensors[0], (3, 4)))
    y = x if numbers.random() < 0.5 else fitted(tensors[-1], (2, 5))
    return _some_of(second(y, initial_state=states if both else states[0]), numbers)


def _twice(tensors: list[Any], numbers: np.random.Generator) -> Any:
    """Calls one layer on two tensors."""
    if numbers.random() < 0.3:
        layer, shape = _of_images(numbers)
    else:
        kind = chosen(numbers, layers.LSTM, layers.GRU, layers.SimpleRNN)
        layer, shape = _drawn(kind, numbers), (3, 4)
    return layers.Concatenate()([layer(fitted(tensor, shape)) for tensor in tensors[:2]])


def _some_of(found: list[Any], numbers: np.random.Generator) -> Any:
    """Returns one of several outputs, or all of them concatenated."""
    if numbers.random() < 0.5:
        return found[numbers.integers(len(found))]
    return layers.Concatenate()([layers.Flatten()(item) for item in found])
