"""Names of nodes and tensors, by which a file says which layer is which."""

from __future__ import annotations

from keras_qat.frontend.graph import Call, Value, values_in
from keras_qat.tflite.tensor_names import as_scope
from keras_qat.training.layers import Quantize, QuantizeWrapper
from keras_qat.training.quantizers import PREFIX


def scope_of(call: Call, value: Value | None = None) -> str:
    """Returns the name of a call or of one of its outputs: the layer's path.

    The second call of `block/conv` is `block/conv>2`, its second output `block/conv:1`.
    """
    values = values_in(call.outputs)
    name = as_scope(values[0].name.split(":")[0])
    index = 0 if value is None else values.index(value)
    return name if index == 0 else f"{name}:{index}"


def label_of(value: Value) -> str:
    """Returns the float model's name for a tensor of the quantization-aware model."""
    call = value.producer
    layer = call.layer if call else None
    if isinstance(layer, QuantizeWrapper):
        return str(layer.tensor)
    if isinstance(layer, Quantize) and call is not None and call.kwargs.get("slot") is not None:
        return str(layer.tensors[call.kwargs["slot"]])
    return value.name.removeprefix(PREFIX)
