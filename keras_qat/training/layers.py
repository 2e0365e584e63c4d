"""The quantize-aware layers of a model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_qat.config import specs
from keras_qat.keras2 import backend, configurations
from keras_qat.keras2.backend import keras
from keras_qat.keras2.layers_and_models import accepts_training
from keras_qat.ops.registry import count_gates, relu_maximum
from keras_qat.training.batch_norm import fold_modes
from keras_qat.training.fake_quantization.activation_quantizer import ActivationQuantizer
from keras_qat.training.fake_quantization.phase import Flag
from keras_qat.training.fake_quantization.weight_quantizer import (
    CellQuantizer,
    GateQuantizer,
    WeightQuantizer,
    get_weight,
    replace_weights,
)
from keras_qat.training.scheduled_layer import ScheduledLayer


def _undo_relu(x: tf.Tensor) -> tuple[tf.Tensor, float | None]:
    """If `x` is the output of a ReLU, return its input and maximum. Otherwise return `(x, None)`.

    Quantization to a range that begins at zero clips like the ReLU. To quantize the ReLU's input
    saves memory, because training need not store the output.
    """
    op_type = "" if tf.executing_eagerly() else x.op.type
    ceiling = {"Relu": math.inf, "Relu6": 6.0}.get(op_type)
    return (x, None) if ceiling is None else (x.op.inputs[0], ceiling)


@backend.register
class Quantize(ScheduledLayer):
    """Fake-quantizes activations that no wrapper quantizes, such as inputs and sums.

    If several tensors share a range, one layer is called on each tensor, with a different `slot`.

    Args:
        spec: `QuantSpec` or `FixedSpec`.
        slots: number of tensors that share the range.
        tensors: names of the quantized tensors in the float model, for reports.
        rounds: False to only observe the range, without rounding. Exported files with integer
            outputs need the range.

    Shapes: any. The output has the input's shape.
    """

    def __init__(
        self,
        spec: specs.QuantSpec | specs.FixedSpec | dict[str, Any],
        slots: int = 1,
        tensors: tuple[str, ...] = (),
        rounds: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.spec = specs.from_config(spec)
        self.slots = slots
        self.tensors = tuple(tensors)
        self.rounds = rounds
        self.supports_masking = True

    def build(self, input_shape: tf.TensorShape) -> None:
        self.quantizer = ActivationQuantizer(self.spec, self, "output", self.slots)
        super().build(input_shape)

    @property
    def quantizers(self) -> list[ActivationQuantizer]:
        return [self.quantizer]

    @tf.autograph.experimental.do_not_convert
    def compute(
        self,
        inputs: tf.Tensor,
        training: Flag | None,
        slot: int | None = 0,
        source: Any = None,
        kernel: str = "",
    ) -> Any:
        # Models saved by earlier versions pass `source` and `kernel`.
        phase = self.advance(training)
        x, ceiling = inputs, None
        if not self.rounds:
            self.quantizer.observe_only(x, phase)
            return x
        if phase.training is True and slot is not None and self.quantizer.clips_at_zero:
            x, ceiling = _undo_relu(x)
        return self.quantizer(x, phase, slot, ceiling)

    def compute_output_shape(self, input_shape: tf.TensorShape) -> Any:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "spec": specs.to_config(self.spec),
            "slots": self.slots,
            "tensors": list(self.tensors),
            **({} if self.rounds else {"rounds": False}),
        }


@backend.register
class QuantizeWrapper(ScheduledLayer):
    """Computes a layer with fake-quantized weights and a fake-quantized output.

    Args:
        layer: the layer. Its `call` is used, so every option of the layer works.
        weights: maps the path of each weight in `layer` to the axes of the output channels, e.g.
            `{"kernel": (-1,)}`. Axes are counted from the end.
        weight_spec: specification of the weights. None leaves the weights in float.
        batch_norm: the BatchNormalization after the layer, or None. It is folded in exported files.
        batch_norm_frozen: True if `batch_norm` always uses the moving statistics.
        fold: how `batch_norm` and weight quantization are combined, a key of `fold_modes.FOLDS`.
        activation: the activation layer after `batch_norm`, or None.
        output_spec: specification of the output. None leaves the output unquantized.
        tensor: name of the output in the float model, for reports.
        inner_specs: specifications of the tensors inside the steps of a recurrent layer, by name.
        state_bits: bits of the hidden state of an LSTM between steps, 8 or 16.

    Shapes: the same as for `layer`.
    """

    def __init__(
        self,
        layer: keras.layers.Layer,
        weights: dict[str, Any],
        weight_spec: Any = None,
        batch_norm: keras.layers.Layer = None,
        batch_norm_frozen: bool = False,
        fold: str = "per_channel",
        activation: Any = None,
        output_spec: Any = None,
        tensor: str = "",
        inner_specs: dict[str, Any] | None = None,
        state_bits: int = 8,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.layer = _make_layer(layer)
        self.supports_masking = self.layer.supports_masking
        self.weight_axes = {name: tuple(axes) for name, axes in weights.items()}
        self.weight_spec = specs.from_config(weight_spec)
        self.batch_norm = _make_layer(batch_norm)
        self.batch_norm_frozen = batch_norm_frozen
        if fold not in list(fold_modes.FOLDS):
            raise ValueError(f"fold={fold!r}: use one of {', '.join(map(repr, fold_modes.FOLDS))}.")
        self.fold = fold
        self.activation = _make_layer(activation)
        self.output_spec = specs.from_config(output_spec)
        self.tensor = tensor
        self.state_bits = state_bits
        self.inner_specs = {
            name: specs.from_config(spec) for name, spec in (inner_specs or {}).items()
        }

    @property
    def quantizers(self) -> list[ActivationQuantizer]:
        last = [] if self.output_quantizer is None else [self.output_quantizer]
        return [*self.inner.values(), *last]

    @property
    def sublayers(self) -> list[Any]:
        """The wrapped float layers, in the order of computation."""
        layers = (self.layer, self.batch_norm, self.activation)
        return [layer for layer in layers if layer is not None]

    def build(self, input_shape: tf.TensorShape) -> None:
        shape = input_shape = _restore_shape(input_shape)
        self.channels = input_shape[-1]
        for sublayer in self.sublayers:
            if not sublayer.built:
                with tf.name_scope(sublayer.name):
                    sublayer.build(shape)
            shape = backend.infer_output_shape(sublayer, shape)
        self.weight_quantizers = {}
        if self.weight_spec is not None:
            make = CellQuantizer if self.inner_specs else WeightQuantizer
            make = GateQuantizer if count_gates(self.layer) > 1 else make
            self.weight_quantizers = {
                name: make(self.weight_spec, self, name.replace(".", "_"), axes)
                for name, axes in self.weight_axes.items()
            }
        self.inner = {
            name: ActivationQuantizer(spec, self, name) for name, spec in self.inner_specs.items()
        }
        self.output_quantizer = None
        self.ceiling = None
        """Maximum of the ReLU that the output quantizer computes instead of `activation`."""
        if self.output_spec is not None:
            self.output_quantizer = ActivationQuantizer(self.output_spec, self, "output")
            if self.activation is not None and self.output_quantizer.clips_at_zero:
                self.ceiling = relu_maximum(self.activation)
        self.stateful = self.layer.stateful
        super().build(input_shape)

    def yield_block_weights(self) -> Iterator[tuple[WeightQuantizer, Any]]:
        quantizes = self.assumed is not None and self.assumed.quantizing is not False
        for name, quantizer in self.weight_quantizers.items() if self.fold == "per_channel" else ():
            if quantizer.can_share_block and (quantizes or not quantizer.spec.delayed):
                yield quantizer, tf.convert_to_tensor(get_weight(self.layer, name))

    def reset_states(self) -> None:
        """Sets the states of a stateful recurrent layer to zero."""
        self.layer.reset_states()

    @tf.autograph.experimental.do_not_convert
    def compute(self, inputs: tf.Tensor, training: Flag | None, call: int = 0) -> Any:
        # Models saved by earlier versions pass `call`.
        phase = self.advance(training)
        if self.batch_norm_frozen:
            phase = phase._replace(frozen=True)
        x = fold_modes.FOLDS[self.fold](self, inputs, phase)
        if self.activation is not None and self.ceiling is None:
            x = self.activation(x)
        if self.output_quantizer is not None:
            x = self.output_quantizer(x, phase, ceiling=self.ceiling)
        return tf.cast(x, self.output_dtype(inputs))

    def output_dtype(self, inputs: tf.Tensor) -> Any:
        return self.sublayers[-1].compute_dtype

    def compute_mask(self, inputs: tf.Tensor, mask: tf.Tensor | None = None) -> Any:
        return self.layer.compute_mask(inputs, mask)

    def compute_output_shape(self, input_shape: tf.TensorShape) -> Any:
        for sublayer in self.sublayers:
            input_shape = backend.infer_output_shape(sublayer, input_shape)
        return input_shape

    def get_config(self) -> dict[str, Any]:
        inner = {name: specs.to_config(spec) for name, spec in self.inner_specs.items()}
        return {
            **super().get_config(),
            "layer": configurations.serialize(self.layer),
            "weights": {name: list(axes) for name, axes in self.weight_axes.items()},
            "weight_spec": specs.to_config(self.weight_spec),
            "batch_norm": self.batch_norm and configurations.serialize(self.batch_norm),
            "batch_norm_frozen": self.batch_norm_frozen,
            "fold": self.fold,
            "activation": self.activation and configurations.serialize(self.activation),
            "output_spec": specs.to_config(self.output_spec),
            "tensor": self.tensor,
            # Only recurrent layers save these entries.
            **({"inner_specs": inner} if inner else {}),
            **({} if self.state_bits == 8 else {"state_bits": self.state_bits}),
        }


def _restore_shape(shapes: Any) -> Any:
    """Convert one or several shapes to `tf.TensorShape`. Keras 2.15 loads shapes as lists."""
    is_one = all(size is None or isinstance(size, int) for size in shapes)
    return tf.TensorShape(shapes) if is_one else [tf.TensorShape(shape) for shape in shapes]


def _make_layer(layer: Any) -> Any:
    """Create a layer from a configuration. If `layer` is a layer or None, return it.

    Raises:
        ValueError: for any other argument.
    """
    if isinstance(layer, dict):
        with configurations.applications_scope():
            layer = configurations.deserialize(layer)
    if layer is not None and not isinstance(layer, backend.keras.layers.Layer):
        raise ValueError(f"A QuantizeWrapper holds layers, not {layer!r}.")
    return layer


@backend.register
class QuantizeWeights(ScheduledLayer):
    """Computes a layer in float with fake-quantized weights.

    This is for layers without an int8 operator, such as many recurrent layers. The file stores the
    weights in 8 bits, and computes with the same weights as training.

    Args:
        layer: the layer. Its `call` is used, with any arguments, states and masks.
        weights: maps the path of each weight, such as `"cell.kernel"`, to the axes of the output
            channels. Axes are counted from the end. Without axes, the weight has one range.
        weight_spec: specification of the weights.

    Shapes: the same as for `layer`.
    """

    def __init__(
        self, layer: keras.layers.Layer, weights: dict[str, Any], weight_spec: Any, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.layer = configurations.deserialize(layer) if isinstance(layer, dict) else layer
        self.supports_masking = self.layer.supports_masking
        self.weight_axes = {path: tuple(axes) for path, axes in weights.items()}
        self.weight_spec = specs.from_config(weight_spec)

    def build(self, input_shape: tf.TensorShape) -> None:
        self.weight_quantizers = {
            path: WeightQuantizer(self.weight_spec, self, path.replace(".", "_"), axes)
            for path, axes in self.weight_axes.items()
        }
        super().build(input_shape)

    def call(
        self, inputs: tf.Tensor, *args: Any, training: Flag | None = None, **kwargs: Any
    ) -> Any:
        return self._compute((inputs, *args), kwargs, training)

    @tf.autograph.experimental.do_not_convert
    def _compute(self, args: Any, kwargs: dict[str, Any], training: Flag | None) -> Any:
        phase = self.advance(training)
        if accepts_training(self.layer):
            kwargs = {**kwargs, "training": training}
        if not backend.accepts_mask(self.layer):
            kwargs.pop("mask", None)
        if not self._is_built():
            self.layer(*args, **kwargs)
        quantized = {
            path: quantizer(get_weight(self.layer, path), phase)
            for path, quantizer in self.weight_quantizers.items()
        }
        with replace_weights(self.layer, quantized):
            return self.layer(*args, **kwargs)

    def _is_built(self) -> bool:
        try:
            return all(get_weight(self.layer, path) is not None for path in self.weight_axes)
        except AttributeError:
            return False

    def compute_mask(self, inputs: tf.Tensor, mask: tf.Tensor | None = None) -> Any:
        return self.layer.compute_mask(inputs, mask)

    def compute_output_shape(self, input_shape: tf.TensorShape) -> Any:
        return self.layer.compute_output_shape(input_shape)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "layer": backend.keras.layers.serialize(self.layer),
            "weights": {path: list(axes) for path, axes in self.weight_axes.items()},
            "weight_spec": specs.to_config(self.weight_spec),
        }
