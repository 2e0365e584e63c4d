"""Models trained in mixed precision: quantization-aware training computes in float32.

float16 has 11 bits for a number, so sums of products of 8-bit codes would not come out as the int8
kernels compute them, and neither would ranges.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any

from keras_qat.keras2.backend import keras
from keras_qat.keras2.graph import check_readable, clone

__all__ = ["float32_policy", "in_float32"]


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


def in_float32(model: Any) -> Any:
    """The model itself, or a copy of one in mixed precision that computes in float32.

    Warns that it made a copy, with the layers' names and weights.

    Raises:
        ValueError: if it is no model that can be read.
    """
    check_readable(model)
    layers = list(model._flatten_layers(include_self=False))
    mixed = [each.name for each in layers if _is_mixed(each.dtype_policy)]
    if not mixed:
        return model
    warnings.warn(
        f"'{model.name}' computes in mixed precision ({len(mixed)} layers, e.g. {mixed[0]}). "
        f"Quantization-aware training computes in float32: float16 cannot hold sums of 8-bit "
        f"products. So does the copy; the model itself is not changed.",
        stacklevel=3,
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
