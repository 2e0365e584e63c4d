"""Placement: decides from a graph and a recipe which tensor gets which quantizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_qat.arithmetic.kernel_families import XNNPACK, KernelFamily
from keras_qat.config.recipes import Recipe
from keras_qat.frontend.graph import Call, Graph, values_in
from keras_qat.frontend.keras2.precision import float32_policy
from keras_qat.lowering import lower
from keras_qat.placement.contrib_rules import ContribPlacement
from keras_qat.placement.int8_rules import Int8Placement
from keras_qat.placement.layer_selection import Scope, check_scope
from keras_qat.placement.layer_settings import Settings, may_open
from keras_qat.placement.plan import Plan

RULES: dict[str, Any] = {"int8": Int8Placement, "contrib": ContribPlacement}
"""Name of a recipe's placement -> the class that carries it out."""


def lowered(
    graph: Graph, recipe: Recipe, stays_closed: Callable[[Call], bool] = lambda call: False
) -> Graph:
    """Splits and opens the layers of a graph as a recipe asks.

    `stays_closed` names calls that are never opened.

    Raises:
        ValueError: if an override of `open` matches no layer.
    """
    rules = RULES[recipe.placement]
    if not rules.lowers_activations:
        return lower(graph, False)
    opens = may_open(recipe, graph.calls)
    return lower(graph, True, lambda call: False if stays_closed(call) else opens(call))


def place(
    read: Graph, recipe: Recipe, scope: Scope | None = None, family: KernelFamily = XNNPACK
) -> Plan:
    """Plans the quantization of every tensor of a graph, as it was read.

    `family` are the kernels that compute the file; a few operators exist in one family only.

    Raises:
        ValueError: if the scope or an override of the recipe matches no layer.
    """
    with float32_policy():
        graph = lowered(read, recipe)
    inputs = [value.name for value in values_in(read.inputs)]
    check_scope(scope, [*read.calls, *read.loss_only, *graph.calls], inputs)
    return placed(graph, recipe, scope, family)


def placed(
    graph: Graph, recipe: Recipe, scope: Scope | None = None, family: KernelFamily = XNNPACK
) -> Plan:
    """Plans the quantization of every tensor of a lowered graph."""
    return RULES[recipe.placement](graph, Settings(recipe, scope, graph.calls, family)).plan()
