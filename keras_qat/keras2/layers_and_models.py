"""Reads layers and models through private attributes of Keras."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from keras_qat.keras2 import configurations
from keras_qat.keras2.backend import KerasTensor, Node, keras, swap_attributes
from keras_qat.messages import KERAS, KNOWN, LIBRARIES, get_package

_PLAIN = (bool, int, float, str, tuple, list)
"""Types of constructor arguments that `_check_arguments` compares."""

_REGULARIZES = ("regularizer", "constraint", "regularizers", "constraints")
"""Names of attributes with regularizers or constraints end with these words."""


def is_of_keras(layer: object) -> bool:
    return get_package(type(layer)) in KERAS


def flatten_inputs(model: keras.Model, x: Any) -> list[tf.Tensor]:
    """Converts data to tensors with the order and data types of `model.inputs`."""
    flat = zip(model._flatten_to_reference_inputs(x), model.inputs, strict=True)
    return [
        model._conform_to_reference_input(tf.convert_to_tensor(tensor), ref_input=spec)
        for tensor, spec in flat
    ]


def set_known_sizes(model: keras.Model, x: Any) -> None:
    """Sets the shapes of symbolic data to the static shapes of a functional model's inputs.

    Unrolled layers need static shapes. Data from a `Sequence` or a generator has no static shapes.
    """
    for tensor, spec in zip(model._flatten_to_reference_inputs(x), model.inputs, strict=False):
        sizes = tf.TensorShape([None, *spec.shape[1:]]) if spec.shape.rank else spec.shape
        if not isinstance(tensor, tf.Tensor) or not tf.is_symbolic_tensor(tensor):
            continue
        if tensor.shape.rank == sizes.rank and tensor.shape.is_compatible_with(sizes):
            tensor.set_shape(sizes)


def list_layers(model: object) -> list[keras.layers.Layer]:
    """Returns a layer or model and all layers inside. Returns [] for any other object."""
    return list(getattr(model, "_flatten_layers", lambda: ())())


def list_sublayers(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """Returns the direct inner layers of a layer. Deeper layers are omitted."""
    return list(layer._flatten_layers(recursive=False, include_self=False))


def list_weights(layer: keras.layers.Layer) -> list[tf.Variable]:
    """Returns the weights, layer by layer. `layer.weights` would list trainable weights first."""
    layers = list_layers(layer)
    own = [[*inner._trainable_weights, *inner._non_trainable_weights] for inner in layers]
    unique = {id(weight): weight for weights in own for weight in weights}
    return list(unique.values())


def clone(layer: keras.layers.Layer, /, **changes: Any) -> keras.layers.Layer:
    """Creates an unbuilt copy of a layer from its configuration and `changes`.

    Raises:
        NotImplementedError, TypeError: if the configuration lacks arguments of the constructor.
    """
    if type(layer) is keras.layers.Lambda:  # The configuration may lack the function.
        shape, base = layer._output_shape, keras.layers.Layer.get_config(layer)
        return keras.layers.Lambda(
            layer.function, shape, layer.mask, layer.arguments, **{**base, **changes}
        )
    activation = vars(layer).get("activation")
    is_function = callable(activation) and not isinstance(activation, keras.layers.Layer)
    is_known = get_package(type(layer)) in KNOWN
    custom = find_custom_attributes(layer, vars(layer)) if is_known else {}
    without = tf.nest.map_structure(lambda _: None, custom)
    if is_function and not getattr(layer, "_auto_get_config", False):
        changes = {"activation": activation, **changes}
        without["activation"] = keras.activations.linear
    with swap_attributes(layer, **without):  # Some cannot be in a configuration.
        config = layer.get_config()
    changes = {**find_custom_attributes(layer, config), **changes}
    objects = configurations.collect_custom_objects(layer._flatten_layers())
    with configurations.deserialization_scope(objects):
        copy = _create(layer, {**config, **configurations.find_missing_config(layer), **changes})
    _check_arguments(layer, copy, {**config, **changes})
    return copy


def _create(layer: keras.layers.Layer, config: dict[str, Any]) -> keras.layers.Layer:
    """Create a layer. Set `name` and `trainable` later if the constructor lacks them."""
    parameters = inspect.signature(type(layer).__init__).parameters
    accepts_any = any(x.kind is x.VAR_KEYWORD for x in parameters.values())
    later: set[str] = set()
    if getattr(layer, "_auto_get_config", False) and not accepts_any:
        later = {"name", "trainable"} & config.keys() - parameters.keys()
    copy = type(layer).from_config({key: config[key] for key in config.keys() - later})
    if "name" in later:
        rename(copy, config["name"])
    if "trainable" in later:
        copy.trainable = config["trainable"]
    return copy


def _check_arguments(
    layer: keras.layers.Layer, copy: keras.layers.Layer, config: dict[str, Any]
) -> None:
    """Raise a `TypeError` if `get_config` of a custom layer omits a constructor argument.

    An argument counts as omitted if the attribute of the same name has another value in `copy`.
    """
    if get_package(type(layer)) in KNOWN:
        return
    for name in inspect.signature(type(layer).__init__).parameters:
        value = vars(layer).get(name)
        if name not in config and isinstance(value, _PLAIN) and vars(copy).get(name) != value:
            raise TypeError(f"get_config of {type(layer).__name__} does not return {name!r}")


def find_custom_attributes(layer: keras.layers.Layer, names: Iterable[str]) -> dict[str, Any]:
    """Returns a layer's custom regularizers and constraints, by attribute name.

    Copies of a layer share these objects, because a configuration may not restore them.
    """
    held = {
        name: getattr(layer, name, getattr(layer, f"_{name}", None))
        for name in names
        if name.endswith(_REGULARIZES)
    }
    return {
        name: value
        for name, value in held.items()
        if any(x is not None and not is_of_keras(x) for x in tf.nest.flatten(value))
    }


def find_custom_initializers(layer: keras.layers.Layer) -> list[str]:
    """Returns the names of a Keras layer's attributes that contain custom initializers."""
    if not is_of_keras(layer):
        return []
    return [
        name
        for name, value in vars(layer).items()
        if name.endswith("_initializer")
        and callable(value)
        and get_package(type(value)) not in LIBRARIES
    ]


