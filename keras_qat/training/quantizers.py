"""Lists a model's quantizers, including tensors, specifications and ranges."""

from __future__ import annotations

import dataclasses
from typing import Any, SupportsIndex, overload

import numpy as np

from keras_qat.config.specs import FixedSpec, QuantSpec
from keras_qat.keras2.backend import keras
from keras_qat.messages import describe_unknown
from keras_qat.training.batch_norm.fold_modes import fold_kernel
from keras_qat.training.fake_quantization.weight_quantizer import get_weight
from keras_qat.training.layers import Quantize, QuantizeWeights
from keras_qat.training.schedule import check_quantized, list_scheduled_layers
from keras_qat.training.scheduled_layer import ScheduledLayer

PREFIX = "quant_"
"""Prefix of all layer names in quantization-aware models, except names of inputs."""


@dataclasses.dataclass(frozen=True)
class Quantizer:
    """A quantizer of a model, and the current range.

    Args:
        name: unique name, such as `layer/output` or `layer/kernel`.
        quantizes: names of the quantized tensors in the float model.
        spec: the specification.
        minimum: the lower end of the range. It is an array if there is one range per channel.
        maximum: the upper end of the range.
    """

    name: str
    quantizes: tuple[str, ...]
    spec: QuantSpec | FixedSpec
    minimum: Any
    maximum: Any

    @property
    def calibrated(self) -> bool:
        """True if the quantizer has a range. Without a range, it does not quantize."""
        is_initial = isinstance(self.spec, QuantSpec) and self.spec.initial_range is not None
        has_range = is_initial or np.any(self.maximum > self.minimum)
        return bool(np.all(np.isfinite([self.minimum, self.maximum])) and has_range)


class Quantizers(list[Quantizer]):
    """A list of quantizers that also accepts the name of a layer or a tensor as index."""

    @overload
    def __getitem__(self, index: SupportsIndex) -> Quantizer: ...

    @overload
    def __getitem__(self, index: slice) -> list[Quantizer]: ...

    @overload
    def __getitem__(self, index: str) -> list[Quantizer]: ...

    def __getitem__(self, index: Any) -> Any:
        """Returns a quantizer for an integer. Returns a list for a slice, a layer or a tensor.

        Raises:
            KeyError: if nothing with this name is quantized. The message lists similar names.
        """
        if not isinstance(index, str):
            return super().__getitem__(index)
        by_name: dict[str, list[Quantizer]] = {}
        for quantizer in self:
            layer = quantizer.name.rpartition("/")[0].removeprefix(PREFIX)
            for name in dict.fromkeys((layer, *quantizer.quantizes, quantizer.name)):
                by_name.setdefault(name, []).append(quantizer)
        if index not in by_name:
            raise KeyError(describe_unknown("layer or tensor", index, by_name))
        return by_name[index]


def quantizers(model: keras.Model) -> Quantizers:
    """Lists every quantizer of a quantization-aware model, in the order of the layers.

    Args:
        model: a quantization-aware model.

    Returns:
        A list of quantizers. The name of a layer or a tensor is also an index. It selects a list of
        the quantizers for this layer or tensor.

    Raises:
        ValueError: if the model is not quantization-aware.

    Example:
        >>> for quantizer in keras_qat.quantizers(qat):
        ...     print(quantizer.name, quantizer.quantizes, quantizer.minimum, quantizer.maximum)
        >>> kernel, output = keras_qat.quantizers(qat)["conv_1"]
    """
    check_quantized(model)
    return Quantizers(
        quantizer
        for layer in list_scheduled_layers(model)
        for listed in list_layer_quantizers(layer)
        for quantizer in listed
    )


def list_activation_quantizers(model: keras.Model) -> list[Quantizer]:
    return [x for layer in list_scheduled_layers(model) for x in _activation_quantizers(layer)]


def list_layer_quantizers(layer: ScheduledLayer) -> tuple[list[Quantizer], list[Quantizer]]:
    return _weight_quantizers(layer), _activation_quantizers(layer)


def get_quantized_weight(layer: keras.layers.Layer, name: str) -> Any:
    """Returns the weight that a layer quantizes: the folded kernel if `fold` is "per_tensor"."""
    if isinstance(layer, QuantizeWeights) or len(layer.weight_axes) > 1:
        return get_weight(layer.layer, name)
    return fold_kernel(layer) if layer.fold == "per_tensor" else getattr(layer.layer, name)


def _weight_quantizers(layer: ScheduledLayer) -> list[Quantizer]:
    listed = []
    for name, quantizer in layer.weight_quantizers.items():
        limits = quantizer.current_range(get_quantized_weight(layer, name))
        label = f"{layer.name.removeprefix(PREFIX)}/{name}"
        listed.append(Quantizer(f"{layer.name}/{name}", (label,), quantizer.spec, *limits))
    return listed


def _activation_quantizers(layer: ScheduledLayer) -> list[Quantizer]:
    """List the quantizers inside a layer, and then the quantizer of the layer's output."""
    tensors = layer.tensors if isinstance(layer, Quantize) else (getattr(layer, "tensor", ""),)
    inner = getattr(layer, "inner", {})
    names = [*inner, *["output"] * (len(layer.quantizers) - len(inner))]
    return [
        Quantizer(
            f"{layer.name}/{name}",
            tuple(f"{tensor}/{name}" for tensor in tensors) if name in inner else tensors,
            quantizer.spec,
            *quantizer.current_range(),
        )
        for name, quantizer in zip(names, layer.quantizers, strict=True)
    ]
