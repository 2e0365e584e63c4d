"""Recognizes masks that hide numbers behind large negative ones, in front of what ignores them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, map_values, split_loss_only, values_in
from keras_qat.graph.operations import MOVES, is_operation, kind_of
from keras_qat.graph.size_expressions import example_of
from keras_qat.graph.tf_operations import array, operands
from keras_qat.helper_layers.operations import MaskScores
from keras_qat.keras2.backend import keras
from keras_qat.lowering.builder import LoweringContext, calls_behind, replace_by
from keras_qat.lowering.hidden_numbers import HiddenNumbers, line, terms_of

HIDES = -1e3
"""Scores to which this number or a lower one is added, or which it replaces, count as hidden."""

CONSTANT_HIDES = -1e2
"""The same of constants, whose other numbers are known: they have to be a tenth at most."""

COPIES = ("tile", "broadcast_to", "cast")


class _Mask(NamedTuple):
    """A mask of scores: a tensor, or a constant."""

    scores: Value
    tensor: Value | None
    hidden: bool = True
    """Whether the tensor is not 0 where scores are hidden."""
    visible: np.ndarray | None = None
    """What a constant mask leaves to see."""
    constants: tuple[Call, ...] = ()
    """Calls that compute the large numbers and are not needed any more, unless others read them."""
    sum: Call | None = None
    """A sum of the scores and of what is added beside the mask, such as distances."""
    moves: tuple[Call, ...] = ()
    """Calls that give the tensor the axes of the scores."""


def recognize_masks(graph: Graph, context: LoweringContext) -> Graph:
    """Replaces softmax(scores + mask * -1e9) and softmax(tf.where(mask, scores, -1e9)).

    They become a softmax of `MaskScores`, and so does whatever ignores hidden numbers, as maxima
    do, and minima of what 1e9 is added to. The masked scores would have a scale of 4e6 in 8 bits,
    which leaves nothing of the scores.
    """
    replaced: dict[Call, list[Call]] = {}
    constants: set[Call] = set()
    masks: dict[Call, tuple[_Mask, int]] = {}
    for call in graph.calls:
        if without_nan := _without_nan(call, context):
            replaced[call], unused = without_nan
            constants.update(unused)
        for side in (1, -1):
            mask = _match_where(call, side) or _match_sum(call, side)
            if mask := mask or _match_added_later(call, side):
                masks[call] = mask, side
    hidden = {call: (mask.scores, side) for call, (mask, side) in masks.items()}
    readers = graph.consumers()
    for call, (mask, side) in masks.items():
        numbers = HiddenNumbers(readers, graph.outputs, hidden, mask.tensor, mask.hidden)
        distance = numbers.distance(call.output, side)
        if distance is None:
            continue
        options = {
            **{"causal": mask.visible, "hidden": mask.hidden, "above": side < 0},
            **{"below": distance.beyond, "limit": distance.limit},
        }
        inputs = [mask.scores] if mask.tensor is None else [mask.scores, mask.tensor]
        suffix = "" if mask.sum is None else "_mask"
        new = context.pattern(call, MaskScores, inputs, suffix, **options)
        before = [*mask.moves, *([mask.sum] if mask.sum else [])]
        replaced[call] = [*(part.as_part_of(call) for part in before), new]
        constants.update(mask.constants)
    if not replaced:
        return graph
    calls = [part for call in graph.calls for part in replaced.get(call, [call])]
    read = [graph.outputs, *(call.inputs for call in graph.loss_only)]
    dropped = constants.intersection(split_loss_only(calls, read)[1])
    return dataclasses.replace(graph, calls=[call for call in calls if call not in dropped])


def _without_nan(call: Call, context: LoweringContext) -> tuple[list[Call], list[Call]] | None:
    """Replaces tf.where(mask, x, NaN) by x, as integers hold no NaN; returns what fills it, too."""
    if kind_of(call) != "where":
        return None
    first, second = operands(call, "x", "y")
    for x, other in ((first, second), (second, first)):
        constants: list[Call] = []
        value = _constant(other, constants)
        is_whole = isinstance(x, Value) and x.shape == call.output.shape
        if is_whole and value is not None and math.isnan(value):
            return replace_by(call, context, keras.layers.Activation, "linear", inputs=x), constants
    return None


def _match_sum(total: Call, side: int) -> _Mask | None:
    """Recognizes scores + mask * -1e9, with the mask a tensor or a constant; 1e9 if side is -1."""
    is_layer = type(total.layer) is keras.layers.Add
    kind, terms = "add" if is_layer else kind_of(total), terms_of(total)
    if kind not in ("add", "subtract"):
        return None
    sign = -side if kind == "subtract" else side
    for scores, term in (terms, terms[::-1]) if len(terms) == 2 else ():
        term = _same_for_all(term)
        if not isinstance(scores, Value) or (kind == "subtract" and scores is not terms[0]):
            continue
        if not isinstance(term, Value):
            visible = _visible(sign * term)
            if visible is None or not _fits(visible, scores):
                continue
            rest = np.where(visible, term, 0.0).astype(np.float32)
            added = _with_constant(total, rest) if rest.any() else None
            masked = scores if added is None else added.output
            return _Mask(masked, None, visible=_without_batch(visible), sum=added)
        if mask := _as_mask(scores, term, sign):
            return mask
        if beside := _match_beside(total, scores, term, sign):
            return beside
    return None


def _match_beside(total: Call, scores: Value, term: Value, sign: int) -> _Mask | None:
    """Recognizes scores + (bias + mask * -1e9), as T5 adds its mask to relative positions.

    The bias may be another mask, of what comes later, as BART and OPT have it.
    """
    casts, added = list[Call](), term.producer
    while added and kind_of(added) == "cast" and added.inputs[0].is_float:
        casts.append(added)
        term = added.inputs[0]
        added = term.producer
    terms = terms_of(added) if added is not None and kind_of(added) == "add" else []
    for bias, mask in (terms, terms[::-1]) if added is not None and len(terms) == 2 else ():
        hiding = _as_mask(scores, mask, sign)
        if hiding is None or added is None:
            continue
        constants, bias = (*hiding.constants, added, *casts), _same_for_all(bias)
        if not isinstance(bias, Value) and not bias.any():
            return hiding._replace(constants=constants)
        other = None if isinstance(bias, Value) else _as_mask(scores, bias, sign)
        if other and hiding.visible is None:
            return hiding._replace(visible=other.visible, constants=constants)
        shape = tf.broadcast_static_shape(tf.TensorShape(scores.shape), tf.TensorShape(bias.shape))
        output = Value(f"{total.output.name}_unmasked", tuple(shape), total.output.dtype)
        summed = casts[0].output if casts else term
        values = {value: bias if value is summed else value for value in total.inputs}
        args, kwargs = map_values(values.__getitem__, (total.args, total.kwargs))
        rest = Call(total.layer, args, kwargs, output, total.name)
        return hiding._replace(scores=output, constants=constants, sum=rest)
    return None


def _match_added_later(total: Call, side: int) -> _Mask | None:
    """Recognizes tf.where(mask, scores, -1e9) + bias: the bias may as well be added first."""
    terms = terms_of(total) if kind_of(total) in ("add", "subtract") else []
    for hidden, bias in (terms, terms[::-1]) if len(terms) == 2 else ():
        choice = hidden.producer if isinstance(hidden, Value) else None
        is_second = hidden is not terms[0] and kind_of(total) == "subtract"
        if choice is None or is_second or not isinstance(bias, Value):
            continue
        mask = _match_where(choice, side) or _match_sum(choice, side)
        if mask is None or mask.sum or mask.moves or hidden.shape != total.output.shape:
            continue
        if choice in calls_behind(bias):
            continue
        output = Value(f"{total.output.name}_unmasked", total.output.shape, total.output.dtype)
        values = {value: mask.scores if value is hidden else value for value in total.inputs}
        args, kwargs = map_values(values.__getitem__, (total.args, total.kwargs))
        added = Call(total.layer, args, kwargs, output, total.name)
        constants = (*mask.constants, choice)
        return mask._replace(scores=output, sum=added, constants=constants)
    return None


def _same_for_all(term: Any) -> Any:
    """Returns the constant that a tensor holds for each example, as copies do; or the tensor."""
    call = term.producer if isinstance(term, Value) else None
    if call is None or not term.shape or kind_of(call) not in COPIES:
        return term
    example = example_of(term)
    return term if example is None else example[np.newaxis]


def _as_mask(scores: Value, term: Any, sign: int) -> _Mask | None:
    """Recognizes a mask with the axes of the scores that adds nothing where it hides nothing."""
    if isinstance(term, Value):
        mask = _match_added(scores, term, sign)
        has_axes = mask and mask.tensor and len(mask.tensor.shape) == len(scores.shape)
        return mask if has_axes else None
    visible = _visible(sign * term)
    if visible is None or term[visible].any() or not _fits(visible, scores):
        return None
    return _Mask(scores, None, visible=_without_batch(visible))


def _match_added(scores: Value, term: Value, sign: int) -> _Mask | None:
    """Recognizes mask * -1e9 and tf.where(mask, 0.0, -1e9), and the same with other axes."""
    call = term.producer
    if call is None or not is_operation(call.layer):
        return None
    kind = kind_of(call)
    if kind == "cast" and call.inputs[0].is_float:
        mask = _match_added(scores, call.inputs[0], sign)
        return mask and mask._replace(constants=(*mask.constants, call))
    if kind in MOVES and len(call.inputs) == len(values_in(call.outputs)) == 1:
        (source,) = call.inputs
        inner = _match_added(scores, source, sign)
        # What broadcasts behind the mask has other axes than it.
        if inner is None or inner.tensor is None or inner.tensor.shape != source.shape:
            return None
        tensors = {source: inner.tensor}
        args, kwargs = map_values(tensors.__getitem__, (call.args, call.kwargs))
        moved = Value(f"{term.name}_mask", term.shape, inner.tensor.dtype)
        move = Call(call.layer, args, kwargs, moved, call.name)
        constants = (*inner.constants, call)
        return inner._replace(tensor=moved, constants=constants, moves=(*inner.moves, move))
    if kind == "where":
        mask, *values = operands(call, "condition", "x", "y")
        calls = [call]
        added = [sign * value for x in values if (value := _constant(x, calls)) is not None]
        is_mask = len(added) == 2 and min(added) <= HIDES and max(added) == 0.0
        if not (isinstance(mask, Value) and is_mask):
            return None
        return _Mask(scores, mask, added[0] < 0.0, constants=tuple(calls))
    factor, offset = line(call) or (0.0, 0.0)
    if not offset and sign * factor * _sign(call.inputs[0]) <= HIDES:
        return _Mask(scores, call.inputs[0], constants=(call,))
    return None


def _sign(mask: Value) -> int:
    """Returns -1 for masks that are 0 or negative: mask - 1."""
    call = mask.producer
    while call and kind_of(call) in (*MOVES, "cast"):
        call = call.inputs[0].producer
    factor, offset = (call and line(call)) or (1.0, 0.0)
    return -1 if factor > 0 and offset == -factor else 1


def _match_where(choice: Call, side: int) -> _Mask | None:
    """Recognizes tf.where(mask, scores, -1e9), or with 1e9, also with the last two exchanged."""
    if kind_of(choice) != "where":
        return None
    mask, first, second = operands(choice, "condition", "x", "y")
    for scores, other, hidden in ((first, second, False), (second, first, True)):
        constants: list[Call] = []
        value = _constant(other, constants)
        if not isinstance(scores, Value) or value is None or side * value > HIDES:
            continue
        if isinstance(mask, Value):
            same_axes = len(mask.shape) == len(scores.shape)
            return _Mask(scores, mask, hidden, None, tuple(constants)) if same_axes else None
        known = tf.get_static_value(mask) if tf.is_tensor(mask) else mask
        visible = np.asarray(known, bool) != hidden
        if _fits(visible, scores):
            visible = _without_batch(visible)
            return _Mask(scores, None, visible=visible, constants=tuple(constants))
    return None


def _constant(operand: Any, calls: list[Call]) -> float | None:
    """Returns the one number that an operand holds everywhere; None if it is not known.

    Notes the calls that fill a tensor with it: `tf.fill`, `tf.broadcast_to(number, shape)`,
    `tf.ones_like(x) * number`.
    """
    if not isinstance(operand, Value):
        values = array(operand)
        if values is None or not values.size or np.ptp(values) > 0:
            return None
        return float(values.flat[0])
    call = operand.producer
    if call is None or not is_operation(call.layer):
        return None
    calls.append(call)
    if kind_of(call) == "multiply":
        first, second = operands(call, "x", "y")
        factor = _constant(first, calls)
        other = None if factor is None else _constant(second, calls)
        return None if factor is None or other is None else factor * other
    if kind_of(call) in ("zeros_like", "ones_like"):
        return float(kind_of(call) == "ones_like")
    if kind_of(call) == "fill":
        size, value = operands(call, "dims", "value")
    elif kind_of(call) in ("broadcast_to", "tile"):
        value, size = operands(call, "input", "shape" if "to" in kind_of(call) else "multiples")
    elif kind_of(call) in ("cast", "identity"):
        (value, *_), size = call.inputs, None
    else:
        return None
    calls += [read.producer for read in values_in(size) if read.producer is not None]  # tf.shape
    return _constant(value, calls)


def hides(call: Call) -> bool:
    """Returns whether a call adds a constant that is a mask of scores."""
    is_sum = kind_of(call) in ("add", "subtract")
    arrays = [term for term in terms_of(call) if not isinstance(term, Value)] if is_sum else []
    return any(_visible(term) is not None or _visible(-term) is not None for term in arrays)


def _visible(term: np.ndarray) -> np.ndarray | None:
    """Returns where a constant hides nothing; None if it is no mask."""
    hidden = term <= CONSTANT_HIDES
    if not hidden.any() or hidden.all():
        return None
    is_mask = np.abs(term[~hidden]).max() <= -term[hidden].max() / 10
    return ~hidden if is_mask else None


def _fits(visible: np.ndarray, scores: Value) -> bool:
    """Returns whether a constant mask is one for all examples, and has the axes of the scores."""
    sizes = _without_batch(visible).shape
    there = scores.shape[1:][-len(sizes) :]
    return len(there) == len(sizes) and all(
        size in (1, known) for size, known in zip(sizes, there, strict=True)
    )


def _without_batch(visible: np.ndarray) -> np.ndarray:
    """Drops leading axes of one element; two axes stay."""
    visible = np.atleast_2d(visible)
    while visible.ndim > 2 and visible.shape[0] == 1:
        visible = visible[0]
    return visible


def _with_constant(total: Call, constant: np.ndarray) -> Call:
    """Returns a sum of a tensor and a constant with another constant."""
    args = [arg if isinstance(arg, Value) else constant for arg in total.args]
    kwargs = {
        name: arg if isinstance(arg, Value) or name == "name" else constant
        for name, arg in total.kwargs.items()
    }
    output = total.output
    added = Value(f"{output.name}_unmasked", output.shape, output.dtype)
    return Call(total.layer, tuple(args), kwargs, added, total.name)
