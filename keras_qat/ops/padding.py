"""Operators that pad with zeros, which are exact in any range, or with copies."""

from __future__ import annotations

from typing import Any

from keras_qat.graph.calls import Call
from keras_qat.graph.operations import get_kind, get_operands, read_scalar
from keras_qat.keras2.backend import layers
from keras_qat.ops.emission import Emission
from keras_qat.ops.movement import get_rank, make_movement, read_integers
from keras_qat.ops.op import Attributes, Op

MODES = {"REFLECT": 0, "SYMMETRIC": 1}
"""Padding mode -> its number in a file."""

Pairs = tuple[tuple[int, int], ...]


def read_paddings(layer: Any, options: Any, rank: int) -> Pairs:
    """Returns two numbers for each axis, with zeros for batch and channels.

    Args:
        layer: may have a `data_format`.
        options: the layer's pairs; a single pair for one axis.
        rank: the number of axes of its input.
    """
    if rank == 3:
        options = (options,)
    known: Pairs = tuple((int(low), int(high)) for low, high in options)
    channels = ((0, 0),)
    if getattr(layer, "data_format", "") == "channels_first":
        return (*channels, *channels, *known)
    return (*channels, *known, *channels)


def _attributes(call: Call) -> Attributes:
    rank = get_rank(call)
    if not get_kind(call):
        return {"paddings": read_paddings(call.layer, call.layer.padding, rank), "mode": "CONSTANT"}
    paddings, mode, value = get_operands(call, "paddings", "mode", "constant_values")
    known = read_integers(paddings)
    both = None if known is None else tuple(zip(known[::2], known[1::2], strict=True))
    attributes: dict[str, Any] = {"paddings": both, "mode": (mode or "CONSTANT").upper()}
    if attributes["mode"] == "CONSTANT":
        attributes["value"] = 0.0 if value is None else read_scalar(value)
    return attributes


def _accepts(*modes: str) -> Any:
    def accepts(call: Call, attributes: Attributes) -> str | None:
        mode = attributes["mode"]
        if mode not in modes:
            return "" if mode in MODES else f"mode={mode!r}"
        is_zero = attributes.get("value", 0.0) == 0.0
        return None if is_zero else "pads with numbers other than 0"

    return accepts


def _emit(e: Emission) -> None:
    paddings, mode = e.constant("paddings", e.attributes["paddings"]), e.attributes["mode"]
    if mode in MODES:
        e.add("MIRROR_PAD", [e.source, paddings], mode=MODES[mode])
    else:
        e.add("PAD", [e.source, paddings])


def _row(name: str, doc: str, *modes: str, **fields: Any) -> Op:
    return make_movement(
        name,
        doc,
        _emit,
        kinds=("pad",),
        attributes=_attributes,
        accepts=_accepts(*modes),
        max_axes=5,
        **fields,
    )


PAD = _row(
    "pad",
    "padding with zeros",
    "CONSTANT",
    layers=(layers.ZeroPadding1D, layers.ZeroPadding2D, layers.ZeroPadding3D),
    needs=("paddings",),
    defaults={"mode": "CONSTANT"},
)

MIRROR_PAD = _row(
    "mirror_pad",
    "padding with copies of values next to the edge",
    *MODES,
    needs=("paddings", "mode"),
)
