"""Reads models that tfmot quantized."""

from __future__ import annotations

import json
import tempfile
import zipfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from keras_qat.graph.calls import Call, flatten_values
from keras_qat.graph.read_model import read_model
from keras_qat.graph.rebuild_model import rebuild_model
from keras_qat.keras2.backend import keras
from keras_qat.keras2.layers_and_models import clone
from keras_qat.keras2.safe_loading import safe_scope, serialization

Range = tuple[float, float]
"""A range: the smallest and the largest float value."""


class Quantization(NamedTuple):
    """Quantization of a tfmot model.

    Args:
        ranges: name of a tensor of the float model -> its range.
        weight_bits: name of a layer -> bits of its weights.
        activation_bits: name of a layer -> bits of its output.
        float_layers: layers without quantization.
    """

    ranges: dict[str, Range]
    weight_bits: dict[str, int]
    activation_bits: dict[str, int]
    float_layers: list[str]


def load(path: Path) -> keras.Model:
    """Loads a model that tfmot quantized.

    Raises:
        ImportError: without tfmot.
    """
    try:
        import tensorflow_model_optimization as tfmot
    except ImportError as error:
        raise ImportError(
            f"Reading {path} needs tfmot's classes: pip install tensorflow-model-optimization"
        ) from error
    with tfmot.quantization.keras.quantize_scope():
        if path.suffix == ".keras":
            return _load_archive(path)
        with serialization.SafeModeScope(True):
            return keras.models.load_model(str(path), compile=False)


def _load_archive(path: Path) -> keras.Model:
    """Load a `.keras` file. Keras itself cannot, because it would build tfmot's layers twice."""

    def drop_shapes(config: dict[str, Any]) -> dict[str, Any]:
        config.pop("build_config", None)
        return config

    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
        config = json.loads(archive.read("config.json"), object_hook=drop_shapes)
        with safe_scope(config):
            model = keras.utils.deserialize_keras_object(config)
        for layer in model.layers:
            if _has_class(layer, "QuantizeWrapper"):
                # Bypasses Keras' attribute tracking.
                object.__setattr__(layer, "load_own_variables", partial(_load_wrapper, layer))
        model.load_weights(archive.extract("model.weights.h5", folder))
    return model


def _load_wrapper(wrapper: keras.layers.Layer, store: Any) -> None:
    """Load a wrapper's own variables. In the file, the inner layer's weights come before them."""
    variables = [*wrapper._trainable_weights, *wrapper._non_trainable_weights]
    first = len(store) - len(variables)
    for index, variable in enumerate(variables, start=first):
        variable.assign(store[str(index)][()])


def _has_class(layer: object, name: str) -> bool:
    """Return whether a layer has this class of tfmot. tfmot need not be installed."""
    return any(
        kind.__name__ == name and kind.__module__.startswith("tensorflow_model_optimization")
        for kind in type(layer).__mro__
    )


def read(model: keras.Model) -> tuple[keras.Model, Quantization]:
    """Returns the float model inside a tfmot model, and its quantization.

    Raises:
        ValueError: if tfmot has not quantized the model, or it was not trained.
    """
    graph = read_model(model)
    if not any(_has_class(call.layer, "QuantizeWrapper") for call in graph.calls):
        raise ValueError(f"'{model.name}' was not quantized by tfmot: it has no QuantizeWrapper.")
    quantization = Quantization({}, {}, {}, [])
    copies: dict[Any, Any] = {}
    for call in graph.calls:
        layer = call.layer
        if layer in copies:
            continue
        if _has_class(layer, "QuantizeLayer"):
            (source,) = flatten_values(call.args)
            if layer.quantizer is not None:
                quantization.ranges[source.name] = _read_range(layer, layer.name)
        elif _has_class(layer, "QuantizeWrapper"):
            copies[layer] = _read_wrapper(layer, quantization)
        else:
            copies[layer] = clone(layer)
            quantization.float_layers.append(layer.name)

    def apply(call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
        return copies[call.layer](*args, **kwargs) if call.layer in copies else args[0]

    plain = rebuild_model(graph, apply=apply)
    for layer, copy in copies.items():
        for weight, value in zip(copy.weights, _find_values(layer, copy), strict=True):
            weight.assign(value)
    inputs = {value.name for value in flatten_values(graph.inputs)}
    trained = [ends for name, ends in quantization.ranges.items() if name not in inputs]
    if set(trained) == {(-6.0, 6.0)}:  # tfmot's initial range.
        raise ValueError(f"'{model.name}' was not trained after tfmot quantized it.")
    return plain, quantization


def _find_values(layer: keras.layers.Layer, copy: keras.layers.Layer) -> list[tf.Variable]:
    """Return the weights of a layer in the order of its copy.

    Raises:
        ValueError: if a wrapper replaced weights of its layer, and two weights have the same name.
    """
    inner = layer.layer if _has_class(layer, "QuantizeWrapper") else layer
    if len(inner.weights) == len(copy.weights):
        return list(inner.weights)
    names = list(map(_get_short_name, copy.weights))
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ValueError(
            f"Layer '{inner.name}' has several weights named '{repeated[0]}', and tfmot does not "
            f"keep their order. Quantize only the other layers with tfmot "
            f"(quantize_annotate_layer), and let keras_qat quantize this one."
        )
    values = _name_weights(layer)
    return [values[name] for name in names]


def _read_wrapper(wrapper: keras.layers.Layer, quantization: Quantization) -> keras.layers.Layer:
    """Return a copy of the layer in a wrapper, and add its bits and ranges to a quantization."""
    layer, config = wrapper.layer, wrapper.quantize_config
    weights = [quantizer for _, quantizer in config.get_weights_and_quantizers(layer)]
    activations = [quantizer for _, quantizer in config.get_activations_and_quantizers(layer)]
    outputs = config.get_output_quantizers(layer)
    for bits, quantizers in (
        (quantization.weight_bits, weights),
        (quantization.activation_bits, [*activations, *outputs]),
    ):
        if quantizers and hasattr(quantizers[0], "num_bits"):
            bits[layer.name] = int(quantizers[0].num_bits)
    for kind, tensor in (
        ("pre_activation", f"{layer.name}_before_activation"),
        ("post_activation", layer.name),
        ("output", layer.name),
    ):
        if f"{kind}_min" in _name_weights(wrapper):
            quantization.ranges[tensor] = _read_range(wrapper, kind)
    activation: Any = getattr(layer, "activation", None)
    if type(activation).__name__ == "QuantizeAwareActivation":
        activation = activation.activation
    if type(activation).__name__ == "NoOpActivation":
        activation = keras.activations.linear
    return clone(layer, **({"activation": activation} if callable(activation) else {}))


def _read_range(layer: keras.layers.Layer, prefix: str) -> Range:
    ends = _name_weights(layer)
    return float(ends[f"{prefix}_min"].numpy()), float(ends[f"{prefix}_max"].numpy())


def _name_weights(layer: keras.layers.Layer) -> dict[str, tf.Variable]:
    return {_get_short_name(weight): weight for weight in layer.weights}


def _get_short_name(weight: tf.Variable) -> str:
    return str(weight.name).split("/")[-1].removesuffix(":0")
