"""Computes which values can replace masked scores, which usually are about -1e9.

A softmax, for example, ignores scores that are 12 below the others, because exp(-12) is 6e-6. The
argument `side` is 1 if masked scores are far below all others. It is -1 if they are far above, such
as 1e9 before a minimum.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

from keras_qat.graph.calls import Call, Value, flatten_values
from keras_qat.graph.facts import Facts
from keras_qat.graph.operations import READS_SHAPES, get_kind, get_operands, read_array, read_scalar
from keras_qat.keras2.backend import layers
from keras_qat.lowering.read_operations import read_operation, simplify_operation
from keras_qat.ops.registry import find_op


class Distance(NamedTuple):
    """How far masked scores must be from other scores for an operator to ignore them."""

    beyond: float = 0.0
    """The distance below the lowest other score, or above the highest."""
    limit: float | None = None
    """A value that masked scores must also reach, such as -8 before a sigmoid."""


Steps = Generator[tuple[Value, int], Any, Distance | None]
"""Type of a rule for `Facts.find`. It yields (tensor, side) to get another tensor's distance."""

BELOW = {
    "softmax": Distance(12.0),
    "sigmoid": Distance(0.0, -8.0),
    "exp": Distance(8.0, -8.0),
    **dict.fromkeys(("softplus", "elu"), Distance(0.0, -8.0)),
    **dict.fromkeys(("tanh", "erf", "gelu"), Distance(0.0, -4.0)),
    "relu": Distance(0.0, 0.0),
    **dict.fromkeys(("reduce_max", "max_pooling", "argmax", "top_k"), Distance()),
}
"""Maps an operator to how far below other scores masked scores must be."""

ABOVE = {
    "sigmoid": Distance(0.0, 8.0),
    **dict.fromkeys(("tanh", "erf"), Distance(0.0, 4.0)),
    **dict.fromkeys(("reduce_min", "argmin"), Distance()),
}
"""Maps an operator to how far above other scores masked scores must be."""

PASSES_ON = ("reshape", "transpose", "identity", "linear", "slice", "gather")
LIMITS = {1: "maximum", -1: "minimum"}


class ScoreLimits:
    """Finds how far masked scores must be from other scores for all calls to ignore them.

    Args:
        readers: maps a tensor to the calls that read it.
        outputs: outputs of the model.
        masked: maps each call that masks scores to the scores and `side`.
        mask: the mask, or None for a constant mask and for a mask that is reshaped.
        where_true: whether scores are masked where the mask is True.
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
        self._facts = Facts()
        self._mask = mask and self._facts.find(find_mask, (mask, where_true))

    def find(self, value: Value, side: int) -> Distance | None:
        """Return the required distance between masked scores in `value` and other scores.

        Return None if a call never ignores masked scores.
        """
        return self._facts.find(self._find_distance, (value, side))

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
            name = "identity"  # Includes reshapes to sizes that are tensors.
        if found := (BELOW if side > 0 else ABOVE).get(name):
            return found
        if line := find_line(call):
            factor, offset = line
            after = yield call.output, side if factor > 0 else -side
            if after is None:
                return None
            limit = None if after.limit is None else (after.limit - offset) / factor
            return Distance(after.beyond / abs(factor), limit)
        if self._masked.get(call) == (value, side) or name in PASSES_ON:
            return (yield call.output, side)
        if self._replaces_masked(call, value):
            return Distance()
        arguments = read_operation(call)[1]
        known = (arg if isinstance(arg, Value) else read_array(arg) for arg in arguments)
        terms = [term for term in known if term is not None]
        others = [term for term in terms if term is not value]
        if len(others) != 1:
            return None
        (other,) = others
        if name == LIMITS[side] and not isinstance(other, Value):
            return Distance(0.0, float((other * side).min()) * side)
        if name == "subtract" and terms[0] is value and isinstance(other, Value):
            return (yield from self._ask_difference(call, other, side))
        # If the other factor is a softmax, it is almost 0 for masked scores.
        is_share = isinstance(other, Value) and _find_name(other.producer) in ("softmax", "exp")
        return Distance() if name == "multiply" and is_share else None

    def _ask_difference(self, call: Call, other: Value, side: int) -> Steps:
        """Return the distance for `scores - tf.reduce_max(scores, -1, True)` and similar calls."""
        sizes = zip(other.shape[1:], call.output.shape[1:], strict=False)
        if len(other.shape) != len(call.output.shape) or all(a == b for a, b in sizes):
            return None
        after = yield call.output, side
        if after is None or after.limit is None:
            return after
        # Scores minus the largest score, or minus the logarithm of the sum, are at most 0.
        largest = ("reduce_max", "log") if side > 0 else ("reduce_min",)
        is_largest = _find_name(other.producer) in largest
        return Distance(max(after.beyond, abs(after.limit))) if is_largest else None

    def _replaces_masked(self, call: Call, value: Value) -> bool:
        """Return whether a call is a `tf.where` that replaces the masked scores once more."""
        if get_kind(call) != "where":
            return False
        condition, first, second = get_operands(call, "condition", "x", "y")
        replaced = [where for where, x in ((False, first), (True, second)) if x is value]
        is_known = isinstance(condition, Value) and len(replaced) == 1
        return is_known and self._facts.find(find_mask, (condition, replaced[0])) == self._mask

    def _reads_shape(self, call: Call) -> bool:
        """Return whether a call depends only on a tensor's shape, like `tf.ones_like(x[0])`."""
        kind = get_kind(call)
        if kind in READS_SHAPES:
            return True
        is_part = kind == "getitem" and self._readers[call.output]
        return bool(is_part) and all(map(self._reads_shape, self._readers[call.output]))


Question = tuple[Value, bool]


def find_mask(question: Question) -> Generator[Question, Any, Question]:
    """Find the mask that a tensor was computed from by negations and casts. Called by `Facts.find`.

    The question (x, True) means "where x is True". The answer may be (mask, False), which means
    "where the mask is False".
    """
    mask, where = question
    call = mask.producer
    is_negated = call and (get_kind(call) == "logical_not" or find_line(call) == (-1.0, 1.0))
    if call is None or not (is_negated or get_kind(call) in ("cast", "identity")):
        return question
    return (yield call.inputs[0], where != is_negated)


def _find_name(call: Call | None) -> str:
    op = None if call is None else find_op(call)
    return "" if op is None else op.name


def find_line(call: Call) -> tuple[float, float] | None:
    """Return `(a, b)` if a call computes `a * x + b` with constants. Otherwise, return None."""
    if type(call.layer) is layers.Rescaling:
        scale, offset = read_scalar(call.layer.scale), read_scalar(call.layer.offset)
        return (scale, offset) if scale and offset is not None else None
    kind, terms = simplify_operation(call)
    constants = [read_scalar(term) for term in terms if not isinstance(term, Value)]
    if len(call.inputs) != 1 or len(constants) != 1 or constants[0] is None:
        return None
    if kind == "multiply":
        return (constants[0], 0.0) if constants[0] else None
    # The constant of a difference comes first here: x - 1 is a sum.
    return {"add": (1.0, constants[0]), "subtract": (-1.0, constants[0])}.get(kind)
