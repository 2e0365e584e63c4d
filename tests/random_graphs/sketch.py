"""Random models as data, which hypothesis draws, reduces if they fail, and prints.

A step reads earlier tensors and adds one. Most steps are random calls of operators, from their
examples. The rest are typical structures of networks.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tests.helpers import keras, layers
from tests.networks import every_layer
from tests.ops.examples import EXAMPLES
from tests.random_graphs.fitting import fitted
from tests.random_graphs.recurrent import recurrent

LARGEST = 1e4
"""Maximum of values in the float model, so that no value becomes infinite."""

INTEGERS = 3
"""Upper bound of integer inputs."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of a computation.

    Args:
        what: a name in `STEPS`.
        seed: seed of its random options.
        reads: indices of the tensors to read, counted from the latest.
    """

    what: str
    seed: int = 0
    reads: tuple[int, ...] = (0, 1, 2)


@dataclasses.dataclass(frozen=True)
class Sketch:
    """A random model.

    Args:
        shapes: shapes of its float inputs, None for unknown sizes.
        steps: its steps.
        outputs: how many of the last tensors it returns.
        scale: scale of its inputs' values.
    """

    shapes: tuple[tuple[int | None, ...], ...]
    steps: tuple[Step, ...]
    outputs: int = 1
    scale: float = 1.0


# Functions of tensors and random numbers that return a step's result.
Make = Callable[[list[Any], np.random.Generator], Any]


def _example(name: str) -> Make:
    """Returns a step with a random call of an operator, on tensors of suitable shapes."""

    def make(tensors: list[Any], numbers: np.random.Generator) -> Any:
        example = EXAMPLES[name](numbers)
        dtypes = example.dtypes or ("float32",) * len(example.shapes)
        given = []
        for place, (shape, dtype) in enumerate(zip(example.shapes, dtypes, strict=True)):
            if tf.as_dtype(dtype).is_floating:
                x = fitted(tensors[place % len(tensors)], shape)
                is_positive = name in OF_POSITIVES
                given.append(layers.Activation("sigmoid")(x) + 0.25 if is_positive else x)
            else:
                given.append(keras.Input(shape, dtype=dtype))
        return example.build(*given)

    return make


OF_POSITIVES = ("log", "sqrt", "rsqrt", "reciprocal")


def _image(x: Any, channels: int = 4) -> Any:
    """Returns an image of so many channels: an existing tensor, or a small one."""
    if len(x.shape) == 4:
        return x if x.shape[-1] == channels else layers.Conv2D(channels, 1)(x)
    return fitted(x, (5, 4, channels))


def _block(tensors: list[Any], numbers: np.random.Generator) -> Any:
    """Applies convolution, BatchNormalization, activation."""
    x = layers.Conv2D(4, int(numbers.integers(1, 4)), padding="same", use_bias=False)(
        _image(tensors[0])
    )
    return _activated(layers.BatchNormalization()(x), numbers)


ACTIVATIONS = ("relu", "relu6", "swish", "tanh", "sigmoid", "hard_sigmoid", "elu", "gelu", "linear")


def _activated(x: Any, numbers: np.random.Generator) -> Any:
    name = str(numbers.choice(ACTIVATIONS))
    return layers.ReLU(6.0)(x) if name == "relu6" else layers.Activation(name)(x)


def _residual(tensors: list[Any], numbers: np.random.Generator) -> Any:
    """Adds a block to its input, with an optional ReLU."""
    x = _image(tensors[0])
    y = layers.Add()([x, _block([x], numbers)])
    return layers.ReLU()(y) if numbers.random() < 0.5 else y


def _inverted(tensors: list[Any], numbers: np.random.Generator) -> Any:
    """Applies a wide, a depthwise and a narrow convolution, as in MobileNet."""
    x = _image(tensors[0])
    y = layers.ReLU(6.0)(layers.BatchNormalization()(layers.Conv2D(8, 1, use_bias=False)(x)))
    y = layers.DepthwiseConv2D(3, padding="same", activation="relu")(y)
    return layers.Add()([x, layers.BatchNormalization()(layers.Conv2D(4, 1)(y))])


def _squeezed(tensors: list[Any], numbers: np.random.Generator) -> Any:
    """Applies squeeze and excite."""
    x = _image(tensors[0])
    y = layers.GlobalAveragePooling2D(keepdims=True)(x)
    y = layers.Conv2D(4, 1, activation="sigmoid")(layers.Conv2D(2, 1, activation="relu")(y))
    return layers.Multiply()([x, y])


def _attended(tensors: list[Any], numbers: np.random.Generator) -> Any:
    """Adds self-attention of a sequence, and a position embedding."""
    x = fitted(tensors[0], (4, 6))
    x = layers.Add()([x, layers.MultiHeadAttention(2, 3)(x, x)])
    return layers.LayerNormalization()(x) if numbers.random() < 0.5 else layers.Dense(6)(x)


def _shared(tensors: list[Any], numbers: np.random.Generator) -> Any:
    """Applies one layer to two tensors, and concatenates the results."""
    layer = layers.Dense(4, activation="relu") if numbers.random() < 0.5 else layers.Dense(4)
    first, second = (layer(fitted(x, (6,))) for x in (tensors[0], tensors[-1]))
    return _joined([first, second], numbers)


def _nested(tensors: list[Any], numbers: np.random.Generator) -> Any:
    inner = keras.Input((5, 4, 4))
    y = _residual([inner], numbers) if numbers.random() < 0.5 else _block([inner], numbers)
    model = keras.Model(inner, layers.GlobalAveragePooling2D()(y))
    first, second = (model(fitted(x, (5, 4, 4))) for x in (tensors[0], tensors[-1]))
    return _joined([first, second], numbers)


def _merged(tensors: list[Any], numbers: np.random.Generator) -> Any:
    first = tensors[0]
    if None in first.shape[1:]:
        return _joined([first, first], numbers)
    return _joined([first, *(fitted(x, first.shape[1:]) for x in tensors[1:])], numbers)


def _joined(tensors: list[Any], numbers: np.random.Generator) -> Any:
    kinds = (
        *(layers.Add, layers.Multiply, layers.Average, layers.Concatenate),
        *(layers.Maximum, layers.Minimum),
    )
    return kinds[numbers.integers(len(kinds))]()(tensors)


def _any_layer(tensors: list[Any], numbers: np.random.Generator) -> Any:
    """Applies any Keras layer, in a nested model."""
    model = every_layer.example(str(numbers.choice(LAYERS)))
    given = []
    for place, x in enumerate(model.inputs):
        if x.dtype.is_floating:
            given.append(fitted(tensors[place % len(tensors)], tuple(x.shape[1:])))
        else:
            given.append(keras.Input(x.shape[1:], dtype=x.dtype))
    return model(given if len(given) > 1 else given[0])


LAYERS = sorted(
    name
    for name, value in vars(layers).items()
    if isinstance(value, type) and issubclass(value, layers.Layer) and name != "InputLayer"
)


def _masked(tensors: list[Any], numbers: np.random.Generator) -> Any:
    """Applies layers that skip masked steps."""
    if numbers.random() < 0.5:
        x = layers.Embedding(INTEGERS, 4, mask_zero=True)(keras.Input((5,), dtype="int32"))
    else:
        x = layers.Masking()(layers.ReLU()(fitted(tensors[0], (5, 4))))
    readers = (
        layers.LSTM(3),
        layers.GlobalAveragePooling1D(),
        layers.Dense(3),
        layers.Bidirectional(layers.GRU(2)),
        layers.MultiHeadAttention(1, 2),
    )
    reader = readers[numbers.integers(len(readers))]
    return reader(x, x) if isinstance(reader, layers.MultiHeadAttention) else reader(x)


def _dead(tensors: list[Any], numbers: np.random.Generator) -> Any:
    """Applies a dead ReLU, or a layer with dead channels."""
    if numbers.random() < 0.5:
        off = keras.initializers.Constant(-100.0)
        return layers.Dense(4, activation="relu", bias_initializer=off)(fitted(tensors[0], (6,)))
    x = layers.Conv2D(4, 1, kernel_initializer="zeros")(_image(tensors[0]))
    return layers.BatchNormalization(gamma_initializer="zeros")(x)


STEPS: dict[str, Make] = {
    **{name: _example(name) for name in EXAMPLES},
    "block": _block,
    "residual": _residual,
    "inverted": _inverted,
    "squeezed": _squeezed,
    "attended": _attended,
    "recurrent": recurrent,
    "shared": _shared,
    "nested": _nested,
    "merged": _merged,
    "activated": lambda tensors, numbers: _activated(tensors[0], numbers),
    "any_layer": _any_layer,
    "masked": _masked,
    "dead": _dead,
    "as_it_is": lambda tensors, numbers: tensors[0],  # Outputs may be inputs, or equal.
    "in_float": lambda tensors, numbers: tf.math.sin(tensors[0]),
}


REFUSALS = (ValueError, TypeError, AttributeError, NotImplementedError, tf.errors.OpError)


def built(sketch: Sketch) -> Any:
    """Returns the model. It skips steps that do not fit its tensors."""
    keras.utils.set_random_seed(len(sketch.steps))
    tensors = [keras.Input(shape) for shape in sketch.shapes]
    for step in sketch.steps:
        numbers = np.random.default_rng(step.seed)
        read = [tensors[-1 - place % len(tensors)] for place in step.reads]
        # An example may need more than these tensors have.
        with contextlib.suppress(*REFUSALS):
            made = STEPS[step.what](read, numbers)
            if is_of_a_batch(made):
                tensors.append(made)
    outputs = tensors[-min(sketch.outputs, len(tensors)) :]
    inputs = list(dict.fromkeys(item.ref() for out in outputs for item in _inputs_of(out)))
    model = keras.Model([array.deref() for array in inputs], outputs)
    perturb(model)
    return model


def is_of_a_batch(x: Any) -> bool:
    """Returns whether a tensor has finite, moderate values for each example by itself."""
    if not keras.backend.is_keras_tensor(x) or not x.shape.rank or x.shape[0] is not None:
        return False
    if x.dtype.is_bool or x.dtype.is_complex:
        return False
    model = keras.Model(_inputs_of(x), x)
    given = random_inputs(model, 4)
    all_at_once = model(given, training=False).numpy()
    if len(all_at_once) != 4 or not np.all(np.abs(all_at_once) < LARGEST):
        return False
    first = model([item[:1] for item in given], training=False).numpy()
    return np.allclose(all_at_once[:1], first, atol=1e-4)


def _inputs_of(x: Any) -> list[Any]:
    """Returns the inputs of the model that a tensor depends on."""
    result, wanted, seen = [], [x], set()
    while wanted:
        tensor = wanted.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        layer, node, _ = tensor._keras_history
        if isinstance(layer, layers.InputLayer):
            result.append(tensor)
        else:
            wanted += tf.nest.flatten(layer.inbound_nodes[node].keras_inputs)
    return result


def random_inputs(model: Any, count: int = 24, scale: float = 1.0) -> list[np.ndarray]:
    numbers = np.random.default_rng(count)
    result = []
    for place, tensor in enumerate(model.inputs):
        shape = (count, *(6 if size is None else size for size in tensor.shape[1:]))
        if tensor.dtype.is_floating:
            size = scale * 10.0 ** ((place + 1) % 3 - 1)
            result.append(np.float32(size * numbers.normal(size=shape)))
        else:
            dtype = tensor.dtype.as_numpy_dtype
            result.append(numbers.integers(0, INTEGERS, shape).astype(dtype))
    return result


def perturb(model: Any) -> None:
    """Gives a model weights like after training: none is zero, and no variance is 1."""
    numbers = np.random.default_rng(1)
    for weight in model.weights:
        kind, shape = weight.name.split("/")[-1].split(":")[0], weight.shape
        if not weight.dtype.is_floating:
            continue
        if kind in ("moving_variance", "variance"):
            weight.assign(numbers.uniform(0.3, 3.0, shape))
        elif kind == "gamma" and np.any(weight.numpy()):
            weight.assign(numbers.uniform(0.3, 2.0, shape) * numbers.choice([-1, 1], shape))
        elif kind in ("bias", "beta", "moving_mean"):
            weight.assign_add(0.3 * numbers.normal(size=shape))
