"""Exceptions raised while a layer is traced."""

from __future__ import annotations

import tensorflow as tf

from keras_qat.keras2.backend import keras


class CannotTrace(Exception):
    """Raised for a layer that cannot be traced. The message is the reason in a few words."""


class TooLarge(CannotTrace):
    """Raised for a Fourier transform that would become a product with a very large matrix."""


class ReadsWeights(CannotTrace):
    """Raised for a layer that reads weights of other layers, such as an Embedding's matrix."""

    def __init__(self, variables: list[tf.Variable]) -> None:
        super().__init__(f"it reads {variables[0].name}, a weight of another layer")
        self.variables = variables


class OnlyTrains(Exception):
    """Raised for a layer that returns its input at inference, and `model(input)` in training."""

    def __init__(self, model: keras.Model) -> None:
        super().__init__()
        self.model = model


class MustTraceInline(BaseException):
    """Raised for an inner layer that must be traced as if its code were in the outer layer.

    One example is a layer with weights but without inputs, such as a position embedding. Another
    example is a layer that stores a tensor in an attribute, for its next call. The base class is
    not `Exception`, because custom code may catch every `Exception`.
    """

    def __init__(self, layer: keras.layers.Layer) -> None:
        super().__init__(f"the layer '{layer.name}' reads tensors that are not its arguments")
        self.layer = layer
