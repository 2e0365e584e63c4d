"""Lowering: layers that do several things become several layers that do one each.

A layer with a built-in activation becomes the layer and an activation; a separable convolution
its depthwise and its pointwise convolution; swish x * sigmoid(x); a sum of three two sums of two.
After that, patterns have one form to match.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from keras_qat import graph as graph_lib
from keras_qat.backend import keras
from keras_qat.graph import Call, Graph, Value, class_path, is_operation, values_in
from keras_qat.hard_swish import recognize_hard_swish
from keras_qat.patterns import is_batch_norm, kind_of

__all__ = ["lower"]

_layers = keras.layers


class Made:
    """The layers that lowering made: for a shared layer, the same parts in each of its calls."""

    def __init__(self) -> None:
        self.weights: dict[Any, list[Any]] = {}
        self._layers: dict[tuple[Any, str], Any] = {}

    def layer(self, source: Any, part: str, make: Callable[[], Any], weights: Any = ()) -> Any:
        """The part of `source` with that name, made once; it starts from `weights`."""
        if (source, part) not in self._layers:
            layer = self._layers[source, part] = make()
            self.weights[layer] = list(weights)
        return self._layers[source, part]


def lower(graph: Graph, activations: bool = True) -> Graph:
    """`graph` with every layer split that `LOWERINGS` lists. Shared layers stay shared.

    Args:
        graph: the graph.
        activations: whether activations are brought into the form that the runtimes compute them
            in. `recipes.contrib` leaves them as they are, like the original.
    """
    made = Made()

    def expand(call: Call) -> list[Call]:
        lowering = LOWERINGS.get(type(call.layer)) or _APPLICATIONS.get(class_path(call.layer))
        if is_operation(call.layer):
            lowering = OPERATIONS.get(str(call.layer.symbol))
        if lowering in _OF_ACTIVATIONS and not activations:
            lowering = None
        parts = lowering(call, made) if lowering else []
        for part in parts:
            part.origin = call.origin
        return [each for part in parts for each in expand(part)] or [call]

    graph = recognize_hard_swish(graph) if activations else graph
    calls = [each for call in graph.calls for each in expand(call)]
    return _drop_identities(
        Graph(graph.name, graph.inputs, graph.outputs, graph.output_names, calls, made.weights)
    )


def _drop_identities(graph: Graph) -> Graph:
    """Without linear activations in front of a BatchNormalization, which would not be folded."""
    consumers = graph.consumers()
    outputs = values_in(graph.outputs)
    calls = {call: call for call in graph.calls}
    for call in graph.calls:
        if kind_of(call) != "linear" or len(consumers[call.output]) != 1:
            continue
        before, (reader,) = call.inputs[0].producer, consumers[call.output]
        if (
            before is not None
            and kind_of(before) == "kernel"
            and is_batch_norm(reader)
            and consumers[before.output] == [call]
            and before.output not in outputs
        ):
            calls[before] = Call(
                before.layer, before.args, before.kwargs, call.outputs, before.name
            )
            del calls[call]
    return dataclasses.replace(graph, calls=list(calls.values()))


def _chain(call: Call, *layers: Any) -> list[Call]:
    """Calls of layers one after the other, that together compute what `call` did."""
    calls: list[Call] = []
    args, kwargs = call.args, call.kwargs
    for layer in layers:
        if layer is layers[-1]:
            output = call.output
        else:
            shapes = tf.nest.map_structure(lambda value: value.shape, args[0])
            output = _between(call, layer, layer.compute_output_shape(shapes))
        calls.append(Call(layer, args, kwargs, output, _path(call, layer)))
        args, kwargs = (output,), {}
    return calls


def _path(call: Call, layer: Any) -> str:
    return call.name.removesuffix(call.layer.name) + layer.name


def _between(call: Call, layer: Any, shape: Any) -> Value:
    """A tensor inside of what `call` did, made by `layer`."""
    name = _path(call, layer)
    label = f"{name}_before_activation" if name == call.name else name
    return Value(label + call.output.name.removeprefix(call.name), tuple(shape), call.output.dtype)


def _split_activation(call: Call, made: Made) -> list[Call]:
    """conv(activation=f) -> conv, f. The layer keeps its name; the activation is named after it."""
    layer = call.layer
    if layer.activation in (None, keras.activations.linear):
        return []
    linear = made.layer(
        layer, "linear", lambda: graph_lib.clone(layer, activation="linear"), layer.weights
    )
    activation = _activation(layer, made)
    middle = _between(call, linear, call.output.shape)
    return [
        Call(linear, call.args, call.kwargs, middle, call.name),
        Call(activation, (middle,), {}, call.output, _path(call, activation)),
    ]


def _activation(layer: Any, made: Made) -> Any:
    def make() -> Any:
        name = f"{layer.name}_activation"
        return _layers.Activation(layer.activation, name=name, dtype=layer.dtype_policy)

    return made.layer(layer, "activation", make)


def _split_separable(call: Call, made: Made) -> list[Call]:
    """SeparableConv2D -> DepthwiseConv2D, Conv2D 1x1, and its activation if it has one."""
    layer = call.layer
    one_dimension = isinstance(layer, _layers.SeparableConv1D)
    depthwise_class = _layers.DepthwiseConv1D if one_dimension else _layers.DepthwiseConv2D
    pointwise_class = _layers.Conv1D if one_dimension else _layers.Conv2D
    shared: dict[str, Any] = {
        "data_format": layer.data_format,
        "dtype": layer.dtype_policy,
        "trainable": layer.trainable,
    }

    def depthwise() -> Any:
        return depthwise_class(
            layer.kernel_size,
            strides=layer.strides,
            padding=layer.padding,
            dilation_rate=layer.dilation_rate,
            depth_multiplier=layer.depth_multiplier,
            use_bias=False,
            depthwise_regularizer=layer.depthwise_regularizer,
            depthwise_constraint=layer.depthwise_constraint,
            name=f"{layer.name}_depthwise",
            **shared,
        )

    def pointwise() -> Any:
        return pointwise_class(
            layer.filters,
            1,
            use_bias=layer.use_bias,
            kernel_regularizer=layer.pointwise_regularizer,
            kernel_constraint=layer.pointwise_constraint,
            bias_regularizer=layer.bias_regularizer,
            bias_constraint=layer.bias_constraint,
            activity_regularizer=layer.activity_regularizer,
            name=layer.name,
            **shared,
        )

    bias = [layer.bias] if layer.use_bias else []
    parts = [
        made.layer(layer, "depthwise", depthwise, [layer.depthwise_kernel]),
        made.layer(layer, "pointwise", pointwise, [layer.pointwise_kernel, *bias]),
    ]
    if layer.activation not in (None, keras.activations.linear):
        parts.append(_activation(layer, made))
    return _chain(call, *parts)


def _merge_two_by_two(call: Call, made: Made) -> list[Call]:
    """A sum of n tensors as n - 1 sums of two, as the runtimes' kernels take no more than two."""
    if len(call.inputs) <= 2:
        return []
    merge: Any = type(call.layer)
    first, *others = call.inputs
    calls: list[Call] = []
    for index, other in enumerate(others, start=1):
        layer, output = call.layer, call.output
        if index < len(others):
            name = f"{call.layer.name}_part{index}"
            make = partial(merge, name=name, dtype=call.layer.dtype_policy)
            layer = made.layer(call.layer, name, make)
            shape = tf.broadcast_static_shape(*map(tf.TensorShape, (first.shape, other.shape)))
            output = _between(call, layer, shape)
        calls.append(Call(layer, ([first, other],), {}, output, _path(call, layer)))
        first = output
    return calls


