"""Recognizes masked scores: `tf.where(mask, scores, -1e9)` and `scores + mask * -1e9`.

A range down to -1e9 would have a scale of 4e6, so 8 bits would lose all scores. A softmax ignores
masked scores. If all calls that read the scores do so, the operations become `MaskScores`. It
returns the lowest quantized value instead of -1e9. Scores of 1e9 before a minimum are replaced too.

Scores that are not masked are called visible. `PATTERNS` lists operations that mask scores.
`masked_score_limits.py` computes how low masked scores must be. `mask_tensors.py` handles Keras
masks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from keras_qat.graph.calls import Call, Graph, Value, flatten_values
from keras_qat.graph.operations import MOVES, get_kind, is_operation, read_array
from keras_qat.graph.sizes import find_example
from keras_qat.helper_layers.operations import MaskScores
from keras_qat.lowering.builder import LoweringContext, find_calls_before, replace_calls
from keras_qat.lowering.expand_call import make_symbol, require, trace_in_place
from keras_qat.lowering.masked_score_limits import ScoreLimits
from keras_qat.lowering.patterns import (
    Match,
    Matcher,
    Pattern,
    Rule,
    any_of,
    argument,
    between,
    constant,
    operation,
    repeated,
    tensor,
)
from keras_qat.lowering.read_operations import HIDES, read_operation

CONSTANT_HIDES = -1e2
"""If a constant is added to scores, entries of -100 or less mask a score."""

COPIES = ("tile", "broadcast_to", "cast")


@dataclasses.dataclass(frozen=True)
class _Mask:
    """Scores and their mask: a tensor, a constant, or both."""

    scores: Value
    side: int
    """1 if masked scores are far below all others, -1 if far above."""
    tensor: Value | None = None
    is_hiding: bool = True
    """Whether nonzero entries of `tensor` mask scores. If False, zeros mask scores."""
    visible: NDArray[np.bool_] | None = None
    """A constant array that is False for masked scores."""
    sum: Call | None = None
    """The call that adds a bias to the scores, as in `scores + (bias + mask * -1e9)`, or None."""
    replace: Callable[[Any], Any] = lambda term: term
    """A function that removes the mask from an operand of `sum`. For example, it returns `bias`."""
    moves: tuple[Call, ...] = ()
    """Operations that reshape or transpose `tensor` to the axes of the scores."""

    def compute(self, beyond: float, limit: float | None) -> tf.Tensor:
        """Call `MaskScores`. `beyond` and `limit` are the fields of a `Distance`."""
        scores = make_symbol(self.scores)
        if self.sum is not None:
            name = {"name": "unmasked"} if is_operation(self.sum.layer) else {}
            scores = _compute_with(self.sum, self.replace, **name)
        inputs = [scores]
        if self.tensor is not None:
            mask = make_symbol(self.tensor)
            for call in self.moves:
                mask = _compute_with(call, _swap(call.inputs[0], mask))
            inputs.append(mask)
        is_above = self.side < 0
        return MaskScores(self.visible, self.is_hiding, beyond, limit, is_above, name="mask")(
            inputs
        )


def recognize_masks(graph: Graph, context: LoweringContext) -> Graph:
    """Replace masked scores by `MaskScores` if all calls that read them ignore masked scores."""
    matcher, masks = Matcher(), dict[Call, _Mask]()
    for call in graph.calls:
        found = (read(match, masks) for p, read in PATTERNS for match in matcher.find(p, call))
        if mask := next(filter(None, found), None):
            masks[call] = mask
    scores = {call: (mask.scores, mask.side) for call, mask in masks.items() if not mask.sum}
    readers, replaced = graph.consumers(), dict[Call, list[Call]]()
    for call, mask in masks.items():
        tensor = None if mask.moves else mask.tensor
        limits = ScoreLimits(readers, graph.outputs, scores, tensor, mask.is_hiding)
        if (distance := limits.find(call.output, mask.side)) is not None:
            parts = trace_in_place(call, partial(mask.compute, *distance), context)
            replaced[call] = [part.as_part_of(call) for part in parts] or [call]
    return replace_calls(graph, replaced)


_where, _cast, _move = operation("where"), operation("cast"), operation("cast", *MOVES)
_SCORES, _BIAS, _MASKED = tensor("scores"), tensor("bias"), tensor("masked")
_FAR = any_of(between(-math.inf, HIDES, "far"), between(-HIDES, math.inf, "far"))


def _sum(term: Pattern) -> Pattern:
    return any_of(_SCORES + term, (_SCORES - term).named("difference"))


_ADDED = repeated(
    _move,
    any_of(
        *(_where(tensor("mask"), 0.0, _FAR), _where(tensor("hiding"), _FAR, 0.0)),
        repeated(_move, tensor("") - 1.0).named("negative") * _FAR,
        tensor("hiding") * _FAR,
    ).named("added"),
).named("moved")
"""Matches a tensor that is 0 for visible scores, and far from 0 for masked scores."""


def _read_choice(match: Match, _: object) -> _Mask | None:
    """Read `tf.where(mask, scores, -1e9)`."""
    found = match.found
    is_hiding = "hiding" in found
    scores, mask = found["scores"], found["hiding" if is_hiding else "mask"]
    side = 1 if found["far"] < 0 else -1
    if isinstance(mask, Value):
        has_axes = len(mask.shape) == len(scores.shape)
        return _Mask(scores, side, mask, is_hiding) if has_axes else None
    known = tf.get_static_value(mask) if tf.is_tensor(mask) else mask
    return _make_constant(scores, side, np.asarray(known, bool) != is_hiding)


def _read_added(match: Match, _: object = None) -> _Mask | None:
    """Read `scores + mask * -1e9` and `scores + tf.where(mask, 0.0, -1e9)`."""
    found, scores = match.found, match.found["scores"]
    is_reversed = ("difference" in found) != ("negative" in found)
    side = 1 if (found["far"] < 0) != is_reversed else -1
    mask: Value = next(found[name] for name in ("negative", "hiding", "mask") if name in found)
    steps, value, shape = list[Call](), found["moved"], mask.shape
    while value is not found["added"]:
        steps.append(value.producer)
        value = value.producer.inputs[0]
    moves = tuple(step for step in reversed(steps) if get_kind(step) != "cast")
    for call in moves:
        if shape != call.inputs[0].shape or len(call.inputs) > 1:
            return None  # The sum is broadcast after masking, so the mask has other axes.
        shape = call.output.shape
    if not value.is_float or len(shape) != len(scores.shape):
        return None
    return _Mask(scores, side, mask, "mask" not in found, moves=moves)


def _read_constant(match: Match, _: object = None) -> _Mask | None:
    """Read `scores + constant`. Small values in the constant are a bias for visible scores."""
    scores, total = match.found["scores"], match.call
    constant, is_difference = _find_constant(match.found["constant"]), "difference" in match.found
    if constant is None:
        return None
    if get_kind(total) == "subtract" and not is_difference:  # Matched as `scores + -constant`.
        constant, is_difference = -constant, True
    added = -constant if is_difference else constant
    masks = ((side, _find_visible(side * added)) for side in (1, -1))
    side, visible = next((found for found in masks if found[1] is not None), (0, None))
    mask = None if visible is None else _make_constant(scores, side, visible)
    rest = constant if visible is None else np.where(visible, constant, 0.0).astype(np.float32)
    if mask is None or not rest.any():
        return mask
    return dataclasses.replace(mask, sum=total, replace=lambda x: x if x is scores else rest)


def _read_beside(match: Match, _: object) -> _Mask | None:
    """Read `scores + (bias + mask * -1e9)`. T5 has a bias that depends on relative positions.

    In BART and OPT, the bias is itself a mask, which hides later steps.
    """
    found = match.found
    bias = found["bias"]
    mask = _read_added(match) if "added" in found else _read_alone(match, found["constant"])
    constant = _find_constant(bias)
    if isinstance(bias, Value) and not bias.is_float:
        return None
    if mask is None or (constant is not None and not constant.any()):
        return mask
    other = None if constant is None else _read_alone(match, constant)
    if other and mask.visible is None:
        return dataclasses.replace(mask, visible=other.visible)
    replace = _swap(found["summed"], bias if constant is None else constant)
    return dataclasses.replace(mask, sum=match.call, replace=replace)


def _read_alone(match: Match, constant: Any) -> _Mask | None:
    """Read `scores + constant` if the constant only masks, without a bias."""
    mask = _read_constant(match._replace(found={**match.found, "constant": constant}))
    return None if mask is None or mask.sum else mask


def _read_later(match: Match, masks: Mapping[Call, _Mask]) -> _Mask | None:
    """Read `tf.where(mask, scores, -1e9) + bias`. The result masks `scores + bias`."""
    masked, total = match.found["masked"], match.call
    mask = masks.get(masked.producer)
    if mask is None or mask.sum or mask.moves or masked.shape != total.output.shape:
        return None
    if masked.producer in find_calls_before(match.found["bias"]):
        return None
    return dataclasses.replace(mask, sum=total, replace=_swap(masked, mask.scores))


PATTERNS: tuple[tuple[Pattern, Callable[[Match, Mapping[Call, _Mask]], _Mask | None]], ...] = (
    (
        any_of(_where(argument("mask"), _SCORES, _FAR), _where(argument("hiding"), _FAR, _SCORES)),
        _read_choice,
    ),
    (_sum(argument("constant")), _read_constant),
    (_sum(_ADDED), _read_added),
    (
        _sum(
            repeated(_cast, argument("bias") + any_of(_ADDED, argument("constant"))).named("summed")
        ),
        _read_beside,
    ),
    (any_of(_MASKED + _BIAS, _MASKED - _BIAS), _read_later),
)


def _drop_choice(x: tf.Tensor, end: float, mask: object) -> tf.Tensor:
    """Replace `tf.where(mask, x, NaN)` by `x`, because integers cannot be NaN."""
    require(math.isnan(end))
    return x


MISSING_VALUES = Rule(
    any_of(
        _where(argument("mask"), tensor("x"), constant("end")),
        _where(argument("mask"), constant("end"), tensor("x")),
    ),
    _drop_choice,
)


def _swap(old: Any, new: Any) -> Callable[[Any], Any]:
    return lambda term: new if term is old else term


def _compute_with(call: Call, replace: Callable[[Any], Any], **options: str) -> tf.Tensor:
    """Repeat a call with other arguments. `replace` returns the new argument for each old one."""

    def swap(argument: Any) -> Any:
        argument = replace(argument)
        return make_symbol(argument) if isinstance(argument, Value) else argument

    def visit(argument: Any) -> Any:
        if isinstance(argument, list) and flatten_values(argument):  # layers.Add([x, y])
            return list(map(swap, argument))
        return argument if argument is None or isinstance(argument, str) else swap(argument)

    function = call.layer.function if is_operation(call.layer) else call.layer
    kwargs = {name: visit(argument) for name, argument in call.kwargs.items()}
    return function(*map(visit, call.args), **{**kwargs, **options})


def _find_constant(term: Any) -> NDArray[np.floating] | None:
    """Return a constant, also if `tf.tile` copies it for each example. Return None for tensors."""
    if not isinstance(term, Value):
        return read_array(term)
    is_copy = term.producer is not None and term.shape and get_kind(term.producer) in COPIES
    example = find_example(term) if is_copy else None
    return None if example is None else example[np.newaxis]


def has_constant_mask(call: Call) -> bool:
    """Return whether a call adds a constant that masks scores."""
    kind, operands = read_operation(call)
    constants = map(read_array, operands) if kind in ("add", "subtract") else ()
    visible = (_find_visible(sign * c) for c in constants if c is not None for sign in (1, -1))
    return any(v is not None for v in visible)


def _find_visible(term: NDArray[np.floating]) -> NDArray[np.bool_] | None:
    """Return an array that is False where `term` masks scores. Return None if `term` is no mask."""
    is_masked: NDArray[np.bool_] = term <= CONSTANT_HIDES
    if not is_masked.any() or is_masked.all():
        return None
    is_mask = np.abs(term[~is_masked]).max() <= -term[is_masked].max() / 10
    return ~is_masked if is_mask else None


def _make_constant(scores: Value, side: int, visible: NDArray[np.bool_]) -> _Mask | None:
    """Return the mask of a constant array. Return None if the array differs between examples."""
    visible = np.atleast_2d(visible)
    while visible.ndim > 2 and visible.shape[0] == 1:
        visible = visible[0]
    sizes = scores.shape[1:][-visible.ndim :]
    if len(sizes) != visible.ndim:
        return None
    is_fit = all(size in (1, known) for size, known in zip(visible.shape, sizes, strict=True))
    return _Mask(scores, side, visible=visible) if is_fit else None
