"""What tensors are called, so that a file says which layer is which."""

from __future__ import annotations

from keras_qat.frontend.graph import Call, Value, values_in
from keras_qat.tflite.tensor_names import as_scope
from keras_qat.training.layers import Quantize, QuantizeWrapper
from keras_qat.training.quantizers import PREFIX


def scope_of(call: Call, value: Value | None = None) -> str:
    """The name of a call, or of one of its outputs: the layer's path.

    From the second call on, and of the second output on, with a mark behind it. Example:
    `block/conv` and, called again, `block/conv>2`.
    """
    values = values_in(call.outputs)
    name = as_scope(values[0].name.split(":")[0])
    place = 0 if value is None else values.index(value)
    return name if place == 0 else f"{name}:{place}"


def label_of(value: Value) -> str:
    """The name that a tensor of a quantization-aware model has in the float model."""
    call = value.producer
    layer = call.layer if call else None
    if isinstance(layer, QuantizeWrapper):
        return str(layer.tensor)
    if isinstance(layer, Quantize) and call is not None and call.kwargs.get("slot") is not None:
        return str(layer.tensors[call.kwargs["slot"]])
    return value.name.removeprefix(PREFIX)