def assign_reshaped(new: tf.Variable, old: tf.Variable | tf.Tensor) -> None:
    new.assign(tf.reshape(tf.cast(old, new.dtype), new.shape))


def rename(layer: keras.layers.Layer, name: str) -> None:
    """Renames a layer. The layer must not be in a model."""
    layer._name = name


def note_names(model: keras.Model, config: dict[str, Any]) -> None:
    """Adds the names of a model's layers to its configuration, in place.

    Keras omits the name of a layer if the constructor has no argument `name`. The loaded layer
    would get a new automatic name.
    """
    for layer, entry in _pair_configs(model, config):
        entry.setdefault("name", layer.name)


def restore_names(model: keras.Model, config: dict[str, Any]) -> None:
    """Renames the layers of a loaded model to the names in `config`."""
    for layer, entry in _pair_configs(model, config):
        if entry.get("name", layer.name) != layer.name:
            rename(layer, entry["name"])


def _pair_configs(
    model: keras.Model, config: dict[str, Any]
) -> Iterator[tuple[keras.layers.Layer, dict[str, Any]]]:
    """Yield each layer of a model and of nested models, with the layer's configuration."""
    layers = [item for item in model.layers if not isinstance(item, keras.layers.InputLayer)]
    entries = [entry for entry in config.get("layers", ()) if entry["class_name"] != "InputLayer"]
    for layer, entry in zip(layers, entries, strict=False):
        yield layer, entry
        if isinstance(layer, keras.Model) and "layers" in entry["config"]:
            yield from _pair_configs(layer, entry["config"])


def get_class_path(layer: keras.layers.Layer) -> str:
    """Returns the full name of a layer's class, without the prefix "keras.src."."""
    module = type(layer).__module__
    inside = module.split("keras.src.")[-1] if "keras.src." in module else module
    return f"{inside}.{type(layer).__name__}"


def get_nested_inputs(model: keras.Model) -> Any:
    """Returns the symbolic inputs of a model, in the structure that the model accepts."""
    return model.inputs[0] if isinstance(model, keras.Sequential) else model._nested_inputs


def get_nested_outputs(model: keras.Model) -> Any:
    """Returns the symbolic outputs of a model, in the structure that the model returns."""
    return model.outputs[0] if isinstance(model, keras.Sequential) else model._nested_outputs


def name_outputs(model: keras.Model, names: list[str]) -> None:
    """Sets `model.output_names` to a plain list. Keras would wrap the list to track it."""
    object.__setattr__(model, "output_names", list(names))


def get_output_names(model: keras.Model) -> list[str]:
    """Returns the names of a model's outputs. If the outputs are a dict, returns the keys.

    For a dict, `model.output_names` contains names of layers, sorted by the keys.
    """
    outputs, names = get_nested_outputs(model), list(model.output_names)
    if not isinstance(outputs, Mapping):
        return names
    paths = tf.__internal__.nest.yield_flat_paths(outputs)
    keys = ["_".join(map(str, path)) for path in paths]
    return keys if len(set(keys)) == len(names) else names


def set_outputs(model: keras.Model, outputs: Any) -> None:
    """Replaces the outputs of a functional model. The names of the outputs stay the same."""
    names = get_output_names(model)
    model._init_graph_network(model._nested_inputs, outputs)
    name_outputs(model, names)


def find_keras_consumers(tensor: KerasTensor) -> list[tuple[keras.layers.Layer, Any]]:
    """Returns pairs (layer, symbolic outputs) for the layers that read a symbolic tensor."""
    nodes = tensor._keras_history.layer.outbound_nodes
    consumers = [node for node in nodes if any(x is tensor for x in node.keras_inputs)]
    return [(node.layer, node.outputs) for node in consumers]


