"""Finds out how far away hidden numbers have to lie, so that what reads them ignores them."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

from keras_qat.graph.calls import Call, Value, values_in
from keras_qat.graph.facts import solve
from keras_qat.graph.operations import READS_SHAPES, is_operation, kind_of
from keras_qat.graph.tf_operations import arguments_in_order, array, number, operands
from keras_qat.keras2.backend import layers
from keras_qat.ops.registry import op_of


class Distance(NamedTuple):
    """How far hidden numbers have to lie."""

    beyond: float = 0.0
    """Below the smallest of the others, or above the largest."""
    limit: float | None = None
    """A number that they have to reach."""


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
"""Operator that ignores numbers far below others -> how far."""

ABOVE = {
    "sigmoid": Distance(0.0, 8.0),
    **dict.fromkeys(("tanh", "erf"), Distance(0.0, 4.0)),
    **dict.fromkeys(("reduce_min", "argmin"), Distance()),
}
"""Operator that ignores numbers far above others -> how far."""

MOVES = ("reshape", "transpose", "identity", "linear", "slice", "gather")
LIMITS = {1: "maximum", -1: "minimum"}


class HiddenNumbers:
    """What reads numbers that masks hide.

    Args:
        readers: value -> calls that read it.
        outputs: outputs of the model.
        hidden: call that hides more numbers of a tensor -> the tensor, and 1 or -1 as below.
        mask: what hides the numbers; None if it is a constant.
        where_true: whether it hides them where it is true.
    """

    def __init__(
        self,
        readers: Mapping[Value, list[Call]],
        outputs: Any,
        hidden: Mapping[Call, tuple[Value, int]],
        mask: Value | None = None,
        where_true: bool = False,
    ) -> None:
        self._readers, self._outputs, self._hidden = readers, set(values_in(outputs)), hidden
        self._mask = (None, False) if mask is None else _source(mask, where_true)
        self._known: dict[tuple[Value, int], Distance | None] = {}

    def distance(self, value: Value, side: int) -> Distance | None:
        """Returns how far hidden numbers of a tensor have to lie.

        None if they are not ignored.

        Args:
            value: the tensor.
            side: 1 if hidden numbers are far below all others, -1 if they are above.
        """
        return solve((value, side), self._find_distance, self._known)

    def _find_distance(self, question: tuple[Value, int]) -> Steps:
        value, side = question
        if value in self._outputs:
            return None
        read = [call for call in self._readers[value] if not self._reads_sizes(call)]
        distances = []
        for call in read:
            distances.append((yield from self._of(call, value, side)))
        known = [distance for distance in distances if distance is not None]
        if not known or len(known) < len(read):
            return None
        limits = [side * distance.limit for distance in known if distance.limit is not None]
        limit = side * min(limits) if limits else None
        return Distance(max(distance.beyond for distance in known), limit)

    def _of(self, call: Call, value: Value, side: int) -> Steps:
        """Returns how far numbers have to lie that one call reads."""
        op = op_of(call)
        kind = "" if op is None else op.name
        if kind_of(call) == "reshape" and call.inputs[0] is value:
            kind = "reshape"  # To sizes that are read, too.
        if kind_of(call) == "cast" and call.output.is_float:
            kind = "identity"
        if known := (BELOW if side > 0 else ABOVE).get(kind):
            return known
        if known_line := line(call):
            factor, offset = known_line
            behind = yield call.output, side if factor > 0 else -side
            if behind is None:
                return None
            limit = None if behind.limit is None else (behind.limit - offset) / factor
            return Distance(behind.beyond / abs(factor), limit)
        if self._hidden.get(call) == (value, side) or kind in MOVES:
            return (yield call.output, side)
        if self._drops(call, value):
            return Distance()
        others = [term for term in terms_of(call) if term is not value]
        if len(others) != 1:
            return None
        (other,) = others
        if kind == LIMITS[side] and not isinstance(other, Value):
            return Distance(0.0, float((other * side).min()) * side)
        if kind == "subtract" and terms_of(call)[0] is value and isinstance(other, Value):
            return (yield from self._of_difference(call, other, side))
        if kind == "multiply" and isinstance(other, Value) and _is_share(other):
            return Distance()
        return None

    def _of_difference(self, call: Call, other: Value, side: int) -> Steps:
        """Returns how far numbers have to lie of which one number for each row is subtracted."""
        sizes = zip(other.shape[1:], call.output.shape[1:], strict=False)
        if len(other.shape) != len(call.output.shape) or all(a == b for a, b in sizes):
            return None
        behind = yield call.output, side
        if behind is None or behind.limit is None:
            return behind
        # The largest of them, or the logarithm of a sum: what is left is at most 0.
        is_largest = _kind(other) == ("reduce_max" if side > 0 else "reduce_min")
        is_largest |= side > 0 and _kind(other) == "log"
        return Distance(max(behind.beyond, abs(behind.limit))) if is_largest else None

    def _drops(self, call: Call, value: Value) -> bool:
        """Returns whether a call puts other numbers where the same mask hides those of a tensor."""
        if kind_of(call) != "where":
            return False
        condition, first, second = operands(call, "condition", "x", "y")
        replaced = [where for where, x in ((False, first), (True, second)) if x is value]
        known = isinstance(condition, Value) and len(replaced) == 1
        return known and _source(condition, replaced[0]) == self._mask

    def _reads_sizes(self, call: Call) -> bool:
        """Returns whether nothing depends on the numbers a call reads: `tf.ones_like(x[0])`."""
        kind = kind_of(call)
        if kind in READS_SHAPES:
            return True
        is_part = kind == "getitem" and self._readers[call.output]
        return bool(is_part) and all(map(self._reads_sizes, self._readers[call.output]))


def _source(mask: Value, where: bool) -> tuple[Value, bool]:
    """Returns the mask that another is the negation or a cast of, and where both are `where`."""
    while (call := mask.producer) is not None and is_operation(call.layer):
        is_negated = kind_of(call) == "logical_not" or line(call) == (-1.0, 1.0)
        if not is_negated and kind_of(call) not in ("cast", "identity"):
            break
        (mask, *_), where = call.inputs, where != is_negated
    return mask, where


def _kind(value: Value) -> str:
    """Returns the name of the operator that computes a tensor; "" if there is none."""
    op = None if value.producer is None else op_of(value.producer)
    return "" if op is None else op.name


def _is_share(value: Value) -> bool:
    """Returns whether a tensor is almost 0 where what it is made of is hidden."""
    return _kind(value) in ("softmax", "exp")


def line(call: Call) -> tuple[float, float] | None:
    """Returns a and b of a call that computes a * x + b with numbers; None for any other."""
    if type(call.layer) is layers.Rescaling:
        scale, offset = number(call.layer.scale), number(call.layer.offset)
        return (scale, offset) if scale and offset is not None else None
    if not is_operation(call.layer):
        return None
    if kind_of(call) == "negative":
        return -1.0, 0.0
    kind, both = kind_of(call), terms_of(call)
    if len(both) != 2 or len(call.inputs) != 1:
        return None
    is_first = isinstance(both[0], Value)
    value = number(both[1 if is_first else 0])
    if value is None:
        return None
    if kind == "add" or (kind == "subtract" and is_first):
        return 1.0, value if kind == "add" else -value
    if kind == "subtract":
        return -1.0, value
    if not value or (kind == "divide" and not is_first):
        return None
    return {"multiply": (value, 0.0), "divide": (1.0 / value, 0.0)}.get(kind)


def terms_of(call: Call) -> list[Any]:
    """Returns the tensors and arrays that a call combines."""
    if not is_operation(call.layer):
        return list(call.inputs)
    known = [arg if isinstance(arg, Value) else array(arg) for arg in arguments_in_order(call)]
    return [term for term in known if term is not None]
