"""Lowering of TensorFlow operations on symbolic tensors."""

from __future__ import annotations

from keras_qat.backend import keras
from keras_qat.graph import Call, Value
from keras_qat.lower.activations import split_swish
from keras_qat.lower.attention import split_einsum
from keras_qat.lower.merges import convert_fixed_ranges
from keras_qat.lower.parts import Lowering, Made, operands

__all__ = ["OPERATIONS"]

_layers = keras.layers


def _split_silu(call: Call, made: Made) -> list[Call]:
    (_, beta) = operands(call, "features", "beta")
    return split_swish(call, made) if beta in (None, 1.0) else []


def _split_negative(call: Call, made: Made) -> list[Call]:
    """-x -> Rescaling(-1)."""
    return [_rescaling(call, made, -1.0)]


def _split_division(call: Call, made: Made) -> list[Call]:
    """x / number -> Rescaling(1 / number)."""
    x, divisor = operands(call, "x", "y")
    is_number = isinstance(divisor, (int, float)) and not isinstance(divisor, bool)
    if not isinstance(x, Value) or not is_number or not divisor:
        return []
    return [_rescaling(call, made, 1.0 / divisor)]


def _rescaling(call: Call, made: Made, scale: float) -> Call:
    layer = call.layer
    rescaling = made.layer(layer, "scale", lambda: _layers.Rescaling(scale, name=layer.name))
    return Call(rescaling, (call.inputs[0],), {}, call.output, call.name)


def _split_resize(call: Call, made: Made) -> list[Call]:
    """tf.image.resize(x, (h, w)) -> Resizing, where it can do the same."""
    layer = call.layer
    _, size, method, keeps_ratio, antialias = operands(
        call, "images", "size", "method", "preserve_aspect_ratio", "antialias"
    )
    method = {None: "bilinear"}.get(method, method)
    sizes = list(size) if isinstance(size, (list, tuple)) else []
    if keeps_ratio or antialias or method not in ("bilinear", "nearest"):
        return []
    if len(sizes) != 2 or not all(isinstance(each, int) for each in sizes):
        return []
    resizing = made.layer(
        layer, "resize", lambda: _layers.Resizing(*sizes, interpolation=method, name=layer.name)
    )
    return [Call(resizing, (call.inputs[0],), {}, call.output, call.name)]


OPERATIONS: dict[str, Lowering] = {
    "nn.silu": _split_silu,
    "math.negative": _split_negative,
    "math.divide": _split_division,
    "math.truediv": _split_division,
    "__operators__.truediv": _split_division,
    "image.resize": _split_resize,
    "einsum": split_einsum,
    **dict.fromkeys(("concat", "stack", "math.maximum", "math.minimum"), convert_fixed_ranges),
}
"""TensorFlow's name of an operation on symbolic tensors -> what splits it."""
