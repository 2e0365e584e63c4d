"""Scores of attention with masks: what is masked gets so low a score that its weight is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.frontend.helper_layers import MaskScores
from keras_qat.ops.emission import Emission
from keras_qat.ops.op import Arguments, Op
from keras_qat.ops.requantize import requantized

__all__ = ["MASK_SCORES"]


def _compute(a: Arguments) -> Any:
    """The scores in the range that has room for what is masked, which gets its lowest value."""
    scores, *masks = a.q
    result = requantized(a.family, scores, a.params[0], a.output)
    lowest = tf.cast(a.output.lowest - a.output.zero_point, result.dtype)
    for mask in a.call.layer.masks(result, masks):
        result = tf.where(mask, result, lowest)
    return result


def _emit(e: Emission) -> None:
    (target,), shape = e.outputs, e.shape(e.outputs[0])
    params = e.node.output.params
    assert params is not None
    masks = [_mask(e, place, len(shape)) for place in range(1, len(e.inputs))]
    causal, hidden = e.attributes["causal"], e.attributes["hidden"]
    if causal is not None:
        causal = ~causal if hidden else causal
        masks.append(e.constant("causal", causal.reshape((1,) * (len(shape) - 2) + causal.shape)))
    lowest = e.constant("lowest", np.array([params.lowest], params.dtype), params)
    result = e.temporary("scores", shape, target)
    e.add("QUANTIZE", e.inputs[:1], [result])
    for place, mask in enumerate(masks, 1):
        masked = target if place == len(masks) else e.temporary(f"masked_{place}", shape, target)
        e.add("SELECT_V2", [mask, *((lowest, result) if hidden else (result, lowest))], [masked])
        result = masked


def _mask(e: Emission, place: int, axes: int) -> int:
    """An input as a mask of that many axes: where it is not 0, if it is not bool."""
    mask, params = e.inputs[place], e.node.inputs[place].params
    sizes, dtype = e.shape(mask), e.dtype(mask)
    if dtype != "bool":
        zero = np.array([0 if params is None else params.zero_point], dtype)
        found = e.temporary(f"mask_{place}", sizes, "bool")
        e.add("NOT_EQUAL", [mask, e.constant(f"zero_{place}", zero, params)], [found])
        mask = found
    if len(sizes) == axes:
        return mask
    target = e.temporary(
        f"broadcast_{place}", (*sizes[:-2], *(1,) * (axes - len(sizes)), *sizes[-2:]), "bool"
    )
    e.reshape(mask, target)
    return target


MASK_SCORES = Op(
    "mask_scores",
    _compute,
    _emit,
    doc="scores of attention, the lowest value where a mask hides them",
    layers=(MaskScores,),
    attributes=lambda call: {"causal": call.layer.causal, "hidden": call.layer.hidden},
    max_axes=5,
    integers=(),
)
