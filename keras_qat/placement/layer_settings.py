"""What a recipe, its overrides and the scope say about one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from keras_qat.arithmetic.kernel_families import Family
from keras_qat.config.recipes import Recipe
from keras_qat.config.specs import QuantSpec
from keras_qat.frontend.graph import Call, Value, values_in
from keras_qat.ops.embedding import EMBEDDING
from keras_qat.ops.matmul import CONTRACT, MATMUL
from keras_qat.ops.op import SharedRange
from keras_qat.ops.registry import on_request, op_of
from keras_qat.placement.layer_selection import Scope, matcher

__all__ = ["Settings", "may_open"]


def may_open(recipe: Recipe, calls: list[Call]) -> Callable[[Call], bool | None]:
    """What overrides say of opening layers of a model as it was read; None where none does.

    Raises:
        ValueError: if an override that says so matches no layer.
    """
    said = [each for each in recipe.overrides if each.open is not None]
    matchers = [(each.open, matcher(each.layers, calls)) for each in said]

    def opens(call: Call) -> bool | None:
        return [None, *(opens for opens, matches in matchers if matches(call))][-1]

    return opens


def first_and_last(calls: list[Call]) -> set[Call]:
    """The calls with weights that no others come before, and those that no others come behind."""
    weighted = {call for call in calls if _has_weights(call)}
    found: set[Call] = set()
    behind: set[Value] = set()
    for call in calls:
        is_behind = not behind.isdisjoint(call.inputs)
        if call in weighted and not is_behind:
            found.add(call)
        if call in weighted or is_behind:
            behind.update(values_in(call.outputs))
    before: set[Value] = set()
    for call in reversed(calls):
        is_before = not before.isdisjoint(values_in(call.outputs))
        if call in weighted and not is_before:
            found.add(call)
        if call in weighted or is_before:
            before.update(call.inputs)
    return found


def multiplied(calls: list[Call], ends: set[Call]) -> set[Value]:
    """What layers with weights multiply, apart from the ends, and what shares its range."""
    found: set[Value] = set()
    for call in calls:
        if (_has_weights(call) and call not in ends) or op_of(call) in (MATMUL, CONTRACT):
            found.update(call.inputs)
    sharing = [call for call in calls if isinstance(getattr(op_of(call), "output", 0), SharedRange)]
    before = -1
    while before != len(found):
        before = len(found)
        for call in sharing:
            joined = {*call.inputs, *values_in(call.outputs)}
            if not found.isdisjoint(joined):
                found |= joined
    return found


def _has_weights(call: Call) -> bool:
    """Whether a layer has weights that are quantized: no factors alone, and no table."""
    op = op_of(call)
    return op is not None and op.is_weighted and "" not in op.weights and op is not EMBEDDING


class Settings:
    """A recipe and a scope, asked call by call, and whose kernels are to compute the model.

    Raises:
        ValueError: if the scope or an override matches no layer.
    """

    def __init__(
        self, recipe: Recipe, scope: Scope | None, calls: list[Call], family: Family = "xnnpack"
    ) -> None:
        self.recipe, self.family = recipe, family
        self.in_scope = None if scope is None else matcher(scope, calls)
        self.overrides = [(each, matcher(each.layers, calls)) for each in recipe.overrides]
        self.ends = set() if recipe.end_bits is None else first_and_last(calls)
        self.multiplied = set() if recipe.end_bits is None else multiplied(calls, self.ends)

    def why_not(self, call: Call) -> str | None:
        """The reason why a call is not to be quantized, None if it is."""
        if self.in_scope is not None and not self.in_scope(call):
            return "outside the scope"
        said = [each.quantize for each, matches in self.overrides if matches(call)]
        said = [each for each in said if each is not None]
        if said:
            return None if said[-1] else "left in float by the recipe"
        if on_request(call.layer):
            kind = type(call.layer).__name__
            return f"in float, unless override({kind!r}, quantize=True) asks for integers"
        return None

    def quantizes(self, call: Call) -> bool:
        """Whether a call is to be quantized."""
        return self.why_not(call) is None

    def weights(self, call: Call, folded: bool = False) -> QuantSpec:
        """The specification of the weights of a kernel, behind which something is folded or not."""
        spec = (folded and self.recipe.folded_weights) or self.recipe.weights
        if self.recipe.end_bits is not None and call in self.ends:
            spec = dataclasses.replace(spec, bits=self.recipe.end_bits)
        for each, matches in self.overrides:
            if each.weight_bits is not None and matches(call):
                spec = dataclasses.replace(spec, bits=each.weight_bits)
        return spec

    def activations(self, value: Value) -> QuantSpec:
        """The specification of an input of the model, or of what a call gives."""
        spec, end_bits, call = self.recipe.activations, self.recipe.end_bits, value.producer
        if end_bits is not None and value not in self.multiplied:
            spec = dataclasses.replace(spec, bits=max(spec.bits, end_bits))
        for each, matches in self.overrides:
            if each.activation_bits is not None and call is not None and matches(call):
                spec = dataclasses.replace(spec, bits=each.activation_bits)
        return spec
