"""Placement: which tensors get which quantizer. Graph and recipe in, `Plan` out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_qat.arithmetic.kernel_families import Family
from keras_qat.config.recipes import Recipe
from keras_qat.frontend.graph import Call, Graph, values_in
from keras_qat.frontend.keras2.precision import float32_policy
from keras_qat.lowering import lower
from keras_qat.placement.contrib_rules import ContribPlacement
from keras_qat.placement.int8_rules import Int8Placement
from keras_qat.placement.layer_selection import Scope, check_scope
from keras_qat.placement.layer_settings import Settings, may_open
from keras_qat.placement.plan import Plan

__all__ = ["RULES", "lowered", "place", "placed"]

RULES: dict[str, Any] = {"int8": Int8Placement, "contrib": ContribPlacement}
"""Name of a placement, as recipes give it -> what carries it out."""


def lowered(
    graph: Graph, recipe: Recipe, stays_closed: Callable[[Call], bool] = lambda call: False
) -> Graph:
    """A graph as it was read with its layers split and opened as a recipe has it.

    `stays_closed` says what is not opened whatever the recipe has.

    Raises:
        ValueError: if an override that says what to open matches no layer.
    """
    rules = RULES[recipe.placement]
    if not rules.lowers_activations:
        return lower(graph, False)
    said = may_open(recipe, graph.calls)
    return lower(graph, True, lambda call: False if stays_closed(call) else said(call))


def place(
    read: Graph, recipe: Recipe, scope: Scope | None = None, family: Family = "xnnpack"
) -> Plan:
    """Decides for each tensor of a graph, as it was read, how it is quantized.

    `family` is whose kernels shall compute it: few rows have some in one of them only.

    Raises:
        ValueError: if the scope or an override of the recipe matches no layer.
    """
    with float32_policy():
        graph = lowered(read, recipe)
    inputs = [each.name for each in values_in(read.inputs)]
    check_scope(scope, [*read.calls, *read.loss_only, *graph.calls], inputs)
    return placed(graph, recipe, scope, family)


def placed(
    graph: Graph, recipe: Recipe, scope: Scope | None = None, family: Family = "xnnpack"
) -> Plan:
    """As `place`, of a lowered graph."""
    return RULES[recipe.placement](graph, Settings(recipe, scope, graph.calls, family)).plan()
