"""Recipes: how a model is quantized, as data."""

from keras_qat.config.recipes import (
    Override,
    Recipe,
    contrib,
    get,
    int4_weights,
    int8,
    int16x8,
    low_bits,
)

__all__ = [
    "Override",
    "Recipe",
    "contrib",
    "get",
    "int4_weights",
    "int8",
    "int16x8",
    "low_bits",
]
