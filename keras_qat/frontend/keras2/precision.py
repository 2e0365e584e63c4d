"""Models in half precision: what their layers compute in, and where float32 takes its place.

Keras' policies `mixed_float16` and `mixed_bfloat16` make layers compute in half precision, with
weights in float32. Layers keep their policies in quantization-aware models. Training follows them;
inference computes in float32, as files do.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any

from keras_qat.frontend.graph import Graph, clone, layers_in, values_in
from keras_qat.frontend.keras2.backend import keras

__all__ = [
    "ScalesLoss",
    "check_precision",
    "computing_in_float32",
    "float32_policy",
    "in_float32",
    "is_half",
    "policy_of",
]

_POLICIES = {"float16": "mixed_float16", "bfloat16": "mixed_bfloat16"}
"""What layers compute in -> the policy of those that have their weights in float32."""

_POLICY = threading.RLock()
"""Held while the global policy is another one: one thread would restore what another had set."""


@contextlib.contextmanager
def float32_policy() -> Iterator[None]:
    """Runs a block in which new layers compute in float32, whatever the global policy is."""
    with _POLICY:
        before = keras.mixed_precision.global_policy()
        keras.mixed_precision.set_global_policy("float32")
        try:
            yield
        finally:
            keras.mixed_precision.set_global_policy(before)


def is_half(dtype: str) -> bool:
    """Whether it is float16 or bfloat16."""
    return dtype in _POLICIES


def policy_of(dtype: str) -> str:
    """The policy of layers that give such tensors, their weights being in float32."""
    return _POLICIES.get(dtype, "float32")


@contextlib.contextmanager
def computing_in_float32(layer: Any) -> Iterator[None]:
    """Runs a block in which a layer, and all inside it, computes in float32 whatever its policy."""
    half = [each for each in layers_in(layer) if is_half(each.compute_dtype)]
    before = [each.dtype_policy for each in half]
    for each in half:
        each._set_dtype_policy("float32")
    try:
        yield
    finally:
        for each, policy in zip(half, before, strict=True):
            each._set_dtype_policy(policy)


class ScalesLoss:
    """A Keras model that has its loss scaled where a layer computes in float16.

    Its own policy is float32, as its inference reads weights in float32. Keras' `compile` looks at
    the policy of the model alone.
    """

    @property
    def dtype_policy(self) -> Any:
        """The policy that `compile` asks for. Keras' `LossScaleOptimizer` needs variables."""
        scales = bool(self.trainable_weights)  # type: ignore[attr-defined]
        policies = [each.dtype_policy for each in layers_in(self)[1:] if scales]
        scaled = (each for each in policies if each.name == "mixed_float16")
        return next(scaled, super().dtype_policy)  # type: ignore[misc]


def check_precision(graph: Graph) -> None:
    """Raises a `ValueError` if a layer computes in float64, or has its weights not in float32."""
    for call in [*graph.calls, *graph.loss_only]:
        wrong = {value.dtype for value in values_in(call.outputs)} & {"float64"}
        # Normalization has its numbers in what it computes in.
        if not isinstance(call.layer, keras.layers.Normalization):
            weights = [each.dtype for each in call.layer.weights if each.dtype.is_floating]
            wrong |= {each.name for each in weights} - {"float32"}
        if wrong:
            raise ValueError(
                f"'{call.name}' of '{graph.name}' computes, or holds its weights, in "
                f"{min(wrong)}. Models train in float32, or in half precision with weights in "
                f"float32: policies 'mixed_float16' and 'mixed_bfloat16'. Build it anew after "
                f"keras.backend.set_floatx('float32') and "
                f"keras.mixed_precision.set_global_policy('float32'), with no other dtype in its "
                f"layers, and give it the weights: new.set_weights(old.get_weights())."
            )


def in_float32(model: Any) -> Any:
    """The model itself, or a copy of one in half precision that computes in float32.

    Warns that it made a copy, with the layers' names and weights.
    """
    half = [each.name for each in layers_in(model)[1:] if is_half(each.compute_dtype)]
    if not half:
        return model
    warnings.warn(
        f"'{model.name}' computes in half precision ({len(half)} layers, e.g. {half[0]}), which "
        f"cannot hold activations of 16 bits: float16 has 11 bits for a number, bfloat16 8. Its "
        f"copy trains in float32; the model itself is not changed.",
        stacklevel=4,
    )
    with float32_policy():
        in_float = lambda layer: clone(layer, **_with_float32(layer.get_config()))  # noqa: E731
        copy = keras.models.clone_model(model, clone_function=in_float)
    copy.set_weights(model.get_weights())
    return copy


def _with_float32(config: Any) -> Any:
    """A configuration, also of layers inside the layer, with float32 for mixed policies."""
    if isinstance(config, list):
        return [_with_float32(each) for each in config]
    if not isinstance(config, dict):
        return config
    return {
        key: "float32" if key == "dtype" and _is_mixed(each) else _with_float32(each)
        for key, each in config.items()
    }


def _is_mixed(policy: Any) -> bool:
    """Whether a policy, or its configuration, is one of mixed precision."""
    if isinstance(policy, dict):
        policy = policy.get("config", {}).get("name")
    return str(getattr(policy, "name", policy)).startswith("mixed_")
