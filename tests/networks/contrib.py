"""Small networks for the tests of `recipes.contrib`."""

from collections.abc import Callable
from typing import Any

from tests.helpers import keras, layers

SHAPE = (6, 6, 4)
"""Shape of the images. Dense layers read the last axis."""

ACTIVATIONS = {"relu6": 6.0, "relu": None, "identity": ...}
"""Name -> upper limit of the ReLU, or no ReLU."""

KERNELS: dict[str, Callable[..., Any]] = {
    "conv": lambda **kwargs: layers.Conv2D(4, 3, padding="same", **kwargs),
    "fc": lambda **kwargs: layers.Dense(4, **kwargs),
    "depthwise": lambda **kwargs: layers.DepthwiseConv2D(3, padding="same", **kwargs),
    "atrous": lambda **kwargs: layers.DepthwiseConv2D(3, padding="same", dilation_rate=2, **kwargs),
}
"""The four kinds of layers in the original's tests."""


def image(shape: tuple[int | None, ...] = SHAPE) -> Any:
    """Returns the input of a network."""
    return keras.Input(shape, name="image")


def conv(x: Any, name: str, **kwargs: Any) -> Any:
    """Applies a convolution that keeps the shape of 4-channel images."""
    return layers.Conv2D(4, 3, padding="same", name=name, **kwargs)(x)


def relu(x: Any, name: str = "relu", max_value: float | None = None) -> Any:
    return layers.ReLU(max_value, name=name)(x)


def identity(x: Any, name: str) -> Any:
    """Applies an activation that does nothing, like `tf.identity` in the original's tests."""
    return layers.Activation("linear", name=name)(x)


def single(
    kind: str = "conv",
    activation: str = "relu",
    bypass: bool = False,
    batch_norm: bool = False,
    scope: str | None = None,
    identity_between: bool = False,
    shape: tuple[int | None, ...] | None = None,
    **norm: Any,
) -> Any:
    """Returns a layer with bias or BatchNormalization, an optional Add, and an activation.

    Args:
        kind: a key of `KERNELS`.
        activation: a key of `ACTIVATIONS`.
        bypass: whether the input is added before the activation.
        batch_norm: whether there is a BatchNormalization instead of a bias.
        scope: name of a nested model for the layers.
        identity_between: whether a linear activation precedes the BatchNormalization.
        shape: shape of the input, without the batch.
        norm: arguments of the BatchNormalization.
    """
    keras.utils.set_random_seed(11)
    if shape is None:
        shape = SHAPE[-1:] if kind == "fc" else SHAPE
    inputs = x = image(shape)
    x = KERNELS[kind](use_bias=not batch_norm, name="layer")(x)
    if batch_norm:
        x = identity(x, "between") if identity_between else x
        x = layers.BatchNormalization(name="bn", **norm)(x)
    if bypass:
        x = layers.Add(name="add")([x, inputs])
    limit = ACTIVATIONS[activation]
    x = identity(x, "activation") if limit is ... else relu(x, "activation", limit)
    model = keras.Model(inputs, x, name=scope)
    if scope is not None:
        outer = keras.Input(shape, name="image")
        model = keras.Model(outer, model(outer))
    return model


def two_scopes() -> Any:
    """Returns the same block twice, inside the models `scope1` and `scope2`."""

    def block(name: str) -> Any:
        inputs = image()
        x = relu(conv(inputs, "layer"), "relu")
        return keras.Model(inputs, layers.Multiply(name="multiply")([x, inputs]), name=name)

    inputs = image()
    return keras.Model(inputs, block("scope2")(block("scope1")(inputs)))
