"""Computes how low masked scores must be for their consumers to ignore them."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

from keras_qat.graph.calls import Call, Value, flatten_values
from keras_qat.graph.facts import solve
from keras_qat.graph.operations import (
    READS_SHAPES,
    arguments_in_order,
    get_kind,
    get_operands,
    is_operation,
    read_array,
    read_scalar,
)
from keras_qat.keras2.backend import layers
from keras_qat.lowering.read_operations import simplify_operation
from keras_qat.ops.registry import find_op


class Distance(NamedTuple):
    """How far masked scores must lie from the others."""

    beyond: float = 0.0
    """Below the smallest of the others, or above the largest."""
    limit: float | None = None
    """A value that they have to reach."""


Steps = Generator[tuple[Value, int], Any, Distance | None]
"""Asks for the distance of other tensors, and returns one."""

BELOW = {
    "softmax": Distance(12.0),
    "sigmoid": Distance(0.0, -8.0),
    "exp": Distance(8.0, -8.0),
    **dict.fromkeys(("softplus", "elu"), Distance(0.0, -8.0)),
    **dict.fromkeys(("tanh", "erf", "gelu"), Distance(0.0, -4.0)),
    "relu": Distance(0.0, 0.0),
    **dict.fromkeys(("reduce_max", "max_pooling", "argmax", "top_k"), Distance()),
}
"""Operator that ignores values far below others -> how far."""

ABOVE = {
    "sigmoid": Distance(0.0, 8.0),
    **dict.fromkeys(("tanh", "erf"), Distance(0.0, 4.0)),
    **dict.fromkeys(("reduce_min", "argmin"), Distance()),
}
"""Operator that ignores values far above others -> how far."""

MOVES = ("reshape", "transpose", "identity", "linear", "slice", "gather")
LIMITS = {1: "maximum", -1: "minimum"}


class ScoreLimits:
    """Asks the consumers of masked scores.

    Args:
        readers: value -> calls that read it.
        outputs: outputs of the model.
        masked: call that masks scores -> the scores, and 1 or -1 as `side` below.
        mask: the mask; None if it is a constant.
        where_true: whether it masks scores where it is true.
    """

    def __init__(
        self,
        readers: Mapping[Value, list[Call]],
        outputs: Any,
        masked: Mapping[Call, tuple[Value, int]],
        mask: Value | None = None,
        where_true: bool = False,
    ) -> None:
        self._readers, self._outputs, self._masked = readers, set(flatten_values(outputs)), masked
        self._mask = (None, False) if mask is None else _find_source(mask, where_true)
        self._known: dict[tuple[Value, int], Distance | None] = {}

    def distance(self, value: Value, side: int) -> Distance | None:
        """Returns how far masked scores must lie from the others; None if they are read.

        Args:
            value: the tensor.
            side: 1 if masked scores lie far below the others, -1 if above.
        """
        return solve((value, side), self._find_distance, self._known)

    def _find_distance(self, question: tuple[Value, int]) -> Steps:
        value, side = question
        if value in self._outputs:
            return None
        beyond, limits = list[float](), list[float]()
        for call in self._readers[value]:
            if self._reads_shape(call):
                continue
            distance = yield from self._ask_consumer(call, value, side)
            if distance is None:
                return None
            beyond.append(distance.beyond)
            limits += [] if distance.limit is None else [side * distance.limit]
        limit = side * min(limits) if limits else None
        return Distance(max(beyond), limit) if beyond else None

    def _ask_consumer(self, call: Call, value: Value, side: int) -> Steps:
        name = _find_name(call)
        if (call.inputs[0] is value and get_kind(call) == "reshape") or (
            get_kind(call) == "cast" and call.output.is_float
        ):
            name = "identity"  # Also a reshape to sizes that are tensors.
        if known := (BELOW if side > 0 else ABOVE).get(name):
            return known
        if known_line := find_line(call):
            factor, offset = known_line
            after = yield call.output, side if factor > 0 else -side
            if after is None:
                return None
            limit = None if after.limit is None else (after.limit - offset) / factor
            return Distance(after.beyond / abs(factor), limit)
        if self._masked.get(call) == (value, side) or name in MOVES:
            return (yield call.output, side)
        if self._replaces_masked(call, value):
            return Distance()
        terms = _find_terms(call)
        others = [term for term in terms if term is not value]
        if len(others) != 1:
            return None
        (other,) = others
        if name == LIMITS[side] and not isinstance(other, Value):
            return Distance(0.0, float((other * side).min()) * side)
        if name == "subtract" and terms[0] is value and isinstance(other, Value):
            return (yield from self._ask_difference(call, other, side))
        # A share is almost 0 for scores that were masked.
        is_share = isinstance(other, Value) and _find_name(other.producer) in ("softmax", "exp")
        return Distance() if name == "multiply" and is_share else None

    def _ask_difference(self, call: Call, other: Value, side: int) -> Steps:
        """Returns the distance if one value for each row is subtracted from scores."""
        sizes = zip(other.shape[1:], call.output.shape[1:], strict=False)
        if len(other.shape) != len(call.output.shape) or all(a == b for a, b in sizes):
            return None
        after = yield call.output, side
        if after is None or after.limit is None:
            return after
        # The largest score or the logarithm of a sum: the difference is at most 0.
        largest = ("reduce_max", "log") if side > 0 else ("reduce_min",)
        is_largest = _find_name(other.producer) in largest
        return Distance(max(after.beyond, abs(after.limit))) if is_largest else None

    def _replaces_masked(self, call: Call, value: Value) -> bool:
        """Returns whether a call replaces the scores that the same mask has masked."""
        if get_kind(call) != "where":
            return False
        condition, first, second = get_operands(call, "condition", "x", "y")
        replaced = [where for where, x in ((False, first), (True, second)) if x is value]
        known = isinstance(condition, Value) and len(replaced) == 1
        return known and _find_source(condition, replaced[0]) == self._mask

    def _reads_shape(self, call: Call) -> bool:
        """Returns whether a call reads no values of a tensor: `tf.ones_like(x[0])`."""
        kind = get_kind(call)
        if kind in READS_SHAPES:
            return True
        is_part = kind == "getitem" and self._readers[call.output]
        return bool(is_part) and all(map(self._reads_shape, self._readers[call.output]))


def _find_source(mask: Value, where: bool) -> tuple[Value, bool]:
    """Returns the mask that another is the negation or a cast of, and where both are `where`."""
    while (call := mask.producer) is not None:
        is_negated = get_kind(call) == "logical_not" or find_line(call) == (-1.0, 1.0)
        if not is_negated and get_kind(call) not in ("cast", "identity"):
            break
        (mask, *_), where = call.inputs, where != is_negated
    return mask, where


def _find_name(call: Call | None) -> str:
    """Returns the name of the operator that a call is; "" if there is none."""
    op = None if call is None else find_op(call)
    return "" if op is None else op.name


def find_line(call: Call) -> tuple[float, float] | None:
    """Returns a and b of a call that computes a * x + b with numbers; None for any other."""
    if type(call.layer) is layers.Rescaling:
        scale, offset = read_scalar(call.layer.scale), read_scalar(call.layer.offset)
        return (scale, offset) if scale and offset is not None else None
    kind, terms = simplify_operation(call)
    numbers = [read_scalar(term) for term in terms if not isinstance(term, Value)]
    if len(call.inputs) != 1 or len(numbers) != 1 or numbers[0] is None:
        return None
    if kind == "multiply":
        return (numbers[0], 0.0) if numbers[0] else None
    # The constant of a difference comes first here: x - 1 is a sum.
    return {"add": (1.0, numbers[0]), "subtract": (-1.0, numbers[0])}.get(kind)


def _find_terms(call: Call) -> list[Any]:
    """Returns the tensors and arrays that a call combines."""
    if not is_operation(call.layer):
        return list(call.inputs)
    known = [arg if isinstance(arg, Value) else read_array(arg) for arg in arguments_in_order(call)]
    return [term for term in known if term is not None]
