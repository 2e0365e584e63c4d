"""Padding with zeros, which have a quantized value in any range, and with copies."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_qat.keras2.backend import keras
from keras_qat.keras2.graph import Call
from keras_qat.operations import number, operands
from keras_qat.ops.movement import integers, move, rank_of, source_of, symbol_of
from keras_qat.ops.op import Attributes
from keras_qat.tflite.emission import Emission

__all__ = ["MIRROR_PAD", "PAD", "pairs"]

_layers = keras.layers

MAX_PADDED = 5
"""Axes that kernels pad."""

MODES = {"REFLECT": 0, "SYMMETRIC": 1}
"""Mode -> its number in a file."""

Pairs = tuple[tuple[int, int], ...]


def pairs(layer: Any, options: Any, rank: int) -> Pairs:
    """Two numbers for each axis: those that a layer gives for the axes between batch and channels.

    Args:
        layer: may have a `data_format`.
        options: its pairs, a single one for one axis.
        rank: how many axes its inputs have.
    """
    if rank == 3:
        options = (options,)
    known: Pairs = tuple((int(low), int(high)) for low, high in options)
    channels = ((0, 0),)
    if getattr(layer, "data_format", "") == "channels_first":
        return (*channels, *channels, *known)
    return (*channels, *known, *channels)


def _attributes(call: Call) -> Attributes:
    rank = rank_of(call)
    if not symbol_of(call):
        return {"paddings": pairs(call.layer, call.layer.padding, rank), "mode": "CONSTANT"}
    names = ("tensor", "paddings", "mode", "name", "constant_values")
    _, paddings, mode, _, value = operands(call, *names)
    known = integers(paddings)
    both = None if known is None else tuple(zip(known[::2], known[1::2], strict=True))
    found: dict[str, Any] = {"paddings": both, "mode": (mode or "CONSTANT").upper()}
    if found["mode"] == "CONSTANT":
        found["value"] = 0.0 if value is None else number(value)
    return found


def _accepts(call: Call, attributes: Attributes) -> str | None:
    if len(attributes["paddings"]) > MAX_PADDED:
        return f"more than {MAX_PADDED} axes"
    if attributes.get("value", 0.0) != 0.0:
        return "pads with other numbers than 0"
    return None


def _accepts_mode(*modes: str) -> Any:
    def accepts(call: Call, attributes: Attributes) -> str | None:
        if attributes["mode"] not in modes:
            return "" if attributes["mode"] in MODES else f"mode={attributes['mode']!r}"
        return _accepts(call, attributes)

    return accepts


def _constant(e: Emission) -> int:
    return e.constant("paddings", np.array(e.attributes["paddings"], np.int32))


def _emit_pad(e: Emission) -> None:
    e.add("PAD", [source_of(e), _constant(e)], options="PadOptions")


def _emit_mirror(e: Emission) -> None:
    mode = MODES[e.attributes["mode"]]
    e.add("MIRROR_PAD", [source_of(e), _constant(e)], options="MirrorPadOptions", mode=mode)


PAD = move(
    "pad",
    "padding with zeros",
    _emit_pad,
    layers=(_layers.ZeroPadding1D, _layers.ZeroPadding2D, _layers.ZeroPadding3D),
    symbols=("compat.v1.pad", "pad"),
    attributes=_attributes,
    needs=("paddings",),
    defaults={"mode": "CONSTANT"},
    accepts=_accepts_mode("CONSTANT"),
)


MIRROR_PAD = move(
    "mirror_pad",
    "padding with copies of what is next to the edge",
    _emit_mirror,
    symbols=("compat.v1.pad", "pad"),
    attributes=_attributes,
    needs=("paddings", "mode"),
    accepts=_accepts_mode(*MODES),
)
