"""Recipes: how a model is quantized, as data.

A recipe names its placement (which tensors get a quantizer) and the specifications for weights
and activations. `int8` is what TFLite's int8 kernels compute.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from keras_qat import specs
from keras_qat.specs import QuantSpec

__all__ = ["Recipe", "get", "int8"]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a model is quantized.

    Args:
        name: what reports call it.
        placement: name of the rules that say which tensors are quantized, in `placement.RULES`.
        weights: specification of kernels.
        activations: specification of activations.
        fold: how BatchNormalization and weight quantization go together, in `folding.FOLDS`.
    """

    name: str
    placement: str
    weights: QuantSpec
    activations: QuantSpec
    fold: str

    def to_config(self) -> dict[str, Any]:
        """The recipe as JSON data."""
        return {
            "name": self.name,
            "placement": self.placement,
            "weights": specs.to_config(self.weights),
            "activations": specs.to_config(self.activations),
            "fold": self.fold,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Recipe:
        """The inverse of `to_config`."""
        weights, activations = (
            specs.from_config(config[part]) for part in ("weights", "activations")
        )
        return cls(**{**config, "weights": weights, "activations": activations})


def int8(weight_bits: int = 8, activation_bits: int = 8, ema_decay: float = 0.999) -> Recipe:
    """What TFLite's int8 kernels compute: the default.

    Weights are symmetric with one range per output channel and a narrow range, taken from the
    current values. Activations, the model's inputs and its outputs are asymmetric per tensor,
    with a moving average of the batches' extremes.

    Args:
        weight_bits: 2 to 8.
        activation_bits: 2 to 8.
        ema_decay: decay per step of the moving averages, corrected for their start at zero:
            with 0.999 a range is the plain average of its first few hundred batches.

    Raises:
        ValueError: on bits outside 2 to 8.

    Source: Krishnamoorthi 2018 (arXiv:1806.08342) and the TFLite 8-bit specification.
    """
    return Recipe(
        name="int8",
        placement="int8",
        weights=QuantSpec(
            weight_bits,
            symmetric=True,
            narrow_range=True,
            per_channel=True,
            observer="current_value",
        ),
        activations=QuantSpec(activation_bits, ema_decay=ema_decay),
        fold="per_channel",
    )


NAMED = {"int8": int8}


def get(recipe: str | Recipe) -> Recipe:
    """A recipe by name, or the recipe itself.

    Raises:
        ValueError: on an unknown name.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if recipe in NAMED:
        return NAMED[recipe]()
    raise ValueError(
        f"There is no recipe {recipe!r}. Use one of {sorted(NAMED)}, or a Recipe made by a "
        f"function in keras_qat.recipes."
    )