def _split_average(call: Call, made: Made) -> list[Call]:
    """Average -> Add, Rescaling."""
    layer, count = call.layer, len(call.inputs)
    return _chain(
        call,
        made.layer(layer, "add", lambda: _layers.Add(name=f"{layer.name}_add")),
        made.layer(layer, "scale", lambda: _layers.Rescaling(1.0 / count, name=layer.name)),
    )


def _split_hard_sigmoid(call: Call, made: Made) -> list[Call]:
    """hard_sigmoid -> Rescaling(0.2, 0.5), ReLU(1), as Keras 2 defines it."""
    layer = call.layer
    name = f"{layer.name}_scale"
    return _chain(
        call,
        made.layer(layer, "scale", lambda: _layers.Rescaling(0.2, 0.5, name=name)),
        made.layer(layer, "clip", lambda: _layers.ReLU(1.0, name=layer.name)),
    )


def _split_activation_layer(call: Call, made: Made) -> list[Call]:
    """An activation that has no kernel, but whose parts have."""
    split = ACTIVATIONS.get(call.layer.activation)
    return split(call, made) if split else []


def _split_swish(call: Call, made: Made) -> list[Call]:
    """swish -> sigmoid, Multiply: TFLite has no kernel for it, but for its parts."""
    layer = call.layer
    name = f"{layer.name}_sigmoid"
    sigmoid = made.layer(layer, "sigmoid", lambda: _layers.Activation("sigmoid", name=name))
    multiply = made.layer(layer, "multiply", lambda: _layers.Multiply(name=layer.name))
    gate = _between(call, sigmoid, call.output.shape)
    return [
        Call(sigmoid, (call.inputs[0],), {}, gate, _path(call, sigmoid)),
        Call(multiply, ([call.inputs[0], gate],), {}, call.output, call.name),
    ]


