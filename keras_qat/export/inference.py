"""The inference function: what the exported files compute.

It is built from the quantization-aware model call by call: BatchNormalization folded, weights
already on their levels, every range a constant. The training graph is never converted.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat import fake_quant, specs
from keras_qat.export import folded, int16, spelling
from keras_qat.export.barrier import barrier
from keras_qat.export.levels import Levels, implied_levels
from keras_qat.export.names import SCOPE, as_scope, scope_of
from keras_qat.export.placeholders import with_placeholders
from keras_qat.keras2 import backend
from keras_qat.keras2 import graph as graph_lib
from keras_qat.keras2.backend import keras
from keras_qat.keras2.graph import Call, Graph, Value, map_values, values_in
from keras_qat.kinds import CLIPS, FIXED_RANGES, POOLING, is_known, is_mean_of_one, kind_of
from keras_qat.layers import Quantize, QuantizeWeights, QuantizeWrapper
from keras_qat.quantize import quantizers
from keras_qat.schedule import is_quantized

__all__ = ["call_module", "check_exportable", "inference_module"]

_layers = keras.layers


def inference_module(
    model: Any,
    for_tflite: bool = False,
    input_range: tuple[float, float] | None = None,
    placeholders: bool = False,
) -> tf.Module:
    """A module whose `serve` computes the folded, quantized model.

    Args:
        model: a quantization-aware model.
        for_tflite: whether operations are spelled the way that TFLite's converter quantizes them.
        input_range: range of the model's inputs that have no quantizer; they stay in float
            without one.
        placeholders: whether large kernels are left out, to be written into the file.

    Returns:
        A module with a `tf.function` `serve`: inputs by position in the model's order, named
        after the model's inputs; outputs as a dict by output name.
    """
    graph = graph_lib.read(model)
    values = values_in(graph.inputs)
    signature = [tf.TensorSpec(each.shape, each.dtype, name=each.name) for each in values]
    writer = _Writer(graph, for_tflite, placeholders)

    def serve(*inputs: Any) -> dict[str, Any]:
        with tf.name_scope(SCOPE):
            start = [
                writer.quantize_input(value, tensor, input_range)
                for value, tensor in zip(values, inputs, strict=True)
            ]
            outputs = graph_lib.evaluate(graph, start, writer.apply_in_scope)
        return dict(zip(model.output_names, tf.nest.flatten(outputs), strict=True))

    module = tf.Module()
    # What is not folded has to be saved along. Not the layers: Keras would trace each of them.
    module.weights = [
        weight
        for layer in graph.call_counts()
        if not isinstance(layer, QuantizeWrapper)
        for weight in layer.weights
    ]
    module.serve = tf.function(serve, input_signature=signature, autograph=False)
    module.writer = writer
    return module


def call_module(writer: _Writer, call: Call) -> tf.Module:
    """A module like that of `inference_module` for one call, once that one was traced."""
    values = list(dict.fromkeys(call.inputs))
    signature = [tf.TensorSpec(each.shape, each.dtype) for each in values]

    def serve(*inputs: Any) -> Any:
        tensors = dict(zip(values, inputs, strict=True))
        args, kwargs = map_values(tensors.__getitem__, (call.args, call.kwargs))
        return tf.nest.flatten(writer.apply(call, args, kwargs))

    module = tf.Module()
    module.layer = call.layer
    module.serve = tf.function(serve, input_signature=signature, autograph=False)
    return module


class _Writer:
    """Computes the calls of a model in their exported form, and keeps track of ranges."""

    def __init__(self, graph: Graph, for_tflite: bool, placeholders: bool) -> None:
        self.graph, self.for_tflite = graph, for_tflite
        self.spelled = spelling.as_tflite if for_tflite else spelling.as_keras
        layers = graph.call_counts()
        self.folded = {
            layer: folded.fold(layer) for layer in layers if isinstance(layer, QuantizeWrapper)
        }
        if placeholders:
            self.folded = with_placeholders(self.folded)
        self.float_weights = {
            layer: folded.whole_steps(layer)
            for layer in layers
            if isinstance(layer, QuantizeWeights)
        }
        if for_tflite:
            self.warn_of_rounding()
        self.quantized_next = {
            call.inputs[0]: call for call in graph.calls if isinstance(call.layer, Quantize)
        }
        self.consumers = graph.consumers()
        self.levels: dict[Value, Levels] = {}
        self.float_values: set[Value] = set()
        """Values that layers in float made."""

    def warn_of_rounding(self) -> None:
        """Tells which weights TFLite cannot hold as they were trained."""
        wide = {layer.name: each.rounding for layer, each in self.folded.items() if each.rounding}
        if wide:
            warnings.warn(
                f"The weights of {len(wide)} layers are rounded again, by up to "
                f"{max(wide.values()):.2g} steps: {_some(list(wide))}. Their 8-bit ranges are not "
                f"symmetric, and TFLite's int8 kernels have no zero point for weights. Train with "
                f"symmetric weights (recipes.contrib(symmetric=True), recipes.int8()) or with at "
                f"most 7 bits for a file that computes what was trained.",
                stacklevel=6,
            )

    def apply_in_scope(self, call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
        """The outputs of a call, computed by operations that are named after it."""
        with tf.name_scope(scope_of(call)):
            return self.apply(call, args, kwargs)

    def apply(self, call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
        """The outputs of a call, with the mask that Keras would give them."""
        args, kwargs = tf.nest.map_structure(_as_number, (args, kwargs))
        outputs = self.compute(call, args, kwargs)
        if call.output.masked and tf.is_tensor(outputs) and backend.mask_of(outputs) is None:
            mask = call.layer.compute_mask(args[0], backend.mask_of(args[0]))
            backend.set_mask(outputs, mask)
        return outputs

    def compute(self, call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
        """The outputs of a call."""
        layer = call.layer
        if isinstance(layer, Quantize):
            levels = self.levels_of(layer, call.inputs[0])
            if self.for_tflite and kwargs["slot"] is None:
                self.levels[call.output] = levels
                return args[0]  # An average: the runtime's kernel rounds it to its input's range.
            return self.quantize(call.output, args[0], levels)
        if isinstance(layer, QuantizeWrapper):
            quantized = layer.output_quantizer is not None

            def activation(x: Any) -> Any:
                return x if layer.activation is None else activate(layer.activation, x, quantized)

            x = self.spelled(layer.layer, args[0], self.folded[layer], activation)
            if layer.output_quantizer is not None:
                x = self.quantize(call.output, x, self.levels_of(layer, call.output))
            return x
        if isinstance(layer, QuantizeWeights):
            weights = {path: tf.constant(each) for path, each in self.float_weights[layer].items()}
            with layer.weights_replaced(weights):
                return self.in_float(call, args, kwargs)
        if kind_of(call) in (None, "kernel", "affine"):
            return self.in_float(call, args, kwargs)
        if graph_lib.takes_training(layer):
            kwargs = {**kwargs, "training": False}
        if isinstance(layer, keras.layers.ReLU):
            return activate(layer, args[0], call.output in self.quantized_next)
        if kind_of(call) == "concatenate":
            args, kwargs = self.in_one_range(call, (args, kwargs))
        if kind_of(call) in OVERTAKES and len(call.inputs) == 2:
            args = self.kept_apart(call, args)
        if kind_of(call) == "maximum" and call.output.is_float:
            args, kwargs = spelling.beside_special_numbers((args, kwargs))
        if is_mean_of_one(call) or (type(layer) is _layers.Reshape and is_known_shape(call.output)):
            # In integers whatever the mean's shape, and without asking for the number of examples.
            (x,) = tf.nest.flatten([args, kwargs])[:1]
            return self.with_implied_range(call, tf.reshape(x, [-1, *call.output.shape[1:]]))
        return self.with_implied_range(call, layer(*args, **kwargs))

    def in_float(self, call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
        """A layer that the plan leaves in float, and that is so in the file."""
        layer = call.layer.layer if isinstance(call.layer, QuantizeWeights) else call.layer
        kwargs = {name: each for name, each in kwargs.items() if name != "training"}
        training = {"training": False} if graph_lib.takes_training(layer) else {}
        if not self.for_tflite:
            return layer(*args, **kwargs, **training)

        def enter(leaf: Any, tensor: Any) -> Any:
            is_quantized = isinstance(leaf, Value) and leaf not in self.float_values
            return barrier(tensor) if is_quantized else tensor

        def leave(leaf: Any, tensor: Any) -> Any:
            return barrier(tensor) if leaf in self.quantized_next else tensor

        values = {name: each for name, each in call.kwargs.items() if name != "training"}
        args, kwargs = tf.nest.map_structure(enter, (call.args, values), (args, kwargs))
        self.float_values.update(values_in(call.outputs))
        outputs = spelling.in_float(layer, args, {**kwargs, **training})
        return tf.nest.map_structure(leave, call.outputs, outputs)

    def levels_of(self, layer: Any, value: Value) -> Levels:
        """The levels of the quantizer of a layer, which quantizes `value`.

        For 16 bits the converter is given int8 levels that `int16.widen` makes finer.
        """
        levels = Levels.of(getattr(layer, "quantizer", None) or layer.output_quantizer)
        if not self.for_tflite or levels.bits != 16:
            return levels
        kind = kind_of(value.producer) if value.producer else None
        if kind in FIXED_RANGES:
            return Levels(*FIXED_RANGES[kind])
        # A float32, of which the converter makes the same one again.
        scale = np.float32(fake_quant.scale_of(levels.minimum, levels.maximum, 16)[0])
        step = float(scale * np.float32(int16.FINER))
        return Levels(-128 * step, 127 * step)

    def quantize(self, value: Value, x: Any, levels: Levels) -> Any:
        self.levels[value] = levels
        return levels.round(x)

    def quantize_input(self, value: Value, x: Any, limits: tuple[float, float] | None) -> Any:
        """An input of the model, quantized to `limits` if nothing in the model does it."""
        if limits is None or value in self.quantized_next or not value.is_float:
            return x
        with tf.name_scope(as_scope(value.name)):
            return self.quantize(value, x, Levels(*limits))

    def with_implied_range(self, call: Call, x: Any) -> Any:
        """A tensor that has no quantizer, with the range that follows from its inputs.

        `recipes.contrib` leaves pooling, concatenation and softmax without quantizers, like the
        original; its converter filled in the same ranges.
        """
        values = [value for value in call.inputs if value.is_float]
        known = [self.levels[value] for value in values if value in self.levels]
        implied = implied_levels(call, known) if len(known) == len(values) else None
        if implied is None:
            return x
        if kind_of(call) in ("move", "linear"):
            self.levels[call.output] = implied
            # The converter may not see that a custom layer's range stays. It computes what is
            # elementwise before the move in front of it, unless something is between them.
            readers = [each for v in values_in(call.outputs) for each in self.consumers[v]]
            overtaken = any(kind_of(each) in OVERTAKES for each in readers)
            symbol = getattr(call.layer, "symbol", None)
            seen = is_known(call.layer) and symbol not in UNSEEN_MOVES
            if type(call.layer) in POOLING or (seen and not overtaken):
                return x
            return tf.nest.map_structure(implied.round, x)
        return x if call.output in self.quantized_next else self.quantize(call.output, x, implied)

    def kept_apart(self, call: Call, args: Any) -> Any:
        """The arguments of an operation on two reshaped tensors of one range, or one and itself.

        The converter would compute it before the reshaping, but leave the range of its result
        behind that. A maximum that changes nothing is between them.
        """
        tensors = tf.nest.flatten(args)
        levels, other = (self.levels.get(each) for each in call.inputs)
        if levels is None or levels != other or len(tensors) < 2:
            return args
        if not all(map(is_reshaped, call.inputs)):
            return args
        tensors[0] = levels.round(tf.maximum(tensors[0], levels.minimum))
        return tf.nest.pack_sequence_as(args, tensors)

    def in_one_range(self, call: Call, arguments: Any) -> Any:
        """The tensors of a concatenation, in its own range or one that holds them all.

        TFLite's kernel asks for one. Its converter would give it to the tensors themselves and
        forget where they were clipped in training.
        """
        known = [self.levels[value] for value in call.inputs if value in self.levels]
        if len(known) < len(call.inputs) or len(set(known)) == 1:
            return arguments
        behind = self.quantized_next.get(call.output)
        joined = Levels.of(behind.layer.quantizer) if behind else Levels.around(known)

        def clip(x: Any, levels: Levels) -> Any:
            y = x
            if levels.maximum < joined.maximum:
                y = tf.minimum(y, levels.maximum)
            if levels.minimum > joined.minimum:
                y = tf.maximum(y, levels.minimum)
            return x if y is x else joined.round(y)  # The converter sees what it has to convert.

        return tf.nest.map_structure(
            lambda leaf, x: clip(x, self.levels[leaf]) if isinstance(leaf, Value) else x,
            (call.args, call.kwargs),
            arguments,
        )


OVERTAKES = CLIPS | {"add", "subtract", "multiply", "prelu"}
"""Kinds that the converter computes before what moves their inputs."""


UNSEEN_MOVES = {"reverse"}
"""Operations of which the converter does not see that they keep their input's range."""


