"""A weight that other operators read, as a constant of the file."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.quant_params import QuantParams, round_half_away
from keras_qat.frontend.graph import Call
from keras_qat.frontend.helper_layers import WeightTensor
from keras_qat.ops.emission import Emission
from keras_qat.ops.op import Arguments, Attributes, Op


def _quantized(layer: WeightTensor, params: QuantParams) -> Any:
    """Returns a weight's values less the zero point, rounded half away, possibly out of range."""
    return round_half_away(tf.cast(layer.value(), tf.float64) / params.scale)


def _compute(a: Arguments) -> Any:
    return tf.cast(
        _quantized(a.call.layer, a.output), tf.float64 if a.output.bits == 16 else tf.float32
    )


def _emit(e: Emission) -> None:
    params = e.node.output.params
    assert params is not None
    values = np.asarray(_quantized(e.node.call.layer, params.as_tensors())) + params.zero_point
    values = np.clip(values, params.lowest, params.highest).astype(params.dtype)
    tensor = e.builder.graph.tensors[e.outputs[0]]
    tensor.buffer = e.builder.buffer(np.ascontiguousarray(values).reshape(-1).view(np.uint8))


def _accepts(call: Call, attributes: Attributes) -> str | None:
    return None if call.output.is_float else f"a weight of {call.output.dtype}"


WEIGHT_TENSOR = Op(
    "weight",
    _compute,
    _emit,
    doc="a weight that a custom layer computes with, or what it computes from weights alone",
    layers=(WeightTensor,),
    accepts=_accepts,
    reads_only_weights=True,
)
