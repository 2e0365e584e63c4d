"""Attention scores with masks: masked scores get the lowest value, so their weight is 0.

Where they are hidden from minima, they get the highest value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.helper_layers.operations import MaskScores
from keras_qat.ops.emission import Emission
from keras_qat.ops.op import Arguments, Op
from keras_qat.ops.requantize import Multiplier, prepare_requantization, requantize


def _prepare(a: Arguments) -> tuple[Multiplier, Any]:
    """Prepares the conversion of scores to the output's range, and the end of that range."""
    prepared = prepare_requantization(a.family, a.params[0], a.output)
    return prepared, tf.cast(_end(a.output, a.attributes) - a.output.zero_point, a.q[0].dtype)


def _end(params: QuantParams, attributes: Any) -> int:
    """Returns the quantized value of masked scores."""
    return params.highest if attributes["above"] else params.lowest


def _compute(a: Arguments) -> Any:
    """Requantizes the scores to the output's range, and gives masked ones its lowest value."""
    (scores, *masks), (prepared, end) = a.q, a.prepared
    result = requantize(scores, prepared)
    for mask in a.call.layer.masks(result, masks):
        result = tf.where(mask, result, end)
    return result


def _emit(e: Emission) -> None:
    (target,), shape, params = e.outputs, e.shape(e.outputs[0]), e.params
    masks = [_mask(e, index, len(shape)) for index in range(1, len(e.inputs))]
    causal, hidden = e.attributes["causal"], e.attributes["hidden"]
    if causal is not None:
        causal = ~causal if hidden else causal
        masks.append(
            e.constant("causal", causal.reshape((1,) * (len(shape) - causal.ndim) + causal.shape))
        )
    end = _end(params, e.attributes)
    lowest = e.constant("lowest", np.array([end], params.dtype), params)
    result = e.temporary("scores", shape, target)
    e.builder.quantize(e.inputs[0], result)
    for index, mask in enumerate(masks, 1):
        masked = target if index == len(masks) else e.temporary(f"masked_{index}", shape, target)
        e.add("SELECT_V2", [mask, *((lowest, result) if hidden else (result, lowest))], [masked])
        result = masked


def _mask(e: Emission, index: int, rank: int) -> int:
    """Returns an input as a bool mask with `rank` axes, True where the input is not 0."""
    mask, params = e.inputs[index], e.node.inputs[index].params
    sizes, dtype = e.shape(mask), e.dtype(mask)
    if dtype != "bool":
        zero = np.array([0 if params is None else params.zero_point], dtype)
        nonzero = e.temporary(f"mask_{index}", sizes, "bool")
        e.add("NOT_EQUAL", [mask, e.constant(f"zero_{index}", zero, params)], [nonzero])
        mask = nonzero
    if len(sizes) == rank:
        return mask
    target = e.temporary(
        f"broadcast_{index}", (*sizes[:-2], *(1,) * (rank - len(sizes)), *sizes[-2:]), "bool"
    )
    e.reshape(mask, target)
    return target


MASK_SCORES = Op(
    "mask_scores",
    _compute,
    _emit,
    prepare=_prepare,
    doc="scores of attention, the lowest value, or the highest, where a mask hides them",
    layers=(MaskScores,),
    attributes=lambda call: {
        name: getattr(call.layer, name) for name in ("causal", "hidden", "above")
    },
    has_mark=True,
    max_axes=5,
    integers=(),
)
