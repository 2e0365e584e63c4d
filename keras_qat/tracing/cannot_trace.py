"""Exceptions raised while a layer is traced."""

from __future__ import annotations

import tensorflow as tf

from keras_qat.keras2.backend import keras


class CannotTrace(Exception):
    """Raised for a layer that cannot be traced. The message explains the reason in a few words."""


class TooLarge(CannotTrace):
    """Raised for an operation that is too large to be expanded."""


class ReadsWeights(CannotTrace):
    """Raised for a layer that reads weights of other layers."""

    def __init__(self, variables: list[tf.Variable]) -> None:
        super().__init__(f"it reads {variables[0].name}, a weight of another layer")
        self.variables = variables


class OnlyTrains(Exception):
    """Raised for a layer that applies `model` to its input, but only in training."""

    def __init__(self, model: keras.Model) -> None:
        super().__init__()
        self.model = model


class MustTraceInline(BaseException):
    """Raised for an inner layer that must be traced as if its code were in the outer layer.

    The layer has weights but reads no tensor, such as an embedding of positions. Or the layer
    stores a tensor of one call in an attribute, and is called again. This class does not derive
    from `Exception`, because custom code may catch exceptions.
    """

    def __init__(self, layer: keras.layers.Layer) -> None:
        super().__init__(f"the layer '{layer.name}' reads tensors that are not its arguments")
        self.layer = layer
