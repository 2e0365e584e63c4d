"""Reads recorded runs of `tf.contrib.quantize`, and builds a Keras model for each.

A `Case` reads a recorded run, builds its Keras model, quantizes it with `recipes.contrib`, and maps
the names of the record to the model's variables. `data/README.md` describes the format.
"""

import functools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

import keras_qat
from keras_qat.keras2.backend import keras
from keras_qat.layers import QuantizeWrapper
from keras_qat.training.schedule import list_scheduled_layers

FOLDER = Path(os.environ.get("KERAS_QAT_REFERENCE", Path(__file__).parent / "data"))

ARGUMENTS = {
    "Conv2D": ("filters", "kernel_size", "strides", "padding", "dilation_rate", "use_bias"),
    "DepthwiseConv2D": (
        *("kernel_size", "strides", "padding", "dilation_rate", "depth_multiplier", "use_bias"),
    ),
    "SeparableConv2D": (
        *("filters", "kernel_size", "strides", "padding", "dilation_rate", "depth_multiplier"),
        "use_bias",
    ),
    "Dense": ("units", "use_bias"),
    "BatchNormalization": ("epsilon", "momentum", "scale", "center"),
    "ReLU": ("max_value",),
    "LeakyReLU": ("alpha",),
    "Activation": ("activation",),
    "MaxPooling2D": ("pool_size", "strides", "padding"),
    "AveragePooling2D": ("pool_size", "strides", "padding"),
    "Reshape": ("target_shape",),
    "Concatenate": ("axis",),
}
"""Layer class -> the keys of a manifest's layer that are its arguments."""


def case_files(operations: bool) -> list[str]:
    """Returns the names of the cases in the folder: of single operations, or of models."""
    manifests = sorted(FOLDER.glob("*.json"))
    return [
        path.stem for path in manifests if ("configs" in json.loads(path.read_text())) == operations
    ]


class Case:
    """One recorded run of a model."""

    def __init__(self, name: str) -> None:
        self.manifest = json.loads((FOLDER / f"{name}.json").read_text())
        self.arrays = np.load(FOLDER / f"{name}.npz")
        self.steps = self.manifest["steps"]
        self.is_quirk = bool(self.manifest["notes"])

    @functools.cached_property
    def model(self) -> Any:
        tensors: dict[str, Any] = {}
        inputs = []
        for layer in self.manifest["layers"]:
            name = layer["name"]
            if layer["class"] == "Input":
                tensors[name] = keras.Input(layer["shape"], name=name)
                inputs.append(tensors[name])
                continue
            arguments = {
                key: layer[key] for key in ARGUMENTS.get(layer["class"], ()) if key in layer
            }
            made = getattr(keras.layers, layer["class"])(name=name, **arguments)
            read = [tensors[item] for item in layer["inputs"]]
            tensors[name] = made(read[0] if len(read) == 1 else read)
        return keras.Model(inputs, tensors[self.manifest["layers"][-1]["name"]])

    @functools.cached_property
    def quantized(self) -> Any:
        """The quantization-aware model, with the record's initial values."""
        options = dict(self.manifest["training_options"])
        scope = options.pop("scope", None)
        recipe = keras_qat.recipes.contrib(**options)
        return keras_qat.quantize_model(self.model, recipe, scope=scope)

    @functools.cached_property
    def weights(self) -> dict[str, Any]:
        """`layer/weight` as in the record -> variable of the quantized model."""
        result = {}
        for layer in self.quantized.layers:
            inner = layer.sublayers if isinstance(layer, QuantizeWrapper) else [layer]
            for value in inner:
                for variable in value.weights:
                    result[_record_name(value, variable, self.manifest["weights"])] = variable
        return {name: result[name] for name in self.manifest["weights"]}

    @functools.cached_property
    def quantizers(self) -> dict[str, Any]:
        """Id of a quantizer in the record -> the model's quantizer."""
        weights, tensors = {}, {}
        for layer in list_scheduled_layers(self.quantized):
            if isinstance(layer, QuantizeWrapper):
                for name, quantizer in layer.weight_quantizers.items():
                    variable = getattr(layer.layer, name)
                    weights[_record_name(layer.layer, variable, self.manifest["weights"])] = (
                        quantizer
                    )
                if layer.output_quantizer is not None:
                    tensors[layer.tensor] = layer.output_quantizer
            else:
                (tensor,) = layer.tensors
                tensors[tensor] = layer.quantizer
        result = {}
        for row in self.manifest["placement"]:
            if row["weight"] is not None:
                result[row["id"]] = weights.pop(row["weight"])
            else:
                suffix = "_depthwise" if row["producer_kind"] == "depthwise_output" else ""
                result[row["id"]] = tensors.pop(row["producer_layer"] + suffix)
        assert not weights and not tensors, f"quantizers not in the record: {weights} {tensors}"
        return result

    @functools.cached_property
    def state(self) -> dict[str, Any]:
        """Name of each recorded variable -> variables of the model. The step has several."""
        state = dict(self.weights)
        for name, quantizer in self.quantizers.items():
            observer = getattr(quantizer, "observer", None) or quantizer.observers[0]
            state[f"{name}/min"], state[f"{name}/max"] = observer.minimum, observer.maximum
            for end, (biased, local_step) in getattr(observer, "shadows", {}).items():
                state[f"{name}/{end}_biased"] = biased
                state[f"{name}/{end}_local_step"] = local_step
        return state

    def recorded(self, name: str, step: int) -> np.ndarray:
        """Returns a variable's value before training step `step`, counted from 0."""
        return self.arrays[f"train/var/{name}"][step]

    def load_state(self, step: int) -> None:
        """Sets the model to the state of the original before training step `step`."""
        for name, variable in self.state.items():
            variable.assign(self.recorded(name, step))
        for layer in list_scheduled_layers(self.quantized):
            layer.step.assign(step)

    def loss(self, output: Any) -> Any:
        """Computes the recorded loss."""
        import tensorflow as tf

        if "loss_projection" in self.arrays:
            return tf.reduce_mean(output * self.arrays["loss_projection"])
        return tf.reduce_mean(output**2)


def _record_name(layer: Any, variable: Any, names: Any) -> str:
    """Returns the record's name for a variable of a layer in the quantized model."""
    weight = variable.name.split("/")[-1].split(":")[0]
    name = layer.name.removeprefix("quant_")
    base = name.removesuffix("_depthwise")
    if f"{name}/{weight}" in names:
        return f"{name}/{weight}"
    return (
        f"{base}/depthwise_kernel" if weight == "depthwise_kernel" else f"{name}/pointwise_kernel"
    )
