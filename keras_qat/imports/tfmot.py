"""Reads models that tfmot quantized."""

from __future__ import annotations

import json
import tempfile
import zipfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from keras_qat.graph.calls import Call, flatten_values
from keras_qat.graph.read_model import read_model
from keras_qat.graph.rebuild_model import rebuild_model
from keras_qat.keras2.backend import keras
from keras_qat.keras2.layers_and_models import clone

Range = tuple[float, float]
"""The least and the greatest real value."""


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


def load(path: Path) -> Any:
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
        return keras.models.load_model(str(path), compile=False)


def _load_archive(path: Path) -> Any:
    """Loads a `.keras` file, which Keras itself cannot: tfmot's layers would be built twice."""

    def without_shapes(config: dict[str, Any]) -> dict[str, Any]:
        config.pop("build_config", None)
        return config

    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
        config = json.loads(archive.read("config.json"), object_hook=without_shapes)
        model = keras.utils.deserialize_keras_object(config)
        for layer in model.layers:
            if _is(layer, "QuantizeWrapper"):
                # Past Keras, which would track it.
                object.__setattr__(layer, "load_own_variables", partial(_load_wrapper, layer))
        model.load_weights(archive.extract("model.weights.h5", folder))
    return model


def _load_wrapper(wrapper: Any, store: Any) -> None:
    """Loads a wrapper's own variables, before which the file has weights of the layer inside."""
    variables = [*wrapper._trainable_weights, *wrapper._non_trainable_weights]
    first = len(store) - len(variables)
    for index, variable in enumerate(variables, start=first):
        variable.assign(store[str(index)][()])


def _is(layer: Any, name: str) -> bool:
    """Whether a layer is of one of tfmot's classes, which need not be installed."""
    return any(
        kind.__name__ == name and kind.__module__.startswith("tensorflow_model_optimization")
        for kind in type(layer).__mro__
    )


def read(model: Any) -> tuple[Any, Quantization]:
    """Returns the float model inside a tfmot model, and how that was quantized.

    Raises:
        ValueError: if tfmot has not quantized the model, or it was not trained.
    """
    graph = read_model(model)
    if not any(_is(call.layer, "QuantizeWrapper") for call in graph.calls):
        raise ValueError(f"'{model.name}' was not quantized by tfmot: it has no QuantizeWrapper.")
    quantization = Quantization({}, {}, {}, [])
    copies: dict[Any, Any] = {}
    for call in graph.calls:
        layer = call.layer
        if layer in copies:
            continue
        if _is(layer, "QuantizeLayer"):
            (source,) = flatten_values(call.args)
            if layer.quantizer is not None:
                quantization.ranges[source.name] = _range(layer, layer.name)
        elif _is(layer, "QuantizeWrapper"):
            copies[layer] = _read_wrapper(layer, quantization)
        else:
            copies[layer] = clone(layer)
            quantization.float_layers.append(layer.name)

    def apply(call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
        return copies[call.layer](*args, **kwargs) if call.layer in copies else args[0]

    plain = rebuild_model(graph, apply=apply)
    for layer, copy in copies.items():
        values = {_last_part(weight): weight for weight in layer.weights}
        for weight in copy.weights:
            weight.assign(values[_last_part(weight)])
    inputs = {value.name for value in flatten_values(graph.inputs)}
    trained = [ends for name, ends in quantization.ranges.items() if name not in inputs]
    if set(trained) == {(-6.0, 6.0)}:  # What tfmot begins with.
        raise ValueError(f"'{model.name}' was not trained after tfmot quantized it.")
    return plain, quantization


def _read_wrapper(wrapper: Any, quantization: Quantization) -> Any:
    """Returns a copy of the layer in a wrapper, and notes its bits and ranges."""
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
    names = {_last_part(weight) for weight in wrapper.weights}
    for kind, tensor in (
        ("pre_activation", f"{layer.name}_before_activation"),
        ("post_activation", layer.name),
        ("output", layer.name),
    ):
        if f"{kind}_min" in names:
            quantization.ranges[tensor] = _range(wrapper, kind)
    activation: Any = getattr(layer, "activation", None)
    if type(activation).__name__ == "QuantizeAwareActivation":
        activation = activation.activation
    if type(activation).__name__ == "NoOpActivation":
        activation = keras.activations.linear
    return clone(layer, **({"activation": activation} if callable(activation) else {}))


def _range(layer: Any, prefix: str) -> Range:
    ends = {_last_part(weight): weight for weight in layer.weights}
    return float(ends[f"{prefix}_min"].numpy()), float(ends[f"{prefix}_max"].numpy())


def _last_part(weight: Any) -> str:
    return str(weight.name).split("/")[-1].removesuffix(":0")
