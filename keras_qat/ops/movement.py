"""What operators that only move values have in common, and those that do not even move them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.frontend.graph import Call, Value
from keras_qat.frontend.helper_layers import Regularize, TrainingOnly
from keras_qat.frontend.keras2.backend import keras
from keras_qat.ops.emission import Emission
from keras_qat.ops.emit_by_converter import emit_by_converter
from keras_qat.ops.op import Arguments, Attributes, Emit, Op, SharedRange

_layers = keras.layers

Part = tuple[int | None, int | None, int]
"""Begin, end and step along an axis, None for its ends."""

MAX_SLICED = 5
"""Axes that kernels take parts of."""


def moved(a: Arguments) -> Any:
    """What the call's own layer makes of the values less their zero point: its zeros are zeros."""

    def in_type(given: Any) -> Any:
        return tf.cast(given, a.q[0].dtype) if given.dtype.is_floating else given

    return tf.nest.map_structure(in_type, a.on(a.q))


def symbol_of(call: Call) -> str:
    """TensorFlow's name of an operation, "" for a layer."""
    return str(getattr(call.layer, "symbol", ""))


def first(call: Call) -> Any:
    """The tensor that a call is about."""
    if call.args:
        return call.args[0]
    names = ("input", "input_", "input_tensor", "tensor", "a", "params", "value", "values")
    return next((call.kwargs[name] for name in names if name in call.kwargs), call.inputs[0])


def integers(given: Any) -> tuple[int, ...] | None:
    """An argument as whole numbers; None if it is not given, or not known before run time."""
    if given is None:
        return None
    leaves = tf.nest.flatten(given)
    known = [tf.get_static_value(each) if tf.is_tensor(each) else each for each in leaves]
    if any(each is None or isinstance(each, Value) for each in known):
        return None
    return tuple(int(each) for part in known for each in np.ravel(part))


def rank_of(call: Call) -> int:
    """How many axes the tensor has that a call is about; 1 if it is no single tensor."""
    return len(getattr(first(call), "shape", ())) or 1


def axes_of(given: Any, rank: int) -> tuple[int, ...] | None:
    """Axes among `rank`, all of them by default; None if they are not known."""
    if given is None:
        return tuple(range(rank))
    axes = integers(given)
    return None if axes is None else tuple(sorted({axis % rank for axis in axes}))


def move(name: str, doc: str, emit: Emit, **fields: Any) -> Op:
    """An operator that only moves values. It has a kernel if none of its attributes is None."""
    more: Callable[..., str | None] = fields.pop("accepts", lambda call, attributes: None)

    def accepts(call: Call, attributes: Attributes) -> str | None:
        if not isinstance(first(call), Value):
            return "not of one tensor"
        if any(each is None for each in attributes.values()):
            return "its options are not known before run time"
        return more(call, attributes)

    fields = {"compute": moved, "output": SharedRange(), **fields}
    return Op(name, emit=emit, doc=doc, accepts=accepts, **fields)


def take_parts(
    e: Emission, source: int, target: int, parts: Sequence[Part], dropped: Sequence[int] = ()
) -> None:
    """Adds a STRIDED_SLICE: a part for each axis of a tensor; of the `dropped` one entry."""
    begins, ends, steps = ([each[place] for each in parts] for place in range(3))
    for axis in dropped:
        ends[axis] = (begins[axis] or 0) + 1
    constants = [
        e.constant(name, [each or 0 for each in given])
        for name, given in {"begin": begins, "end": ends, "strides": steps}.items()
    ]
    e.add(
        "STRIDED_SLICE",
        [source, *constants],
        [target],
        beginMask=_mask(each is None for each in begins),
        endMask=_mask(each is None for each in ends),
        shrinkAxisMask=_mask(axis in dropped for axis in range(len(parts))),
    )


def _mask(flags: Iterable[bool]) -> int:
    return sum(1 << place for place, flag in enumerate(flags) if flag)


def _accepts_identity(call: Call, attributes: Attributes) -> str | None:
    x, y = call.inputs[0], call.output
    if x.dtype != y.dtype and not (x.is_float and y.is_float):
        return f"makes {call.output.dtype} of {call.inputs[0].dtype}"
    return None


IDENTITY = move(
    "identity",
    "nothing at run time: what regularizes or augments in training only",
    lambda e: e.builder.copy(e.source, e.outputs[0]),
    compute=lambda a: a.q[0],
    accepts=_accepts_identity,
    alias=True,
    elementwise=True,
    layers=(
        *(_layers.InputLayer, _layers.Identity, _layers.ActivityRegularization, Regularize),
        *(_layers.Dropout, _layers.SpatialDropout1D, _layers.SpatialDropout2D),
        *(_layers.SpatialDropout3D, _layers.GaussianNoise, _layers.GaussianDropout),
        *(_layers.AlphaDropout, _layers.RandomFlip, _layers.RandomRotation, _layers.RandomZoom),
        *(_layers.RandomTranslation, _layers.RandomContrast, _layers.RandomBrightness),
        *(_layers.RandomHeight, _layers.RandomWidth, TrainingOnly),
    ),
    symbols=("identity", "stop_gradient", "ensure_shape"),
)

MOVE = move(
    "move",
    "custom layers that only move, copy or select values",
    emit_by_converter,
)
"""For layers that are registered as such."""