ACTIVATIONS: dict[Any, Callable[[Call, Made], list[Call]]] = {
    keras.activations.swish: _split_swish,
    tf.nn.silu: _split_swish,
    keras.activations.hard_sigmoid: _split_hard_sigmoid,
}
"""Activation function -> what splits it."""


def _split_custom_scale(call: Call, made: Made) -> list[Call]:
    """InceptionResNetV2's CustomScaleLayer, a + scale * b -> Rescaling, Add."""
    layer, (a, b) = call.layer, call.inputs
    rescaling = made.layer(
        layer, "scale", lambda: _layers.Rescaling(layer.scale, name=f"{layer.name}_scale")
    )
    add = made.layer(layer, "add", lambda: _layers.Add(name=layer.name))
    scaled = _between(call, rescaling, b.shape)
    return [
        Call(rescaling, (b,), {}, scaled, _path(call, rescaling)),
        Call(add, ([a, scaled],), {}, call.output, call.name),
    ]


_APPLICATIONS = {"applications.inception_resnet_v2.CustomScaleLayer": _split_custom_scale}
"""Layers that keras.applications defines but does not export, by `graph.class_path`."""


def _operands(call: Call, *names: str) -> list[Any]:
    """The arguments of an operation by position, None for those that are not given."""
    given = list(call.args) + [None] * (len(names) - len(call.args))
    return [call.kwargs.get(name, each) for name, each in zip(names, given, strict=False)]


def _split_silu(call: Call, made: Made) -> list[Call]:
    (_, beta) = _operands(call, "features", "beta")
    return _split_swish(call, made) if beta in (None, 1.0) else []


def _split_negative(call: Call, made: Made) -> list[Call]:
    """-x -> Rescaling(-1)."""
    return [_rescaling(call, made, -1.0)]


def _split_division(call: Call, made: Made) -> list[Call]:
    """x / number -> Rescaling(1 / number)."""
    x, divisor = _operands(call, "x", "y")
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
    _, size, method, keeps_ratio, antialias = _operands(
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


OPERATIONS: dict[str, Callable[[Call, Made], list[Call]]] = {
    "nn.silu": _split_silu,
    "math.negative": _split_negative,
    "math.divide": _split_division,
    "math.truediv": _split_division,
    "__operators__.truediv": _split_division,
    "image.resize": _split_resize,
}
"""TensorFlow's name of an operation on symbolic tensors -> what splits it."""

_OF_ACTIVATIONS = (_split_activation_layer, *OPERATIONS.values())

LOWERINGS: dict[type, Callable[[Call, Made], list[Call]]] = {
    **dict.fromkeys(
        (
            _layers.Conv1D,
            _layers.Conv1DTranspose,
            _layers.Conv2D,
            _layers.Conv2DTranspose,
            _layers.DepthwiseConv1D,
            _layers.DepthwiseConv2D,
            _layers.Dense,
            _layers.EinsumDense,
        ),
        _split_activation,
    ),
    _layers.SeparableConv1D: _split_separable,
    _layers.SeparableConv2D: _split_separable,
    _layers.Add: _merge_two_by_two,
    _layers.Multiply: _merge_two_by_two,
    _layers.Average: _split_average,
    _layers.Activation: _split_activation_layer,
}
"""Layer class -> the calls that a call becomes, or none if it stays as it is."""