def is_reshaped(value: Value) -> bool:
    """Whether what makes a tensor ends in a reshaping: a dense layer is spelled with one."""
    call = value.producer
    while call is not None and (isinstance(call.layer, Quantize) or kind_of(call) in CLIPS):
        call = call.inputs[0].producer
    if call is None:
        return False
    if isinstance(call.layer, QuantizeWrapper):
        return type(call.layer.layer) not in (_layers.Conv2D, _layers.DepthwiseConv2D)
    return kind_of(call) == "move"


def activate(activation: Any, x: Any, quantized: bool) -> Any:
    """An activation, in float or in front of a quantizer.

    A ReLU with a maximum other than 6 is no single operation in TFLite. The quantizer behind it
    clips there too, as it has seen nothing above.
    """
    limit = getattr(activation, "max_value", None)
    if quantized and limit is not None and limit != 6 and not activation.threshold:
        return tf.nn.relu(x)
    return activation(x)


def is_known_shape(value: Value) -> bool:
    """Whether all sizes but the batch's are known."""
    return None not in value.shape[1:]


def check_exportable(model: Any) -> None:
    """Raises a `ValueError` if a model is not quantized, or a quantizer has no usable range."""
    if not is_quantized(model):
        raise ValueError(
            f"'{getattr(model, 'name', model)}' is not quantization-aware. Call "
            f"keras_qat.quantize_model(model) and train it, then export what it returns."
        )
    found = [each for each in quantizers(model) if isinstance(each.spec, specs.QuantSpec)]
    broken = [each.name for each in found if not np.all(np.isfinite([each.minimum, each.maximum]))]
    if broken:
        raise ValueError(
            f"{len(broken)} quantizers have a range with NaN or infinity: {_some(broken)}. The "
            f"training diverged; go back to a checkpoint from before and lower the learning rate."
        )
    broken = [
        weight.name
        for weight in model.weights
        if weight.dtype.is_floating and not np.all(np.isfinite(weight.numpy()))
    ]
    if broken:
        raise ValueError(
            f"{len(broken)} weights hold NaN or infinity: {_some(broken)}. The training diverged; "
            f"go back to a checkpoint from before and lower the learning rate."
        )
    blind = [each.name for each in found if not each.calibrated]
    if blind:
        raise ValueError(
            f"{len(blind)} quantizers have seen no data yet: {_some(blind)}. Train the model "
            f"(fit, or calls with training=True) so that ranges are observed, then export."
        )


def _as_number(leaf: Any) -> Any:
    """An argument, a constant tensor as an array: names of tensors count up, and get into files."""
    return leaf.numpy() if isinstance(leaf, tf.__internal__.EagerTensor) else leaf


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
