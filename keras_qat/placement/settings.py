"""Finds the settings of each call: the recipe's, changed by its overrides and the user's scope.

A scope selects layers, for example by their names. Each override has a scope, too.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
from collections.abc import Callable, Collection, Iterable
from typing import Any

from keras_qat.arithmetic.kernel_families import XNNPACK, KernelFamily
from keras_qat.config.recipe import Recipe
from keras_qat.config.specs import QuantSpec
from keras_qat.graph.calls import Call, Value, flatten_values
from keras_qat.keras2.backend import keras
from keras_qat.lowering.expansions.complex_numbers import find_complex_part
from keras_qat.ops.op import SharedRange
from keras_qat.ops.registry import find_op, is_on_request

OUT_OF_SCOPE = "outside the scope"
BY_RECIPE = "left in float by the recipe"
NOT_IN_FILE = "after the outputs of exported files"
REQUESTED = (OUT_OF_SCOPE, BY_RECIPE, NOT_IN_FILE)
"""Reasons for float that the user requested."""


Scope = str | Iterable[str] | Callable[[Any], bool]
"""A layer's name, a class name, a pattern with `*`, or a prefix of names. Also a list of these, or
a function of a layer. The prefix "a" selects names such as `a_1`, `a/b`, `a.b` and `a-b`."""


def check_scope(scope: Scope | None, calls: list[Call], inputs: Iterable[str]) -> None:
    """Raises a `ValueError` if an entry of a scope matches no layer, for example a misspelled name.

    `calls` are the calls before and after lowering. A scope may also contain names of `inputs`.
    """
    if scope is None:
        return
    check_entries(scope)
    if isinstance(scope, str) or callable(scope):
        return
    names, known = {call.origin for call in calls}, set(inputs)
    missing = [
        pattern
        for pattern in scope
        if isinstance(pattern, str)
        and pattern not in known
        and not any(_matches(call, pattern, pattern in names) for call in calls)
    ]
    if missing:
        raise ValueError(_explain_no_match(missing, calls))


def check_entries(scope: object) -> None:
    entries: Iterable[object] = (
        scope if isinstance(scope, (list, tuple, set, frozenset)) else [scope]
    )
    for item in entries:
        if isinstance(item, keras.layers.Layer):
            raise ValueError(f"The scope contains a layer: pass its name, {item.name!r}.")
        if isinstance(item, type) and issubclass(item, keras.layers.Layer):
            raise ValueError(f"The scope contains a class: pass its name, {item.__name__!r}.")
        if not (item if isinstance(item, str) else callable(item) or hasattr(item, "__iter__")):
            raise ValueError(
                f"{item!r} is not a scope: pass the name of a layer or a class, a pattern with *, "
                f"a list of these, or a function of a layer."
            )


def _explain_no_match(patterns: Iterable[object], calls: list[Call]) -> str:
    layers = list(dict.fromkeys(call.origin for call in calls))
    words = [*layers, *dict.fromkeys(type(call.source).__name__ for call in calls)]
    near = [
        word
        for pattern in patterns
        if isinstance(pattern, str)
        for word in difflib.get_close_matches(pattern, words, n=1)
    ]
    functions = ((pattern, getattr(pattern, "__name__", None)) for pattern in patterns)
    parts = [repr(item) if name is None else f"The function {name}" for item, name in functions]
    names = ", ".join(parts) or "An empty scope"
    meant = f" Did you mean {', '.join(map(repr, near))}?" if near else ""
    listed = ", ".join(layers[:8]) + (", ..." if len(layers) > 8 else "")
    return f"{names} matches no layer.{meant} The layers are: {listed}"


def make_matcher(scope: Scope, calls: list[Call], required: bool = True) -> Callable[[Call], bool]:
    """Returns a function that returns True for calls in a scope.

    If `required` is True and the scope matches no call, raises a `ValueError`.
    """
    names = {call.origin for call in calls}
    patterns = [scope] if isinstance(scope, str) or callable(scope) else list(scope)

    def matches(call: Call) -> bool:
        return any(
            any(map(pattern, (call.source, *call.within)))
            if callable(pattern)
            else _matches(call, pattern, pattern in names)
            for pattern in patterns
        )

    if required and not any(matches(call) for call in calls):
        raise ValueError(_explain_no_match(patterns, calls))
    return matches


def _matches(call: Call, pattern: str, is_name: bool) -> bool:
    name = call.origin
    if is_name:
        return name == pattern
    if any(character in pattern for character in "*?["):
        return fnmatch.fnmatchcase(name, pattern)
    if pattern in [type(layer).__name__ for layer in (call.layer, call.source, *call.within)]:
        return True
    rest = name.removeprefix(pattern)
    return name.startswith(pattern) and (not rest or pattern[-1] in "_/.-" or rest[0] in "_/.-")


def make_trace_filter(recipe: Recipe, calls: list[Call]) -> Callable[[Call], bool | None]:
    """Returns a function that returns whether to trace a call. None means no preference."""
    overrides = [o for o in recipe.overrides if o.open is not None or o.quantize]
    default = True if recipe.without_float else None
    matchers = [(o.open, make_matcher(o.layers, calls, o.open is not None)) for o in overrides]

    def may_trace(call: Call) -> bool | None:
        answers = [default]
        for is_open, matches in matchers:
            # Integer normalization along other axes than the last needs transposes.
            if (is_open is not None or is_on_request(call.layer)) and matches(call):
                answers.append(True if is_open is None else is_open)
        return answers[-1]

    return may_trace


def find_ends(calls: list[Call]) -> set[Call]:
    """Returns the weighted calls that are the first or the last on a path through the graph."""
    steps = [(call, set(call.inputs), set(flatten_values(call.outputs))) for call in calls]
    backwards = [(call, after, before) for call, before, after in reversed(steps)]
    return _find_first(steps) | _find_first(backwards)


def _find_first(steps: list[tuple[Call, set[Value], set[Value]]]) -> set[Call]:
    first: set[Call] = set()
    reached: set[Value] = set()
    for call, before, after in steps:
        is_reached = not reached.isdisjoint(before)
        if _has_weights(call) and not is_reached:
            first.add(call)
        if _has_weights(call) or is_reached:
            reached |= after
    return first


def find_multiplied(calls: list[Call], ends: set[Call]) -> set[Value]:
    """Returns the inputs of matrix products, and of weighted calls that are not in `ends`.

    The result includes tensors that share a range with such an input.
    """
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
            connected = {*call.inputs, *flatten_values(call.outputs)}
            if not values.isdisjoint(connected):
                values |= connected
    return values


def _has_weights(call: Call) -> bool:
    op = find_op(call)
    return op is not None and op.is_weighted and not (op.is_affine or op.is_table)


def _find_requests(calls: list[Call]) -> dict[Call, str]:
    """Return the code that requests integers, for each call that is in float by default."""
    requests: dict[Call, str] = {}
    for call in calls:
        name = type([call.layer, *call.within][-1]).__name__
        if is_on_request(call.layer):
            requests[call] = f"recipe.override({type(call.layer).__name__!r}, quantize=True)"
        elif (part := find_complex_part(call)) and part.is_on_request:
            code = f" or recipe.override({name!r}, open=True)" if call.within else ""
            requests |= dict.fromkeys(part.calls, f"strict=True{code}")
    return requests


class Settings:
    """Finds the settings of each call in the recipe, its overrides and the scope."""

    def __init__(
        self,
        recipe: Recipe,
        scope: Scope | None,
        calls: list[Call],
        family: KernelFamily = XNNPACK,
        not_in_file: Collection[Call] = (),
    ) -> None:
        self.recipe, self.family, self.not_in_file = recipe, family, frozenset(not_in_file)
        self.in_scope = None if scope is None else make_matcher(scope, calls)
        self.overrides = [(item, make_matcher(item.layers, calls)) for item in recipe.overrides]
        self.requests = _find_requests(calls)
        self.ends = set() if recipe.end_bits is None else find_ends(calls)
        self.multiplied = set() if recipe.end_bits is None else find_multiplied(calls, self.ends)

    def find_reason(self, call: Call) -> str | None:
        """Returns the reason why a call stays in float. Returns None if it is quantized."""
        if call in self.not_in_file:
            return NOT_IN_FILE
        if self.in_scope is not None and not self.in_scope(call):
            return OUT_OF_SCOPE
        quantize = self._override(call, "quantize")
        if quantize is not None:
            return None if quantize else BY_RECIPE
        if call in self.requests and not self.recipe.without_float:
            return f"in float, unless {self.requests[call]} asks for integers"
        return None

    def _override(self, call: Call, name: str) -> Any:
        settings = [getattr(item, name) for item, matches in self.overrides if matches(call)]
        return next((setting for setting in reversed(settings) if setting is not None), None)

    def quantizes(self, call: Call) -> bool:
        return self.find_reason(call) is None

    def weights(self, call: Call, folded: bool = False) -> QuantSpec:
        """Returns how a call's weights are quantized, with or without a folded normalization."""
        spec = (folded and self.recipe.folded_weights) or self.recipe.weights
        bits, op = self._override(call, "weight_bits"), find_op(call)
        if bits is None and op is not None and not op.supports_int4:
            bits = self.recipe.unpacked_bits
        if bits is None and call in self.ends:
            bits = self.recipe.end_bits
        return spec if bits is None else dataclasses.replace(spec, bits=bits)

    def activations(self, value: Value) -> QuantSpec:
        """Returns how a model input or a call's output is quantized."""
        spec, end_bits, call = self.recipe.activations, self.recipe.end_bits, value.producer
        if end_bits is not None and value not in self.multiplied:
            spec = dataclasses.replace(spec, bits=max(spec.bits, end_bits))
        bits = None if call is None else self._override(call, "activation_bits")
        return spec if bits is None else dataclasses.replace(spec, bits=bits)
