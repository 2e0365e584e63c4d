"""The largest values along the last axis, and where they are."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Call
from keras_qat.graph.operations import get_argument
from keras_qat.ops.emission import Emission
from keras_qat.ops.movement import make_movement, read_integers
from keras_qat.ops.op import Arguments, Attributes


def _attributes(call: Call) -> Attributes:
    count = get_argument(call, "k")
    known = read_integers(1 if count is None else count)
    return {"count": known[0] if known else None}


def _largest(a: Arguments) -> tuple[Any, Any]:
    """Returns the largest values and their indices; of equal values the lower index comes first."""
    return tuple(tf.math.top_k(a.q[0], a.attributes["count"]))


def _emit(e: Emission) -> None:
    e.add("TOPK_V2", [e.source, e.constant("count", e.attributes["count"])])


TOP_K = make_movement(
    "top_k",
    "the largest values along the last axis, in order, and where they are",
    _emit,
    compute=_largest,
    kinds=("top_k",),
    attributes=_attributes,
    needs=("count",),
    integers=(),
)
