"""Recognizes masked scores: `tf.where(mask, scores, -1e9)` and `scores + mask * -1e9`.

In 8 bits -1e9 leaves nothing of the scores: it would make their scale 4e6. If all consumers ignore
masked scores, as a softmax does, both become `MaskScores`, which takes the lowest quantized value
instead. `masked_score_limits.py` knows the consumers. 1e9 before a minimum is handled likewise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, flatten_values
from keras_qat.graph.operations import MOVES, get_kind, read_array
from keras_qat.graph.sizes import find_example
from keras_qat.helper_layers.operations import MaskScores
from keras_qat.keras2.backend import layers
from keras_qat.lowering.builder import LoweringContext, calls_behind, replace_by
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
    replace_calls,
    tensor,
)
from keras_qat.lowering.read_operations import read_operation

HIDES = -1e3
"""Scores to which this number or a lower one is added, or which it replaces, are masked."""

CONSTANT_HIDES = -1e2
"""The same for constant masks, whose other values are known: they have to be a tenth at most."""

COPIES = ("tile", "broadcast_to", "cast")


class _Mask(NamedTuple):
    """A mask of scores: a tensor, a constant, or both."""

    scores: Value
    side: int
    """1 if masked scores lie far below the others, -1 if far above."""
    tensor: Value | None = None
    is_hiding: bool = True
    """Whether the tensor is not 0 where scores are masked."""
    visible: np.ndarray | None = None
    """Where the constant masks no scores."""
    before: tuple[Call, ...] = ()
    """Calls that compute the scores, if more is added to them, or give the mask their axes."""


_where, _cast = operation("where"), operation("cast")
_SCORES, _BIAS, _MASKED = tensor("scores"), tensor("bias"), tensor("masked")
_FAR = any_of(between(-math.inf, HIDES, "far"), between(-HIDES, math.inf, "far"))


_move = operation("cast", *MOVES)


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
"""0 for visible scores, far from 0 for masked ones."""


def recognize_masks(graph: Graph, context: LoweringContext) -> Graph:
    """Replaces masked scores by `MaskScores` if all their consumers ignore them."""
    matcher, masks = Matcher(), dict[Call, _Mask]()
    for call in graph.calls:
        found = (read(match, masks) for p, read in PATTERNS for match in matcher.find(p, call))
        if mask := next(filter(None, found), None):
            masks[call] = mask
    masked = {call: (mask.scores, mask.side) for call, mask in masks.items()}
    readers, replaced = graph.consumers(), dict[Call, list[Call]]()
    for call, mask in masks.items():
        limits = ScoreLimits(readers, graph.outputs, masked, mask.tensor, mask.is_hiding)
        distance = limits.distance(call.output, mask.side)
        if distance is None:
            continue
        options = {
            **{"causal": mask.visible, "hidden": mask.is_hiding, "above": mask.side < 0},
            **{"below": distance.beyond, "limit": distance.limit},
        }
        inputs = [mask.scores] if mask.tensor is None else [mask.scores, mask.tensor]
        suffix = "_mask" if any(part.name == call.name for part in mask.before) else ""
        new = context.pattern(call, MaskScores, inputs, suffix, **options)
        replaced[call] = [*(part.as_part_of(call) for part in mask.before), new]
    return replace_calls(graph, replaced)


def _read_choice(match: Match, _: Any) -> _Mask | None:
    """Reads `tf.where(mask, scores, -1e9)`."""
    found = match.found
    is_hiding = "hiding" in found
    scores, mask = found["scores"], found["hiding" if is_hiding else "mask"]
    side = 1 if found["far"] < 0 else -1
    if isinstance(mask, Value):
        has_axes = len(mask.shape) == len(scores.shape)
        return _Mask(scores, side, mask, is_hiding) if has_axes else None
    known = tf.get_static_value(mask) if tf.is_tensor(mask) else mask
    return _make_constant(scores, side, np.asarray(known, bool) != is_hiding)


def _read_added(match: Match, _: Any = None) -> _Mask | None:
    """Reads `scores + mask * -1e9` and `scores + tf.where(mask, 0.0, -1e9)`."""
    found = match.found
    is_reversed = ("difference" in found) != ("negative" in found)
    side = 1 if (found["far"] < 0) != is_reversed else -1
    mask: Value = next(found[name] for name in ("negative", "hiding", "mask") if name in found)
    steps, value, moves = list[Call](), found["moved"], list[Call]()
    while value is not found["added"]:
        steps.append(value.producer)
        value = value.producer.inputs[0]
    for call in (step for step in reversed(steps) if get_kind(step) != "cast"):
        source = call.inputs[0]
        if mask.shape != source.shape or len(call.inputs) > 1:
            return None  # What is broadcast after the mask has other axes.
        moved = Value(f"{call.output.name}_mask", call.output.shape, mask.dtype)
        moves.append(_copy_call(call, _swap(source, mask), moved))
        mask = moved
    if not value.is_float or len(mask.shape) != len(found["scores"].shape):
        return None
    return _Mask(found["scores"], side, mask, "mask" not in found, before=tuple(moves))


def _read_constant(match: Match, _: Any = None) -> _Mask | None:
    """Reads `scores + constant`, whose other values may be a bias, such as distances."""
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
    return _add_first(mask, total, lambda arg: arg if arg is scores else rest)


def _read_beside(match: Match, _: Any) -> _Mask | None:
    """Reads `scores + (bias + mask * -1e9)`, as T5 adds its mask to relative positions.

    The bias may be another mask, of later steps, as in BART and OPT.
    """
    found, total = match.found, match.call
    scores, summed, bias = found["scores"], found["summed"], found["bias"]
    mask = _read_added(match) if "added" in found else _read_alone(match, found["constant"])
    constant = _find_constant(bias)
    if isinstance(bias, Value) and not bias.is_float:
        return None
    if mask is None or (constant is not None and not constant.any()):
        return mask
    other = None if constant is None else _read_alone(match, constant)
    if other and mask.visible is None:
        return mask._replace(visible=other.visible)
    bias = bias if constant is None else constant
    shape = tf.broadcast_static_shape(tf.TensorShape(scores.shape), tf.TensorShape(bias.shape))
    return _add_first(mask, total, _swap(summed, bias), tuple(shape))


def _read_alone(match: Match, constant: Any) -> _Mask | None:
    """Reads a constant mask that adds 0 to visible scores."""
    mask = _read_constant(match._replace(found={**match.found, "constant": constant}))
    return None if mask is None or mask.before else mask


def _read_later(match: Match, masks: Mapping[Call, _Mask]) -> _Mask | None:
    """Reads `tf.where(mask, scores, -1e9) + bias`: the bias may as well be added first."""
    masked, total = match.found["masked"], match.call
    mask = masks.get(masked.producer)
    if mask is None or mask.before or masked.shape != total.output.shape:
        return None
    if masked.producer in calls_behind(match.found["bias"]):
        return None
    return _add_first(mask, total, _swap(masked, mask.scores))


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


def _drop_choice(match: Match, context: LoweringContext) -> list[Call]:
    """Replaces `tf.where(mask, x, NaN)` by x, because integers hold no NaN."""
    x = match.found["x"]
    if not math.isnan(match.found["end"]) or x.shape != match.call.output.shape:
        return []
    return replace_by(match.call, context, layers.Activation, "linear", inputs=x)


MISSING_VALUES = Rule(
    any_of(
        _where(argument("mask"), tensor("x"), constant("end")),
        _where(argument("mask"), constant("end"), tensor("x")),
    ),
    _drop_choice,
)


def _add_first(mask: _Mask, total: Call, replace: Callable[[Any], Any], shape: Any = None) -> _Mask:
    """Returns the mask of a sum with other terms, which is computed before scores are masked."""
    shape = total.output.shape if shape is None else shape
    unmasked = Value(f"{total.output.name}_unmasked", shape, total.output.dtype)
    before = *mask.before, _copy_call(total, replace, unmasked)
    return mask._replace(scores=unmasked, before=before)


def _swap(old: Any, new: Any) -> Callable[[Any], Any]:
    return lambda argument: new if argument is old else argument


def _copy_call(call: Call, replace: Callable[[Any], Any], output: Value) -> Call:
    """Returns the same call with other arguments and another output."""

    def visit(arg: Any) -> Any:
        if isinstance(arg, list) and flatten_values(arg):  # layers.Add([x, y])
            return [replace(item) for item in arg]
        return arg if arg is None or isinstance(arg, str) else replace(arg)

    kwargs = {name: visit(arg) for name, arg in call.kwargs.items()}
    return Call(call.layer, tuple(map(visit, call.args)), kwargs, output, call.name)


COPIES = ("tile", "broadcast_to", "cast")


def _find_constant(term: Any) -> np.ndarray | None:
    """Returns a constant, also one that is copied for each example; None for other tensors."""
    if not isinstance(term, Value):
        return read_array(term)
    is_copy = term.producer is not None and term.shape and get_kind(term.producer) in COPIES
    example = find_example(term) if is_copy else None
    return None if example is None else example[np.newaxis]


def has_constant_mask(call: Call) -> bool:
    """Returns whether a call adds a constant that masks scores."""
    kind, operands = read_operation(call)
    constants = map(read_array, operands) if kind in ("add", "subtract") else ()
    visible = (_find_visible(sign * c) for c in constants if c is not None for sign in (1, -1))
    return any(v is not None for v in visible)


def _find_visible(term: np.ndarray) -> np.ndarray | None:
    """Returns where a constant masks nothing; None if it is no mask."""
    is_masked = term <= CONSTANT_HIDES
    if not is_masked.any() or is_masked.all():
        return None
    is_mask = np.abs(term[~is_masked]).max() <= -term[is_masked].max() / 10
    return ~is_masked if is_mask else None


def _make_constant(scores: Value, side: int, visible: np.ndarray) -> _Mask | None:
    """Returns a constant mask; None if it is not one for all examples, with the scores' axes."""
    visible = np.atleast_2d(visible)
    while visible.ndim > 2 and visible.shape[0] == 1:
        visible = visible[0]
    sizes = scores.shape[1:][-visible.ndim :]
    if len(sizes) != visible.ndim:
        return None
    is_fit = all(size in (1, known) for size, known in zip(visible.shape, sizes, strict=True))
    return _Mask(scores, side, visible=visible) if is_fit else None
