"""Helpers of operators that only move values, and operators that do nothing at inference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Value
from keras_qat.helper_layers.operations import CarryMask, Regularize, TrainingOnly
from keras_qat.keras2.backend import layers
from keras_qat.ops.emission import Emission
from keras_qat.ops.emit_by_converter import emit_by_converter
from keras_qat.ops.op import Arguments, Attributes, Emit, Op, SharedRange
from keras_qat.tracing.replaced_functions import OwnGradient

Part = tuple[int | None, int | None, int]
"""Begin, end and step along an axis, with None for the ends of the axis."""

MAX_SLICED = 5
"""The maximum number of axes of TFLite's slicing operators."""


def call_on_values(a: Arguments) -> Any:
    """Calls the layer on values relative to the zero point, so that zeros are zeros."""

    def convert(value: Any) -> Any:
        return tf.cast(value, a.q[0].dtype) if value.dtype.is_floating else value

    return tf.nest.map_structure(convert, a.run_layer(a.q))


def transpose(x: Any, order: Sequence[int]) -> Any:
    """Transposes a tensor, if that changes anything."""
    return x if list(order) == sorted(order) else tf.transpose(x, order)


def get_source(call: Call) -> Any:
    """Returns the tensor that a call changes, which Keras passes by position."""
    return call.args[0]


def read_integers(argument: Any) -> tuple[int, ...] | None:
    """Returns an argument as integers; None if it is missing or known only at run time."""
    if argument is None:
        return None
    leaves = tf.nest.flatten(argument)
    known = [tf.get_static_value(leaf) if tf.is_tensor(leaf) else leaf for leaf in leaves]
    if any(part is None or isinstance(part, Value) for part in known):
        return None
    return tuple(int(value) for part in known for value in np.ravel(part))


def read_window(option: Any, axes: int) -> tuple[int, ...] | None:
    """Returns sizes along the `axes` axes between batch and channels, given one or more sizes.

    The result is None if they are unknown, or if the sizes of batch and channels are not 1.
    """
    sizes = read_integers(option)
    if sizes is None or len(sizes) == axes:
        return sizes
    if len(sizes) == 1:
        return sizes * axes
    return sizes[1:-1] if sizes[0] == sizes[-1] == 1 else None


def get_rank(call: Call) -> int:
    """Returns the number of axes of the tensor that a call changes; 1 for several tensors."""
    return len(getattr(get_source(call), "shape", ())) or 1


def read_axes(argument: Any, rank: int) -> tuple[int, ...] | None:
    """Returns some of `rank` axes, all of them by default; None if they are unknown."""
    if argument is None:
        return tuple(range(rank))
    axes = read_integers(argument)
    return None if axes is None else tuple(sorted({axis % rank for axis in axes}))


def make_movement(name: str, doc: str, emit: Emit, **fields: Any) -> Op:
    """Returns the row of an operator that only moves values, and refuses options that are None."""
    more: Callable[..., str | None] = fields.pop("accepts", lambda call, attributes: None)

    def accepts(call: Call, attributes: Attributes) -> str | None:
        if not isinstance(get_source(call), Value):
            return "not of one tensor"
        if any(value is None for value in attributes.values()):
            return "its options are not known before run time"
        return more(call, attributes)

    fields = {"compute": call_on_values, "output": SharedRange(), **fields}
    return Op(name, emit=emit, doc=doc, accepts=accepts, **fields)


def emit_slice(
    e: Emission, source: int, target: int, parts: Sequence[Part], dropped: Sequence[int] = ()
) -> None:
    """Adds a STRIDED_SLICE with one part of each axis, and one entry of the `dropped` axes."""
    begins, ends, steps = ([part[field] for part in parts] for field in range(3))
    for axis in dropped:
        ends[axis] = (begins[axis] or 0) + 1
    constants = [
        e.constant(name, [value or 0 for value in values])
        for name, values in {"begin": begins, "end": ends, "strides": steps}.items()
    ]
    e.add(
        "STRIDED_SLICE",
        [source, *constants],
        [target],
        beginMask=_mask(begin is None for begin in begins),
        endMask=_mask(end is None for end in ends),
        shrinkAxisMask=_mask(axis in dropped for axis in range(len(parts))),
    )


def _mask(flags: Iterable[bool]) -> int:
    return sum(1 << bit for bit, flag in enumerate(flags) if flag)


def _accepts_identity(call: Call, attributes: Attributes) -> str | None:
    x, y = call.inputs[0], call.output
    if getattr(call.layer, "mask_value", 0) != 0:
        return "its mask_value is not 0"
    if x.dtype != y.dtype and not (x.is_float and y.is_float):
        return f"makes {call.output.dtype} of {call.inputs[0].dtype}"
    return None


IDENTITY = make_movement(
    "identity",
    "nothing at inference: layers that regularize or augment in training, or pass on a mask",
    lambda e: e.builder.copy(e.source, e.outputs[0]),
    compute=lambda a: a.q[0],
    accepts=_accepts_identity,
    alias=True,
    elementwise=True,
    layers=(
        *(layers.InputLayer, layers.Identity, layers.ActivityRegularization, Regularize),
        *(layers.Dropout, layers.SpatialDropout1D, layers.SpatialDropout2D),
        *(layers.SpatialDropout3D, layers.GaussianNoise, layers.GaussianDropout),
        *(layers.AlphaDropout, layers.RandomFlip, layers.RandomRotation, layers.RandomZoom),
        *(layers.RandomTranslation, layers.RandomContrast, layers.RandomBrightness),
        *(layers.RandomHeight, layers.RandomWidth, TrainingOnly, CarryMask),
        *(layers.Masking, OwnGradient),
    ),
    kinds=("identity", "stop_gradient", "ensure_shape", "convert_to_tensor", "check_numerics"),
)

MOVE = make_movement(
    "move", "custom layers that only move, copy or select values", emit_by_converter
)
"""The row for layers that a user registers as "move"."""
