"""Placement: decides from a graph and a recipe which tensor gets which quantizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from keras_qat.arithmetic.kernel_families import XNNPACK, KernelFamily
from keras_qat.config.recipe import Recipe
from keras_qat.graph.calls import Call, Graph, flatten_values, split_loss_only
from keras_qat.graph.precision import use_float32
from keras_qat.lowering import LoweringContext, lower
from keras_qat.placement.contrib_rules import ContribPlacement
from keras_qat.placement.file_outputs import checked_names, ending_at, ending_inside
from keras_qat.placement.int8_rules import Int8Placement
from keras_qat.placement.layer_selection import Scope, check_scope
from keras_qat.placement.layer_settings import Settings, may_open
from keras_qat.placement.lost_features import planned_losses
from keras_qat.placement.plan import Plan

RULES: dict[str, Any] = {"int8": Int8Placement, "contrib": ContribPlacement}
"""Name of a recipe's placement -> the class that carries it out."""


def lower_graph(
    graph: Graph,
    recipe: Recipe,
    stays_closed: Callable[[Call], bool] = lambda call: False,
    has_int16: bool = True,
) -> Graph:
    """Splits and opens the layers of a graph as a recipe asks.

    `stays_closed` names calls that are never opened.

    Raises:
        ValueError: if an override of `open` matches no layer.
    """
    rules = RULES[recipe.placement]
    if not rules.lowers_activations:
        return lower(graph, LoweringContext(activations=False))
    opens = may_open(recipe, graph.calls)
    may = lambda call: False if stays_closed(call) else opens(call)  # noqa: E731
    return lower(graph, LoweringContext(True, may, has_int16, not recipe.without_float))


def place(
    read: Graph,
    recipe: Recipe,
    scope: Scope | None = None,
    family: KernelFamily = XNNPACK,
    file_outputs: Iterable[str] | None = None,
    has_float: bool = True,
    has_int16: bool = True,
) -> Plan:
    """Plans the quantization of every tensor of a graph, as it was read.

    Args:
        read: the graph.
        recipe, scope: what to quantize, and how.
        family: the kernels that compute the file; a few operators exist in one family only.
        file_outputs: names of the tensors at which files end; None for the graph's outputs.
        has_float: False computes all layers in integers that have integer kernels, also those that
            normalize, which otherwise stay in float.
        has_int16: False has parts of 16 bits only where 8 bits keep nothing.

    Raises:
        ValueError: if the scope, an override of the recipe or an output matches no layer.
    """
    names = [] if file_outputs is None else checked_names(file_outputs)
    given = recipe
    if not has_float:
        recipe = dataclasses.replace(recipe, without_float=True)
    with use_float32():
        ending = ending_at(read, names, recipe) if names else read
        graph = lower_graph(ending, recipe, has_int16=has_int16)
        graph = ending_inside(graph, read, names) if names else graph
    inputs = [value.name for value in flatten_values(read.inputs)]
    check_scope(scope, [*read.calls, *read.loss_only, *graph.calls], inputs)
    plan = place_lowered(graph, recipe, scope, family, names)
    return dataclasses.replace(plan, recipe=given)


def place_lowered(
    graph: Graph,
    recipe: Recipe,
    scope: Scope | None = None,
    family: KernelFamily = XNNPACK,
    file_outputs: list[str] | None = None,
) -> Plan:
    """Plans the quantization of every tensor of a lowered graph.

    With `file_outputs` the graph's outputs are those of the model and, as a list, those of files.
    """
    ends = graph.outputs[1] if file_outputs else graph.outputs
    after_outputs = split_loss_only(graph.calls, ends)[1] if file_outputs else []
    not_in_file = [*after_outputs, *graph.loss_only]
    settings = Settings(recipe, scope, graph.calls, family, not_in_file)
    planned: Plan = RULES[recipe.placement](graph, settings).plan()
    planned.file_outputs = tuple(file_outputs or ())
    planned.lost_features = tuple(planned_losses(graph, planned.specs))
    return planned
