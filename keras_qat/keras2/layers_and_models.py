"""What Keras layers and models consist of, read from attributes that are private to Keras."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from keras_qat.keras2 import backend, configurations
from keras_qat.keras2.backend import keras
from keras_qat.keras2.layer_names import is_of_keras
from keras_qat.messages import KNOWN, LIBRARIES, get_package

_PLAIN = (bool, int, float, str, tuple, list)
"""Types of arguments that are compared with `!=`."""


def flat_inputs(model: Any, x: Any) -> list[Any]:
    """Returns data for a functional model as tensors in its input order and of its types."""
    flat = zip(model._flatten_to_reference_inputs(x), model.inputs, strict=True)
    return [
        model._conform_to_reference_input(tf.convert_to_tensor(tensor), ref_input=spec)
        for tensor, spec in flat
    ]


def set_known_sizes(model: Any, x: Any) -> None:
    """Gives symbolic data the sizes of a functional model's inputs.

    Data from a `Sequence` or a generator come without any, which recurrent layers unroll by.
    """
    for tensor, spec in zip(model._flatten_to_reference_inputs(x), model.inputs, strict=False):
        sizes = tf.TensorShape([None, *spec.shape[1:]]) if spec.shape.rank else spec.shape
        if not isinstance(tensor, tf.Tensor) or not tf.is_symbolic_tensor(tensor):
            continue
        if tensor.shape.rank == sizes.rank and tensor.shape.is_compatible_with(sizes):
            tensor.set_shape(sizes)


def list_layers(model: Any) -> list[Any]:
    """Returns a layer or model and all layers inside it; nothing for any other object."""
    return list(getattr(model, "_flatten_layers", lambda: ())())


def list_sublayers(layer: Any) -> list[Any]:
    """Returns the layers that are attributes of a layer, without those inside of these."""
    return list(layer._flatten_layers(recursive=False, include_self=False))


def list_weights(layer: Any) -> list[Any]:
    """Returns a layer's own weights, then its inner layers', whatever is trainable."""
    own = [
        [*inner._trainable_weights, *inner._non_trainable_weights] for inner in list_layers(layer)
    ]
    unique = {id(weight): weight for weights in own for weight in weights}
    return list(unique.values())


def clone(layer: Any, /, **changes: Any) -> Any:
    """Makes an unbuilt copy of a layer from its configuration, with some entries changed.

    Raises:
        NotImplementedError, TypeError: if the configuration lacks arguments of the constructor.
    """
    if type(layer) is keras.layers.Lambda:  # Its function may be one that no config can hold.
        shape, base = layer._output_shape, keras.layers.Layer.get_config(layer)
        return keras.layers.Lambda(
            layer.function, shape, layer.mask, layer.arguments, **{**base, **changes}
        )
    activation = vars(layer).get("activation")
    is_function = callable(activation) and not isinstance(activation, keras.layers.Layer)
    own = find_custom_attributes(layer, vars(layer)) if get_package(type(layer)) in KNOWN else {}
    without = tf.nest.map_structure(lambda _: None, own)
    if is_function and not getattr(layer, "_auto_get_config", False):
        changes = {"activation": activation, **changes}
        without["activation"] = keras.activations.linear
    with backend.swap_attributes(layer, **without):  # A config may be unable to hold them.
        config = layer.get_config()
    changes = {**find_custom_attributes(layer, config), **changes}
    with configurations.deserialization_scope(
        configurations.collect_custom_objects(layer._flatten_layers())
    ):
        copy = _made_like(layer, {**config, **configurations.find_missing_config(layer), **changes})
    _check_arguments(layer, copy, {**config, **changes})
    return copy


def _check_arguments(layer: Any, copy: Any, config: dict[str, Any]) -> None:
    """Raises a `TypeError` if a copy has a default in place of an argument of the layer.

    These are arguments of a user's constructor that the layer keeps under their names.
    """
    if get_package(type(layer)) in KNOWN:
        return
    for name in inspect.signature(type(layer).__init__).parameters:
        value = vars(layer).get(name)
        if name not in config and isinstance(value, _PLAIN) and vars(copy).get(name) != value:
            raise TypeError(f"get_config of {type(layer).__name__} does not return {name!r}")


def assign_reshaped(new: Any, old: Any) -> None:
    """Gives a weight the numbers of another, which may have another type or split its axes."""
    new.assign(tf.reshape(tf.cast(old, new.dtype), new.shape))


def _made_like(layer: Any, config: dict[str, Any]) -> Any:
    """Makes a layer of a layer's class, whose constructor may take no name."""
    taken = inspect.signature(type(layer).__init__).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    later: set[str] = set()
    if getattr(layer, "_auto_get_config", False) and not takes_any:
        later = {"name", "trainable"} & config.keys() - taken.keys()
    made = type(layer).from_config({key: config[key] for key in config.keys() - later})
    if "name" in later:
        rename(made, config["name"])
    if "trainable" in later:
        made.trainable = config["trainable"]
    return made


