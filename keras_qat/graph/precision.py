"""Supports models that train in half precision. All models infer in float32.

With Keras' policies `mixed_float16` and `mixed_bfloat16`, layers compute in half precision and
store weights in float32. Layers keep these policies in quantization-aware models.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Graph, flatten_values
from keras_qat.graph.operations import is_operation
from keras_qat.keras2.backend import keras
from keras_qat.keras2.layers_and_models import list_layers
from keras_qat.messages import pluralize

_POLICIES = {"float16": "mixed_float16", "bfloat16": "mixed_bfloat16"}
"""Maps the type in which layers compute to the Keras policy that keeps weights in float32."""

_POLICY = threading.RLock()
"""Lock for Keras' global policy. Without it, threads would restore each other's policy."""


@contextlib.contextmanager
def use_policy(name: str) -> Iterator[None]:
    with _POLICY:
        before = keras.mixed_precision.global_policy()
        keras.mixed_precision.set_global_policy(name)
        try:
            yield
        finally:
            keras.mixed_precision.set_global_policy(before)


def use_float32() -> contextlib.AbstractContextManager[None]:
    return use_policy("float32")


def is_half(dtype: str) -> bool:
    return dtype in _POLICIES


def get_policy(dtype: str) -> str:
    """Returns the Keras policy of layers that compute in `dtype` and have float32 weights."""
    return _POLICIES.get(dtype, "float32")


@contextlib.contextmanager
def compute_in_float32(layer: keras.layers.Layer) -> Iterator[None]:
    """Makes a layer and its inner layers compute in float32 inside a `with` block."""
    half = [inner for inner in list_layers(layer) if is_half(inner.compute_dtype)]
    before = [inner.dtype_policy for inner in half]
    for inner in half:
        inner._set_dtype_policy("float32")
    try:
        yield
    finally:
        for inner, policy in zip(half, before, strict=True):
            inner._set_dtype_policy(policy)


def cast_constants(arguments: object) -> Any:
    """Converts half-precision constants and dtypes among a layer's arguments to float32.

    A layer in float32 needs float32 arguments, but Keras only casts the first argument.
    """

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, (str, tf.DType)):
            return tf.float32 if is_half(getattr(leaf, "name", leaf)) else leaf
        is_constant = isinstance(leaf, tf.__internal__.EagerTensor)
        return tf.cast(leaf, tf.float32) if is_constant and is_half(leaf.dtype.name) else leaf

    return tf.nest.map_structure(cast, arguments)


class ScalesLoss:
    """Mixin for a Keras model that scales the loss if a layer computes in float16.

    Keras' `compile` scales the loss only if the model's own policy is `mixed_float16`. The policy
    of quantization-aware models is float32, because they infer in float32.
    """

    @property
    def dtype_policy(self) -> Any:
        """The policy that `compile` reads: `mixed_float16` if any layer has this policy."""
        # Keras' `LossScaleOptimizer` fails without variables.
        has_variables = bool(self.trainable_weights)  # type: ignore[attr-defined]
        policies = [layer.dtype_policy for layer in list_layers(self)[1:] if has_variables]
        scaled = (policy for policy in policies if policy.name == "mixed_float16")
        return next(scaled, super().dtype_policy)  # type: ignore[misc]


def check_precision(graph: Graph) -> None:
    """Raises a `ValueError` if a layer computes in float64, or if float weights are not float32.

    Non-trainable float64 variables are accepted, because tables and masks from NumPy are float64.
    """
    for call in [*graph.calls, *graph.loss_only]:
        wrong = {value.dtype for value in flatten_values(call.outputs)} & {"float64"}
        # Normalization stores its statistics in the type of its outputs.
        if not isinstance(call.layer, keras.layers.Normalization):
            weights = [weight for weight in call.layer.weights if weight.dtype.is_floating]
            types = {(weight.dtype.name, weight.trainable) for weight in weights}
            wrong |= {name for name, _ in types - {("float64", False)}} - {"float32"}
        reads_integers = call.inputs and not any(value.is_float for value in call.inputs)
        if wrong == {"float64"} and is_operation(call.layer) and reads_integers:
            raise ValueError(
                f"'{call.name}' of '{graph.name}' divides integers, such as a size, and TensorFlow "
                f"computes the quotient in float64. Use //, or inputs of known sizes, such as "
                f"keras.Input((28, 28, 1))."
            )
        if wrong:
            raise ValueError(
                f"'{call.name}' of '{graph.name}' computes or stores weights in "
                f"{min(wrong)}. Models train in float32, or in half precision with weights in "
                f"float32: policies 'mixed_float16' and 'mixed_bfloat16'. Call "
                f"keras.backend.set_floatx('float32') and "
                f"keras.mixed_precision.set_global_policy('float32'), and build the model again "
                f"without dtype arguments. Copy the weights: new.set_weights(old.get_weights())."
            )


def check_holds_16_bits(model: keras.Model) -> None:
    """Raises a `ValueError` if a layer has half precision, which cannot hold 16-bit activations."""
    half = [layer.name for layer in list_layers(model)[1:] if is_half(layer.compute_dtype)]
    if half:
        raise ValueError(
            f"'{model.name}' computes in half precision ({pluralize(len(half), 'layer')}, e.g. "
            f"{half[0]}), which has too few digits for int16 activations. Build the model again "
            f"after keras.mixed_precision.set_global_policy('float32'), and copy the weights: "
            f"new.set_weights(old.get_weights())."
        )
