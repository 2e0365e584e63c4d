"""Placement: which tensors get which quantizer. Graph and recipe in, `Plan` out."""

from __future__ import annotations

from collections.abc import Callable

from keras_qat.graph import Call, Graph
from keras_qat.placement.contrib import ContribPlacement
from keras_qat.placement.int8 import Int8Placement
from keras_qat.plan import Plan
from keras_qat.recipes import Recipe

__all__ = ["RULES", "place"]

RULES = {"int8": Int8Placement, "contrib": ContribPlacement}
"""Name of a placement, as recipes give it -> what carries it out."""


def place(graph: Graph, recipe: Recipe, scope: Callable[[Call], bool] | None = None) -> Plan:
    """Decides for each tensor of a lowered graph how it is quantized.

    Args:
        graph: the graph, lowered.
        recipe: the recipe.
        scope: says whether a call is to be quantized; all are by default.
    """
    return RULES[recipe.placement](graph, recipe, scope).plan()
