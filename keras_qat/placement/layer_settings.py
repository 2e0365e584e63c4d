"""Reads what a recipe, its overrides and the scope ask for one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

from keras_qat.arithmetic.kernel_families import XNNPACK, KernelFamily
from keras_qat.config.recipe import Recipe
from keras_qat.config.specs import QuantSpec
from keras_qat.graph.calls import Call, Value, flatten_values
from keras_qat.ops.op import SharedRange
from keras_qat.ops.registry import find_op, is_on_request
from keras_qat.placement.layer_selection import Scope, matcher

OUT_OF_SCOPE = "outside the scope"
BY_RECIPE = "left in float by the recipe"
BEHIND_THE_FILE = "behind the outputs that files have"
ASKED_FOR = (OUT_OF_SCOPE, BY_RECIPE, BEHIND_THE_FILE)
"""Reasons with which layers compute in float because the user says so."""


def may_open(recipe: Recipe, calls: list[Call]) -> Callable[[Call], bool | None]:
    """Returns a function that tells whether overrides open a layer; None if none says so.

    Raises:
        ValueError: if an override of `open` matches no layer.
    """
    overrides = [o for o in recipe.overrides if o.open is not None or o.quantize]
    default = True if recipe.without_float else None
    matchers = [(o.open, matcher(o.layers, calls, o.open is not None)) for o in overrides]

    def opens(call: Call) -> bool | None:
        answers = [default]
        for is_open, matches in matchers:
            # Layers that normalize along other axes than the last ones are turned for integers.
            if (is_open is not None or is_on_request(call.layer)) and matches(call):
                answers.append(True if is_open is None else is_open)
        return answers[-1]

    return opens


def first_and_last(calls: list[Call]) -> set[Call]:
    """Returns the weighted calls with no weighted call before them, or none after them."""
    steps = [(call, set(call.inputs), set(flatten_values(call.outputs))) for call in calls]
    backwards = [(call, after, before) for call, before, after in reversed(steps)]
    return _first(steps) | _first(backwards)


def _first(steps: list[tuple[Call, set[Value], set[Value]]]) -> set[Call]:
    """Returns the first weighted calls; a step holds a call and the values before and after it."""
    first: set[Call] = set()
    reached: set[Value] = set()
    for call, before, after in steps:
        is_reached = not reached.isdisjoint(before)
        if _has_weights(call) and not is_reached:
            first.add(call)
        if _has_weights(call) or is_reached:
            reached |= after
    return first


def multiplied(calls: list[Call], ends: set[Call]) -> set[Value]:
    """Returns inputs of inner weighted layers and products, and what shares their range."""
    values: set[Value] = set()
    for call in calls:
        op = find_op(call)
        is_product = op is not None and op.multiplies_tensors
        if is_product or (_has_weights(call) and call not in ends):
            values.update(call.inputs)
    sharing = [
        call for call in calls if isinstance(getattr(find_op(call), "output", 0), SharedRange)
    ]
    count = -1
    while count != len(values):
        count = len(values)
        for call in sharing:
            joined = {*call.inputs, *flatten_values(call.outputs)}
            if not values.isdisjoint(joined):
                values |= joined
    return values


def _has_weights(call: Call) -> bool:
    """Returns whether a layer has quantized weights; scale factors and tables do not count."""
    op = find_op(call)
    return op is not None and op.is_weighted and not (op.is_affine or op.is_table)


class Settings:
    """Answers for each call what a recipe, its overrides and a scope ask for.

    Raises:
        ValueError: if the scope or an override matches no layer.
    """

    def __init__(
        self,
        recipe: Recipe,
        scope: Scope | None,
        calls: list[Call],
        family: KernelFamily = XNNPACK,
        behind: Collection[Call] = (),
    ) -> None:
        self.recipe, self.family, self.behind = recipe, family, frozenset(behind)
        self.in_scope = None if scope is None else matcher(scope, calls)
        self.overrides = [(item, matcher(item.layers, calls)) for item in recipe.overrides]
        self.ends = set() if recipe.end_bits is None else first_and_last(calls)
        self.multiplied = set() if recipe.end_bits is None else multiplied(calls, self.ends)

    def why_not(self, call: Call) -> str | None:
        """Returns the reason why a call is not quantized; None if it is."""
        if call in self.behind:
            return BEHIND_THE_FILE
        if self.in_scope is not None and not self.in_scope(call):
            return OUT_OF_SCOPE
        quantize = self._override(call, "quantize")
        if quantize is not None:
            return None if quantize else BY_RECIPE
        if is_on_request(call.layer) and not self.recipe.without_float:
            kind = type(call.layer).__name__
            return f"in float, unless recipe.override({kind!r}, quantize=True) asks for integers"
        return None

    def _override(self, call: Call, name: str) -> Any:
        """Returns a setting of the last override that has it and matches a call; None without."""
        settings = [getattr(item, name) for item, matches in self.overrides if matches(call)]
        return next((setting for setting in reversed(settings) if setting is not None), None)

    def quantizes(self, call: Call) -> bool:
        """Returns whether a call is quantized."""
        return self.why_not(call) is None

    def weights(self, call: Call, folded: bool = False) -> QuantSpec:
        """Returns the specification of a layer's weights, plain or folded."""
        spec = (folded and self.recipe.folded_weights) or self.recipe.weights
        bits, op = self._override(call, "weight_bits"), find_op(call)
        if bits is None and op is not None and not op.supports_int4:
            bits = self.recipe.unpacked_bits
        if bits is None and call in self.ends:
            bits = self.recipe.end_bits
        return spec if bits is None else dataclasses.replace(spec, bits=bits)

    def activations(self, value: Value) -> QuantSpec:
        """Returns the specification of a model input or of a call's output."""
        spec, end_bits, call = self.recipe.activations, self.recipe.end_bits, value.producer
        if end_bits is not None and value not in self.multiplied:
            spec = dataclasses.replace(spec, bits=max(spec.bits, end_bits))
        bits = None if call is None else self._override(call, "activation_bits")
        return spec if bits is None else dataclasses.replace(spec, bits=bits)
