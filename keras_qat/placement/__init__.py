"""Placement: decides how each tensor of a graph is quantized, according to a recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from keras_qat.arithmetic.kernel_families import XNNPACK, KernelFamily
from keras_qat.config.recipe import Recipe
from keras_qat.config.targets import Target
from keras_qat.graph.calls import Call, Graph, flatten_values, split_loss_only
from keras_qat.graph.precision import use_float32
from keras_qat.lowering import LoweringContext, lower
from keras_qat.placement.contrib_rules import ContribPlacement
from keras_qat.placement.file_outputs import add_outputs, check_names, replace_outputs
from keras_qat.placement.int8_rules import Int8Placement
from keras_qat.placement.lost_features import predict_losses
from keras_qat.placement.plan import Plan
from keras_qat.placement.settings import Scope, Settings, check_scope, make_trace_filter

RULES: dict[str, type[Int8Placement | ContribPlacement]] = {
    "int8": Int8Placement,
    "contrib": ContribPlacement,
}
"""Maps `Recipe.placement` to the class that decides how tensors are quantized."""


def lower_graph(
    graph: Graph,
    recipe: Recipe,
    is_opaque: Callable[[Call], bool] = lambda call: False,
    target: Target | None = None,
) -> Graph:
    """Lowers a graph: splits layers until each call is a single operator.

    Args:
        recipe: the recipe. Its overrides decide which custom layers are traced.
        is_opaque: function that returns True for a call that must not be split.
        target: the target, as in `place`.
    """
    rules = RULES[recipe.placement]
    if not rules.lowers_activations:
        return lower(graph, LoweringContext(activations=False))
    filtered = make_trace_filter(recipe, graph.calls)

    def may_trace(call: Call) -> bool | None:
        return False if is_opaque(call) else filtered(call)

    has_int16, has_spectra = (target.has_int16, target.has_spectra) if target else (True, True)
    context = LoweringContext(True, may_trace, has_int16, not recipe.without_float, has_spectra)
    return lower(graph, context)


def place(
    read: Graph,
    recipe: Recipe,
    scope: Scope | None = None,
    family: KernelFamily = XNNPACK,
    file_outputs: Iterable[str] | None = None,
    target: Target | None = None,
    strict: bool = False,
) -> Plan:
    """Lowers a graph, and plans the quantization of every tensor.

    Args:
        read: the graph of the model, before lowering.
        recipe, scope: which layers to quantize, and how.
        family: the kernel family of the file. Some families lack operators.
        file_outputs: names of the tensors that files return. None means the graph's outputs.
        target: the target, or None. Without float, normalization layers compute in integers, too.
            Without int16, intermediate results inside layers have 8 bits. A softmax then has 16
            bits only if 8 bits would round most values to 0.
        strict: whether normalization layers compute in integers for all targets.

    Raises:
        ValueError: if the scope, an override of the recipe or an output matches no layer.
    """
    names = [] if file_outputs is None else check_names(file_outputs)
    given = recipe
    if strict or not (target is None or target.has_float):
        recipe = dataclasses.replace(recipe, without_float=True)
    with use_float32():
        extended = add_outputs(read, names, recipe) if names else read
        graph = lower_graph(extended, recipe, target=target)
        graph = replace_outputs(graph, read, names) if names else graph
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

    If files return other tensors than the model (`file_outputs`), `graph.outputs` is a pair: the
    model's outputs, and a list of the tensors that files return.
    """
    ends = graph.outputs[1] if file_outputs else graph.outputs
    after_outputs = split_loss_only(graph.calls, ends)[1] if file_outputs else []
    not_in_file = [*after_outputs, *graph.loss_only]
    settings = Settings(recipe, scope, graph.calls, family, not_in_file)
    planned: Plan = RULES[recipe.placement](graph, settings).plan()
    planned.file_outputs = tuple(file_outputs or ())
    planned.lost_features = tuple(predict_losses(graph, planned.specs))
    return planned