def find_custom_attributes(layer: Any, names: Iterable[str]) -> dict[str, Any]:
    """Returns a user's functions and objects that regularize or constrain, by those of the names.

    The configuration of a layer has the names of the former, and may have one of the latter that
    their class does not take.
    """
    ends = ("regularizer", "constraint", "regularizers", "constraints")
    held = {
        name: getattr(layer, name, getattr(layer, f"_{name}", None))
        for name in names
        if name.endswith(ends)
    }
    return {
        name: value
        for name, value in held.items()
        if any(x is not None and not is_of_keras(x) for x in tf.nest.flatten(value))
    }


def find_custom_initializers(layer: Any) -> list[str]:
    """Returns the arguments of a layer of Keras that are initializers of a user's own."""
    if not is_of_keras(layer):
        return []
    return [
        name
        for name, value in vars(layer).items()
        if name.endswith("_initializer")
        and callable(value)
        and get_package(type(value)) not in LIBRARIES
    ]


def rename(layer: keras.layers.Layer, name: str) -> None:
    """Renames a layer that is in no model."""
    layer._name = name


def name_outputs(model: Any, names: list[str]) -> None:
    """Names a model's outputs, past Keras, which would track the list among its layers."""
    object.__setattr__(model, "output_names", list(names))


def get_output_names(model: Any) -> list[str]:
    """Returns the names of a model's outputs: the keys of a dict, else those that Keras gave them.

    Keras' names for a dict are of layers, and in the order of the sorted keys.
    """
    outputs, names = get_nested_outputs(model), list(model.output_names)
    if not isinstance(outputs, Mapping):
        return names
    paths = tf.__internal__.nest.yield_flat_paths(outputs)
    keys = ["_".join(map(str, path)) for path in paths]
    return keys if len(set(keys)) == len(names) else names


def find_keras_consumers(tensor: Any) -> list[tuple[Any, Any]]:
    """Returns the calls that read a symbolic tensor: each layer with its symbolic outputs."""
    nodes = tensor._keras_history.layer.outbound_nodes
    readers = [node for node in nodes if any(x is tensor for x in node.keras_inputs)]
    return [(node.layer, node.outputs) for node in readers]


def set_outputs(model: Any, outputs: Any) -> None:
    """Makes a functional model return other symbolic tensors, under the names of its outputs."""
    names = get_output_names(model)
    model._init_graph_network(model._nested_inputs, outputs)
    name_outputs(model, names)


def get_class_path(layer: Any) -> str:
    """Returns the module path of a layer class that Keras does not export."""
    module = type(layer).__module__
    inside = module.split("keras.src.")[-1] if "keras.src." in module else module
    return f"{inside}.{type(layer).__name__}"


def get_nested_inputs(model: Any) -> Any:
    """Returns the symbolic inputs of a model, in the structure that it takes."""
    return model.inputs[0] if isinstance(model, keras.Sequential) else model._nested_inputs


def get_nested_outputs(model: Any) -> Any:
    """Returns the symbolic outputs of a model, in the structure that it returns."""
    return model.outputs[0] if isinstance(model, keras.Sequential) else model._nested_outputs


def list_nodes(model: Any) -> list[Any]:
    """Returns Keras' nodes for the layer calls in a model, in the order of computation."""
    depths = sorted(model._nodes_by_depth, reverse=True)
    nodes = [node for depth in depths for node in model._nodes_by_depth[depth]]
    return [node for node in nodes if not node.is_input]


def accepts_training(layer: Any) -> bool:
    """Returns whether a layer computes differently in training."""
    return bool(layer._call_spec.expects_training_arg)


def bind_options(layer: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns a call's arguments with `training` and `mask`, and those after them, by name.

    The first argument and calls with more arguments than names (`*args`) stay unchanged.
    """
    parameters = inspect.signature(layer.call).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    given = [name in ("training", "mask") for name in names[1 : len(args)]]
    if True not in given or len(args) > len(names):
        return args, kwargs
    first = 1 + given.index(True)
    return args[:first], {**dict(zip(names[first:], args[first:], strict=False)), **kwargs}
