"""Finds patterns of operations in a graph, and replaces them.

Other files define patterns. `RULES` in `passes.py` lists all rules.

A pattern looks like the code that it matches:

    x, relu6 = tensor("x"), operation("relu6")
    HARD_SWISH = Rule(x * relu6(x + 3.0) / 6.0, lambda x: HardSwish()(x))

The pattern also matches equivalent code. Operands of sums and products may be swapped. Keras layers
(`Multiply`, `ReLU(6)`, `Activation`) may replace TensorFlow functions. Arguments may be passed by
name, and constants may be arrays. If a pattern names a tensor twice, the graph may compute this
tensor twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from keras_qat.graph.calls import Call, Graph, Value, flatten_values
from keras_qat.graph.facts import Facts, StructuralKeys, describe_argument
from keras_qat.graph.operations import COMMUTES
from keras_qat.lowering.builder import LoweringContext, replace_calls
from keras_qat.lowering.expand_call import make_symbol, require, trace_in_place
from keras_qat.lowering.read_operations import read_uniform, simplify_operation

TOLERANCE = 1e-5
"""Constants match if they differ by at most this fraction, such as 1/6 and 0.166667."""


@dataclasses.dataclass(frozen=True, eq=False)
class Pattern:
    """Matches a tensor or a constant. `x + 3.0` is the pattern of an addition.

    Args:
        kinds: the operations that may compute the tensor, such as "add". Other patterns have one
            of the kinds "tensor", "argument", "constant", "any of" and "repeated".
        operands: patterns of the first arguments of the operation. Other arguments are ignored.
        name: the name of the tensor in the match.
        limits: the lowest and the highest value of a constant. None allows any value.
    """

    kinds: tuple[str, ...]
    operands: tuple[Pattern, ...] = ()
    name: str = ""
    limits: tuple[float, float] | None = None

    def named(self, name: str) -> Pattern:
        """Return a copy of the pattern that names the matching tensor."""
        return dataclasses.replace(self, name=name)

    def __add__(self, other: Pattern | float) -> Pattern:
        return operation("add")(self, other)

    def __mul__(self, other: Pattern | float) -> Pattern:
        return operation("multiply")(self, other)

    def __sub__(self, other: Pattern | float) -> Pattern:
        return operation("subtract")(self, other) if isinstance(other, Pattern) else self + -other

    def __truediv__(self, other: Pattern | float) -> Pattern:
        if isinstance(other, Pattern):
            return operation("divide")(self, other)
        return self * (1 / other)

    def __rsub__(self, other: float) -> Pattern:
        return operation("subtract")(other, self)

    def __rtruediv__(self, other: float) -> Pattern:
        return operation("divide")(other, self)

    __radd__, __rmul__ = __add__, __mul__


def tensor(name: str) -> Pattern:
    """Return a pattern that matches any tensor. `Match.found[name]` is this tensor."""
    return Pattern(("tensor",), name=name)


def argument(name: str) -> Pattern:
    """Return a pattern that matches any argument, such as a tensor, an array or an axis."""
    return Pattern(("argument",), name=name)


def constant(name: str) -> Pattern:
    """Return a pattern that matches a number, or an array or tensor with equal elements."""
    return Pattern(("constant",), name=name)


def between(low: float, high: float, name: str = "") -> Pattern:
    """Return a pattern like `constant`, for values from `low` to `high`."""
    return Pattern(("constant",), name=name, limits=(low, high))


def _as_pattern(term: Pattern | float) -> Pattern:
    """Convert a number such as 6.0 to a pattern that also matches 6.00001."""
    if isinstance(term, Pattern):
        return term
    return between(term - TOLERANCE * abs(term), term + TOLERANCE * abs(term))


def operation(*kinds: str) -> Callable[..., Pattern]:
    """Return a function that makes patterns: `operation("exp")(x)` matches `tf.exp(x)`."""

    def make(*terms: Pattern | float) -> Pattern:
        return Pattern(kinds, tuple(map(_as_pattern, terms)))

    return make


def any_of(*patterns: Pattern) -> Pattern:
    """Return a pattern that matches any of `patterns`. They are tried in order."""
    return Pattern(("any of",), patterns)


def repeated(step: Callable[[Pattern], Pattern], pattern: Pattern) -> Pattern:
    """Return a pattern that matches `pattern`, `step(pattern)`, `step(step(pattern))` and so on."""
    return Pattern(("repeated",), (step(tensor("before")), pattern))


class Match(NamedTuple):
    """The tensors and calls that match a pattern.

    Attributes:
        found: maps a name in the pattern to the matching tensor, number or argument.
        calls: the matching calls, in reverse order of computation.
    """

    found: Mapping[str, Any]
    calls: tuple[Call, ...]

    @property
    def call(self) -> Call:
        return self.calls[0]


class Matcher:
    """Finds patterns in a graph. It caches results, so the graph must not change."""

    def __init__(self) -> None:
        self._keys, self._facts = StructuralKeys(), Facts()
        self._operations: dict[Call, tuple[str, list[Any]]] = {}

    def find(self, pattern: Pattern, call: Call) -> Iterator[Match]:
        """Yield each match of a pattern with `call` as its last call."""
        outputs = flatten_values(call.outputs)
        return self._match(pattern, outputs[0], Match({}, ())) if outputs else iter(())

    def _match(self, pattern: Pattern, operand: Any, begun: Match) -> Iterator[Match]:
        kind = pattern.kinds[0]
        if kind == "constant":
            operand, limits = read_uniform(operand, self._facts), pattern.limits
            if operand is None or (limits and not limits[0] <= operand <= limits[1]):
                return
        match = self._bind(pattern.name, operand, begun)
        if match is None or (kind == "tensor" and not isinstance(operand, Value)):
            return
        if kind in ("tensor", "argument", "constant"):
            yield match
        elif kind == "any of":
            for alternative in pattern.operands:
                yield from self._match(alternative, operand, match)
        elif kind == "repeated":
            yield from self._match_repeated(pattern, operand, match)
        elif isinstance(operand, Value) and operand.producer is not None:
            yield from self._match_operation(pattern, operand.producer, match)

    def _match_operation(self, pattern: Pattern, call: Call, match: Match) -> Iterator[Match]:
        if call not in self._operations:
            self._operations[call] = simplify_operation(call)
        kind, operands = self._operations[call]
        count = len(pattern.operands)
        if (
            kind not in pattern.kinds
            or len(operands) < count
            or len(flatten_values(call.outputs)) != 1
        ):
            return
        match = match._replace(calls=(*match.calls, call))
        is_free = kind in COMMUTES and len(operands) == count == 2
        for order in (operands, operands[::-1]) if is_free else (operands,):
            matches = iter([match])
            for part, operand in zip(pattern.operands, order, strict=False):
                matches = self._match_next(part, operand, matches)
            yield from matches

    def _match_next(self, pattern: Pattern, operand: Any, begun: Any) -> Iterator[Match]:
        for match in begun:
            yield from self._match(pattern, operand, match)

    def _match_repeated(self, pattern: Pattern, operand: Any, match: Match) -> Iterator[Match]:
        step, inner = pattern.operands
        while True:
            yield from self._match(inner, operand, match)
            found = next(self._match(step, operand, Match({}, ())), None)
            if found is None:
                return
            operand = found.found["before"]
            match = match._replace(calls=(*match.calls, *found.calls))

    def _bind(self, name: str, operand: Any, match: Match) -> Match | None:
        """Add an operand to a match under `name`. Return None if `name` has a different operand."""
        if not name:
            return match
        if name not in match.found:
            return match._replace(found={**match.found, name: operand})
        known = match.found[name]
        if isinstance(known, Value) and isinstance(operand, Value):
            return match if self._keys.is_same(known, operand) else None
        return match if describe_argument(known) == describe_argument(operand) else None


class Rule(NamedTuple):
    """Replaces the calls that match a pattern, unless other calls read intermediate results."""

    pattern: Pattern
    function: Callable[..., Any]
    """A function that computes the result from symbolic Keras tensors.

    Its parameters are the names in the pattern. If it raises `CannotExpand`, nothing changes.
    """

    def rewrite(self, match: Match, context: LoweringContext) -> list[Call]:
        """Return new calls for a match. An empty list means that the old calls stay."""

        def compute() -> Any:
            found = {
                name: make_symbol(x) if isinstance(x, Value) else x
                for name, x in match.found.items()
            }
            result = self.function(**found)
            require(tuple(result.shape) == match.call.output.shape)
            return result

        parts = trace_in_place(match.call, compute, context)
        return [part.as_part_of(match.call) for part in parts]


def apply_rules(graph: Graph, context: LoweringContext, rules: Sequence[Rule]) -> Graph:
    for rule in rules:
        matcher, readers, replaced = Matcher(), graph.consumers(), dict[Call, list[Call]]()
        outputs, used = set(flatten_values(graph.outputs)), set[Call]()
        for call in graph.calls:
            for match in matcher.find(rule.pattern, call):
                inner = [
                    value for part in match.calls[1:] for value in flatten_values(part.outputs)
                ]
                is_alone = all(set(readers[value]).issubset(match.calls) for value in inner)
                if not is_alone or not outputs.isdisjoint(inner) or used.intersection(match.calls):
                    continue
                if new := rule.rewrite(match, context):
                    replaced[call] = new
                    used.update(match.calls)
                    break
        graph = replace_calls(graph, replaced)
    return graph
