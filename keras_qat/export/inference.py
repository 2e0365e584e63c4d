"""The inference function: what the exported files compute.

It is built from the quantization-aware model call by call: BatchNormalization folded, weights
already on their levels, every range a constant. The training graph is never converted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat import fake_quant, specs
from keras_qat import graph as graph_lib
from keras_qat.export import folded, spelling
from keras_qat.graph import Call, values_in
from keras_qat.layers import Quantize, QuantizeWrapper
from keras_qat.quantize import quantizers
from keras_qat.schedule import is_quantized

__all__ = ["check_exportable", "inference_module"]

Spelling = Callable[[Any, Any, folded.Folded], Any]


def inference_module(model: Any, spelled: Spelling = spelling.as_keras) -> tf.Module:
    """A module whose `serve` computes the folded, quantized model.

    Args:
        model: a quantization-aware model.
        spelled: computes a wrapped layer from its input and folded weights.

    Returns:
        A module with a `tf.function` `serve`: inputs by position in the model's order, named
        after the model's inputs; outputs as a dict by output name.
    """
    graph = graph_lib.read(model)
    values = values_in(graph.inputs)
    signature = [tf.TensorSpec(each.shape, each.dtype, name=each.name) for each in values]
    fold = {
        call.layer: folded.fold(call.layer)
        for call in graph.calls
        if isinstance(call.layer, QuantizeWrapper)
    }

    def apply(call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
        layer = call.layer
        if isinstance(layer, Quantize):
            return quantize(args[0], layer.quantizer)
        if not isinstance(layer, QuantizeWrapper):
            if "training" in kwargs:
                kwargs = {**kwargs, "training": False}
            return layer(*args, **kwargs)
        x = spelled(layer.layer, args[0], fold[layer])
        if layer.activation is not None:
            x = layer.activation(x)
        return x if layer.output_quantizer is None else quantize(x, layer.output_quantizer)

    def serve(*inputs: Any) -> dict[str, Any]:
        with tf.name_scope("keras_qat"):
            outputs = graph_lib.evaluate(graph, list(inputs), apply)
        return dict(zip(model.output_names, tf.nest.flatten(outputs), strict=True))

    module = tf.Module()
    module.model = model  # Keeps the variables of layers that are not folded alive.
    module.serve = tf.function(serve, input_signature=signature, autograph=False)
    return module


def quantize(x: Any, quantizer: Any) -> Any:
    """Fake quantization to constants, as the converter reads it: always in 256 levels.

    With fewer bits the tensor keeps its own step width, holds the lower codes only, and is
    clipped at the highest of them.
    """
    bits = quantizer.spec.bits
    scale, zero_point = fake_quant.scale_of(*quantizer.current_range(), bits)
    low = -zero_point * scale

    def to_levels(x: Any) -> Any:
        return tf.quantization.fake_quant_with_min_max_args(x, low, low + 255 * scale)

    if bits == 8:
        return to_levels(x)
    high = np.float32(low + (2**bits - 1) * scale)
    return to_levels(tf.minimum(to_levels(x), high))


def check_exportable(model: Any) -> None:
    """Raises a `ValueError` if a model is not quantized, or a quantizer has no usable range."""
    if not is_quantized(model):
        raise ValueError(
            f"'{getattr(model, 'name', model)}' is not quantization-aware. Call "
            f"keras_qat.quantize_model(model) and train it, then export what it returns."
        )
    found = [each for each in quantizers(model) if isinstance(each.spec, specs.QuantSpec)]
    broken = [
        each.name for each in found if not np.all(np.isfinite([each.minimum, each.maximum]))
    ]
    if broken:
        raise ValueError(
            f"{len(broken)} quantizers have a range with NaN or infinity: {_some(broken)}. The "
            f"training diverged; go back to a checkpoint from before and lower the learning rate."
        )
    blind = [each.name for each in found if not each.calibrated]
    if blind:
        raise ValueError(
            f"{len(blind)} quantizers have seen no data yet: {_some(blind)}. Train the model "
            f"(fit, or calls with training=True) so that ranges are observed, then export."
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
