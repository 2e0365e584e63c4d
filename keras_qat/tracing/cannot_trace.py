"""Exceptions raised while a layer is traced."""

from __future__ import annotations

import tensorflow as tf

from keras_qat.keras2.backend import keras


class CannotTrace(Exception):
    """Explains in a few words why a layer cannot be traced."""


class TooLarge(CannotTrace):
    """Raised for an operation that would be expanded if it were smaller."""


class ReadsWeights(CannotTrace):
    """Raised for a layer that reads weights of other layers in its own code."""

    def __init__(self, variables: list[tf.Variable]) -> None:
        super().__init__(f"it reads {variables[0].name}, a weight of another layer")
        self.variables = variables


class OnlyTrains(Exception):
    """Raised for a layer that returns its input, but applies `model` to it in training."""

    def __init__(self, model: keras.Model) -> None:
        super().__init__()
        self.model = model


class MustTraceInline(BaseException):
    """Raised for an inner layer that must be traced as a part of the layer around it.

    It has weights but reads no tensor, such as an embedding of positions, or it keeps a tensor of
    one call in an attribute and is called again. It is no `Exception`, because the custom code that
    is running may catch those.
    """

    def __init__(self, layer: keras.layers.Layer) -> None:
        super().__init__(f"the layer '{layer.name}' reads tensors that are not its arguments")
        self.layer = layer
