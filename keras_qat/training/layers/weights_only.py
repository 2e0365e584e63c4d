"""The wrapper of layers that compute in float with 8-bit weights."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_qat.config import specs
from keras_qat.keras2 import backend, configurations
from keras_qat.keras2.layers_and_models import accepts_training
from keras_qat.training.layers.scheduled_layer import ScheduledLayer
from keras_qat.training.layers.weight_quantizer import WeightQuantizer, weight_at, weights_replaced


@backend.register
class QuantizeWeights(ScheduledLayer):
    """Computes a layer in float with fake-quantized weights.

    For layers without an int8 operator, such as many recurrent ones: the file holds their weights
    in 8 bits and computes with exactly the same values as training.

    Args:
        layer: the layer; its own `call` is used, with any arguments, states and masks.
        weights: path of each weight in `layer`, such as `"cell.kernel"` -> axes of its output
            channels, counted from the end; none for a range per tensor.
        weight_spec: specification of the weights.

    Shapes: those of `layer`.
    """

    def __init__(
        self, layer: Any, weights: dict[str, Any], weight_spec: Any, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.layer = configurations.deserialize(layer) if isinstance(layer, dict) else layer
        self.supports_masking = self.layer.supports_masking
        self.weight_axes = {path: tuple(axes) for path, axes in weights.items()}
        self.weight_spec = specs.from_config(weight_spec)

    def build(self, input_shape: Any) -> None:
        self.weight_quantizers = {
            path: WeightQuantizer(self.weight_spec, self, path.replace(".", "_"), axes)
            for path, axes in self.weight_axes.items()
        }
        super().build(input_shape)

    def call(self, inputs: Any, *args: Any, training: Any = None, **kwargs: Any) -> Any:
        return self._compute((inputs, *args), kwargs, training)

    @tf.autograph.experimental.do_not_convert
    def _compute(self, args: Any, kwargs: dict[str, Any], training: Any) -> Any:
        phase = self.advance(training)
        if accepts_training(self.layer):
            kwargs = {**kwargs, "training": training}
        if not backend.accepts_mask(self.layer):
            kwargs.pop("mask", None)
        if not self._is_built():
            self.layer(*args, **kwargs)
        quantized = {
            path: quantizer(weight_at(self.layer, path), phase)
            for path, quantizer in self.weight_quantizers.items()
        }
        with weights_replaced(self.layer, quantized):
            return self.layer(*args, **kwargs)

    def _is_built(self) -> bool:
        try:
            return all(weight_at(self.layer, path) is not None for path in self.weight_axes)
        except AttributeError:
            return False

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        return self.layer.compute_mask(inputs, mask)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return self.layer.compute_output_shape(input_shape)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "layer": backend.keras.layers.serialize(self.layer),
            "weights": {path: list(axes) for path, axes in self.weight_axes.items()},
            "weight_spec": specs.to_config(self.weight_spec),
        }
