"""Models that users make of quantize-aware layers: cut from a quantized model, or built on one."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_qat.keras2.backend import keras
from keras_qat.keras2.layers_and_models import (
    find_keras_consumers,
    get_nested_inputs,
    get_nested_outputs,
    list_layers,
    set_outputs,
)
from keras_qat.rewriting.quantized_model import QuantizedModel
from keras_qat.training.layers import Quantize
from keras_qat.training.schedule import recipe_of, scheduled_layers
from keras_qat.training.scheduled_layer import ScheduledLayer
from keras_qat.training.steps.custom_training import class_config, derived_class, trains_itself


def make_exact(model: keras.Model) -> None:
    """Makes a plain model of quantize-aware layers predict what its file computes, in place.

    Its class becomes `QuantizedModel`. Its layers, weights, names and what it was compiled with
    stay. Recipe, kernels and target are those of the model that the layers were made for. An output
    that a quantizer reads in that model is quantized by it.

    Args:
        model: a functional or Sequential model, such as `keras.Model(qat.inputs, inner)`.
    """
    outputs = tf.nest.map_structure(_quantized, get_nested_outputs(model))
    # Keras changes the bases of a class when it makes the first functional model of it.
    QuantizedModel(inputs=get_nested_inputs(model), outputs=outputs)
    trained_as = class_config(model) if trains_itself(model) else None
    derive: Any = derived_class  # Classes have hashes, which mypy does not know.
    model.__class__ = derive(QuantizedModel, type(model)) if trained_as else QuantizedModel
    model.train_function = model.test_function = model.predict_function = None
    set_outputs(model, outputs)
    object.__setattr__(model, "trained_as", trained_as)
    object.__setattr__(model, "float_config", None)
    model.recipe = recipe_of(model)
    if (owner := _owner(model)) is not None:
        model.kernels, model.target = owner.kernels, owner.target
        model.pack_int4 = owner.pack_int4


def _quantized(output: tf.Tensor) -> Any:
    """Returns what the quantizer behind an output returns; without one the output itself."""
    behind = [
        outputs for layer, outputs in find_keras_consumers(output) if isinstance(layer, Quantize)
    ]
    return behind[0] if behind else output


def _owner(model: keras.Model) -> QuantizedModel | None:
    """Returns the model that the layers of another one were made for, if it still exists."""
    inside = [layer for layer in list_layers(model)[1:] if isinstance(layer, QuantizedModel)]
    made_for = (layer.made_for() for layer in scheduled_layers(model) if layer.made_for)
    return next((owner for owner in [*inside, *made_for] if owner is not None), None)


ScheduledLayer.make_exact = staticmethod(make_exact)
