"""Keras layers whose kernel is computed from other weights: weight normalization, masked kernels.

At inference such a kernel is a constant, which files hold quantized like any other.
"""

from __future__ import annotations

from typing import Any

from keras_qat.keras2 import configurations
from keras_qat.keras2.backend import layers, register

__all__ = ["COMPUTED", "is_computed"]


class _Kernel:
    """Computes a layer's kernel when it is read. A quantized one may stand in its place."""

    def __get__(self, layer: Any, owner: type) -> Any:
        return self if layer is None else layer.source.value()


class _Computed(layers.Layer):
    """Mixin of layers that compute one of their weights from others.

    Args:
        source: a `WeightTensor` that computes the kernel, or its configuration.
    """

    computed = "kernel"
    """Name of the weight that is computed."""

    def __init__(self, *args: Any, source: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.source = configurations.deserialize(source) if isinstance(source, dict) else source

    def build(self, input_shape: Any) -> None:
        if not self.source.built:
            self.source.build(input_shape)
        super().build(input_shape)
        self.__dict__.pop(self.computed)  # The None that `add_weight` gave Keras.

    def add_weight(self, name: Any = None, *args: Any, **kwargs: Any) -> Any:
        return None if name == self.computed else super().add_weight(name, *args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "source": configurations.serialize(self.source)}


@register
class ComputedConv1D(_Computed, layers.Conv1D):
    """A `Conv1D` whose kernel is computed."""

    kernel = _Kernel()


@register
class ComputedConv2D(_Computed, layers.Conv2D):
    """A `Conv2D` whose kernel is computed."""

    kernel = _Kernel()


@register
class ComputedConv1DTranspose(_Computed, layers.Conv1DTranspose):
    """A `Conv1DTranspose` whose kernel is computed."""

    kernel = _Kernel()


@register
class ComputedConv2DTranspose(_Computed, layers.Conv2DTranspose):
    """A `Conv2DTranspose` whose kernel is computed."""

    kernel = _Kernel()


@register
class ComputedDepthwiseConv2D(_Computed, layers.DepthwiseConv2D):
    """A `DepthwiseConv2D` whose kernel is computed."""

    computed = "depthwise_kernel"
    depthwise_kernel = _Kernel()


@register
class ComputedDense(_Computed, layers.Dense):
    """A `Dense` whose kernel is computed."""

    kernel = _Kernel()


COMPUTED: dict[type, type] = {
    layers.Conv1D: ComputedConv1D,
    layers.Conv2D: ComputedConv2D,
    layers.Conv1DTranspose: ComputedConv1DTranspose,
    layers.Conv2DTranspose: ComputedConv2DTranspose,
    layers.DepthwiseConv2D: ComputedDepthwiseConv2D,
    layers.Dense: ComputedDense,
}
"""Layer class -> the class of those that compute their kernel."""


def is_computed(layer: Any) -> bool:
    """Returns whether a layer computes its kernel, so that nothing can be assigned to it."""
    return isinstance(layer, _Computed)