def list_nodes(model: keras.Model) -> list[Node]:
    """Returns Keras' nodes for the layer calls in a model, in the order of computation."""
    depths = sorted(model._nodes_by_depth, reverse=True)
    nodes = [node for depth in depths for node in model._nodes_by_depth[depth]]
    return [node for node in nodes if not node.is_input]


def take_nodes(outputs: list[KerasTensor]) -> list[Node]:
    """Returns Keras' nodes of the calls that `outputs` depend on, in the order of computation.

    Also removes the nodes from the layers. The layers can then be called in another model.
    """
    nodes = list(_find_nodes(outputs, set()))
    for layer in {id(node.layer): node.layer for node in nodes}.values():
        for known in (layer._inbound_nodes, layer._outbound_nodes):
            known[:] = [node for node in known if node not in nodes]
    return nodes


def _find_nodes(tensors: list[Any], seen: set[int]) -> Iterator[Node]:
    for tensor in tensors:
        if not isinstance(tensor, KerasTensor) or not hasattr(tensor, "_keras_history"):
            continue
        layer, index, _ = tensor._keras_history
        node = layer._inbound_nodes[index]
        if id(node) not in seen:
            seen.add(id(node))
            yield from _find_nodes(tf.nest.flatten((node.call_args, node.call_kwargs)), seen)
            yield node


def accepts_training(layer: keras.layers.Layer) -> bool:
    return bool(layer._call_spec.expects_training_arg)


def bind_options(
    layer: keras.layers.Layer, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Passes `training` and `mask` by keyword if they are positional arguments of a call.

    Arguments after them are also passed by keyword. Returns the new `args` and `kwargs`. If there
    are more `args` than parameters, nothing changes.
    """
    parameters = inspect.signature(layer.call).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    is_option = [name in ("training", "mask") for name in names[1 : len(args)]]
    if True not in is_option or len(args) > len(names):
        return args, kwargs
    first = 1 + is_option.index(True)
    return args[:first], {**dict(zip(names[first:], args[first:], strict=False)), **kwargs}


def name_inner_calls(layer: keras.layers.Layer) -> dict[int, str]:
    """Returns a dict `{id(inner layer): name}` for the layers inside a layer.

    Names that a user chose are kept. Automatic names such as `dense_3` differ between copies of a
    layer, so the name of the attribute is used instead. In an inner model, the name of the class
    is used, as in `model/dense`. Two layers may get the same name.
    """
    names: dict[int, str] = {}

    def visit(value: object, path: str) -> None:
        if isinstance(value, keras.layers.Layer):
            names.setdefault(id(value), path if _has_automatic_name(value) else value.name)
        elif isinstance(value, dict):
            for key, item in value.items():
                visit(item, f"{path}_{key}")
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                visit(item, f"{path}_{index}")

    for name, value in vars(layer).items():
        if not name.startswith(("_self_", "_obj", "_inbound", "_outbound")):
            visit(value, name.strip("_"))
    for model in layer._flatten_layers(include_self=False):
        if isinstance(model, keras.Model) and id(model) in names:
            for inner in model._flatten_layers(recursive=False, include_self=False):
                name = _name_class(inner) if _has_automatic_name(inner) else inner.name
                names.setdefault(id(inner), f"{names[id(model)]}/{name}")
    return names


def _has_automatic_name(layer: keras.layers.Layer) -> bool:
    return bool(re.fullmatch(re.escape(_name_class(layer)) + r"(_\d+)?", layer.name))


def _name_class(layer: keras.layers.Layer) -> str:
    words = re.sub(r"(.)([A-Z][a-z0-9]+)", r"\1_\2", type(layer).__name__)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", words).lower()


@contextlib.contextmanager
def use_attribute_names(layer: keras.layers.Layer) -> Iterator[None]:
    """Inside a `with` block, names the inner layers of custom layers after their attributes.

    Keras' automatic names differ in every copy, because the names include a global counter.
    """
    with contextlib.ExitStack() as stack:
        names = name_inner_calls(layer)
        for inner in layer._flatten_layers(include_self=False):
            if id(inner) in names and not (is_of_keras(layer) and is_of_keras(inner)):
                name = names[id(inner)].rsplit("/", 1)[-1]
                stack.enter_context(swap_attributes(inner, _name=name))
                stack.enter_context(use_attribute_names(inner))
        yield


@contextlib.contextmanager
def use_unique_names(layer: keras.layers.Layer) -> Iterator[None]:
    """Makes the names of all inner layers unique inside a `with` block.

    A Keras model requires unique names. Keras' counter starts again in `build`, so layers created
    in `build` may repeat earlier names.
    """
    used = set[str]()
    with contextlib.ExitStack() as stack:
        for inner in layer._flatten_layers(include_self=False):
            name, count = inner.name, 1
            while name in used:
                name, count = f"{inner.name}_{count}", count + 1
            used.add(name)
            stack.enter_context(swap_attributes(inner, _name=name))
        yield
