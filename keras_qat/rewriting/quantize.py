"""The function `quantize_model`, and support for models that users build from quantized layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from keras_qat.config import recipes
from keras_qat.config.arguments import switch
from keras_qat.config.recipe import Recipe
from keras_qat.config.targets import Target
from keras_qat.config.targets.target import settings
from keras_qat.graph.precision import use_float32
from keras_qat.imports.keras3 import as_keras_2
from keras_qat.imports.read_float import read_float
from keras_qat.keras2.backend import keras
from keras_qat.keras2.configurations import deserialization_scope
from keras_qat.keras2.layers_and_models import (
    find_keras_consumers,
    get_nested_inputs,
    get_nested_outputs,
    list_layers,
    set_outputs,
)
from keras_qat.messages import warn_caller
from keras_qat.placement import place
from keras_qat.placement.plan import Plan, report_float_layers
from keras_qat.placement.settings import NOT_IN_FILE, Scope
from keras_qat.rewriting.check_values import find_differing_outputs
from keras_qat.rewriting.quantized_model import QuantizedModel
from keras_qat.rewriting.rewrite import rewrite
from keras_qat.rewriting.saving import warn_about_opaque
from keras_qat.training.distribution import strategy_scope
from keras_qat.training.layers import Quantize
from keras_qat.training.schedule import (
    check_is_graph,
    get_recipe,
    is_quantized,
    list_scheduled_layers,
)
from keras_qat.training.scheduled_layer import ScheduledLayer
from keras_qat.training.steps.custom_training import (
    derive_class,
    find_weight_attributes,
    get_class_config,
    trains_itself,
)


def quantize_model(
    model: Any,
    recipe: str | Recipe | None = None,
    *,
    scope: Scope | None = None,
    strict: bool = False,
    kernels: str | None = None,
    target: str | Target | None = None,
    inputs: Any = None,
    outputs: Iterable[str] | None = None,
) -> QuantizedModel:
    """Makes a quantization-aware copy of a float model.

    The copy has the weights, `trainable` flags, input and output names, and `tf.distribute`
    strategy of the float model. Names of layers get the prefix `quant_`. Compile the copy before
    training. Before training or `calibrate`, activations have no ranges and are not quantized.

    Args:
        model: a built Sequential or functional Keras 2 model, or a subclassed model. It is not
            changed. The `call` of a subclassed model must accept symbolic tensors. If the model's
            class has custom training, such as a `train_step`, the copy is an instance of the class.
            A quantized model is copied. A Keras model of quantized layers, such as an encoder, is
            copied too. `predict` of that copy returns the same values as the exported file. A
            Keras 3 model is converted by `from_keras_3`, with a warning.
        recipe: a recipe or its name. The default is the target's, or "int8" without a target.
        scope: selects the layers to quantize. The default is all layers. The scope is a name, the
            start of names up to a `_`, `/`, `.` or `-`, a pattern with `*`, or a class name. It
            may also be a list of these, or a function of a layer.
        strict: True to raise an error if a layer would stay in float. LayerNormalization and
            similar layers then compute in integers. By default, they stay in float.
        kernels: the kernel family that determines how `predict` and `evaluate` round: "xnnpack"
            (x86), "xnnpack_arm64" (phones with 64-bit ARM), "tflm" (TFLite Micro) or "reference"
            (TFLite's portable kernels). The default is the target's family, or "xnnpack" without a
            target. The attribute `kernels` of the model can be changed later. Training ignores
            `kernels`, except for an LSTM with 16-bit activations. Only "tflm" computes that LSTM in
            integers.
        target: the device or runtime: "xnnpack", "tflm", "cmsis_nn", "ethos_u55", "ethos_u65",
            "ethos_u85", "edgetpu", "stm32_npu", "stm32n6", "neutron", "mediatek", "esp_nn",
            "coral_npu", a `keras_qat.targets.Target`, or None. The target sets recipe and kernels.
            `export_tflite` writes files for the target. `plan` lists unsupported operators.
        inputs: symbolic inputs for a subclassed model that was not called yet. One
            `keras.Input(shape)`, or a list or dict of inputs.
        outputs: names of the tensors at which exported files end. `plan` lists the names. The
            default is the model's outputs. Later layers, such as layers that decode boxes, are
            trained in float and are not exported.

    Returns:
        The quantization-aware model, not compiled.

    Raises:
        TypeError: for an argument such as `bits`, which belongs to the recipe, and if `strict` is
            not a bool.
        ValueError: if the model cannot be read, is quantized with another recipe, or has empty or
            float64 tensors. Or if an entry of `scope` or `outputs` matches no layer. Or if `strict`
            and a layer stays in float. Or if `kernels` or `target` is unknown or contradicts
            another argument.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="logits")])
        >>> [layer.name for layer in keras_qat.quantize_model(model).layers]
        ['input_1', 'input_1_quant', 'quant_logits']
    """
    strict = switch("strict", strict)
    if is_quantized(model):
        given = {"kernels": kernels, "target": target, "scope": scope, "outputs": outputs}
        given = {name: value for name, value in given.items() if not _agrees(model, name, value)}
        return _copy_quantized(model, recipe, list(given))
    recipe, family, known_target = settings(recipe, kernels, target)
    original = as_keras_2(model)
    model, graph = read_float(original, inputs, recipe.activations.bits < 16)
    plan = place(graph, recipe, scope, family, outputs, known_target, strict)
    in_file = {name: why for name, why in plan.float_layers.items() if why != NOT_IN_FILE}
    if strict and in_file:
        lines = [f"  {name}: {reason}" for name, reason in in_file.items()]
        raise ValueError(
            f"{len(lines)} layer{'s' * (len(lines) > 1)} of '{model.name}' would stay in float:\n"
            + "\n".join(lines)
            + "\nPass strict=False to compute them in float."
        )
    with use_float32(), strategy_scope(model):
        qat = rewrite(plan, model)
    if trains_itself(original):
        qat.keep_training(original, find_weight_attributes(original, plan.graph))
    qat.kernels = family.name
    qat.target = known_target
    warn_about_opaque(plan.graph, plan.float_layers)
    _show_in_float(plan, model.name)
    qat.differing_outputs = find_differing_outputs(graph, plan.graph, qat)
    qat.told_of_float = True
    if not is_quantized(qat):
        warn_caller(
            f"recipe {recipe.name} quantizes nothing in '{model.name}', so it stays a float model. "
            f"keras_qat.plan(model, recipe) lists the reason for each layer."
        )
    return qat


def _show_in_float(plan: Plan, name: str) -> None:
    reasons = {
        name: why for name, why in plan.left_in_float.items() if name not in plan.graph.opaque
    }
    calls = (call for call in plan.graph.calls if call.name in reasons)
    layers = [(call.source, reasons[call.name]) for call in calls]
    report_float_layers(layers, f"'{name}' keeps", "keras_qat.plan(model) shows where.")


def _agrees(model: keras.Model, name: str, value: object) -> bool:
    if not value:
        return True
    if name == "target":
        own = getattr(model, "target", None)
        return own is not None and value in (own, own.name)
    return name == "kernels" and value == getattr(model, "kernels", None)


def _copy_quantized(
    model: keras.Model, recipe: str | Recipe | None, given: list[str]
) -> QuantizedModel:
    """Copy a quantized model, or a Keras model built from quantized layers.

    Raises:
        ValueError: if `recipe` is not the model's recipe. Or if the user passed arguments for
            float models, with the names `given`.
    """
    check_is_graph(model)
    if not isinstance(model, QuantizedModel):
        make_exact(model)
    used: Recipe | None = model.recipe
    asked = None if recipe is None else recipes.get(recipe)
    if asked and (used is None or dataclasses.replace(used, without_float=False) != asked):
        how = "" if used is None else f" with recipe '{used.name}' and other settings"
        raise ValueError(
            f"'{model.name}' is already quantized{how}. Quantize its float model instead."
        )
    if given:
        raise ValueError(
            f"{given[0]}= is for float models, and '{model.name}' is already quantized. Quantize "
            f"the float model again with {given[0]}=. To use a part of this model, such as an "
            f"embedding, pass keras.Model(qat.inputs, qat.get_layer('quant_embedding').output)."
        )
    with strategy_scope(model), deserialization_scope(model.customs):
        copy = type(model).from_config(model.get_config())
    copy.set_weights(model.get_weights())
    copy.safe_mode = model.safe_mode
    return copy


def make_exact(model: keras.Model) -> None:
    """Changes a model that was built from layers of a quantized model to a `QuantizedModel`.

    The model is changed in place. `predict` then returns the same values as the exported file.
    Recipe, kernels and target are copied from the quantized model. If a `Quantize` layer reads an
    output in the quantized model, the result of this layer becomes the output.
    """
    outputs = tf.nest.map_structure(_quantize_output, get_nested_outputs(model))
    # Keras changes the bases of a class when the first functional model of the class is created.
    QuantizedModel(inputs=get_nested_inputs(model), outputs=outputs)
    trained_as = get_class_config(model) if trains_itself(model) else None
    derive: Any = derive_class  # Classes are hashable, which mypy does not know.
    model.__class__ = derive(QuantizedModel, type(model)) if trained_as else QuantizedModel
    model.train_function = model.test_function = model.predict_function = None
    set_outputs(model, outputs)
    model.set_untracked(trained_as=trained_as, float_config=None)
    model.recipe = get_recipe(model)
    if (owner := _find_owner(model)) is not None:
        model.kernels, model.target = owner.kernels, owner.target
        model.pack_int4 = owner.pack_int4


def _quantize_output(output: tf.Tensor) -> tf.Tensor:
    quantized = [
        outputs for layer, outputs in find_keras_consumers(output) if isinstance(layer, Quantize)
    ]
    return quantized[0] if quantized else output


def _find_owner(model: keras.Model) -> QuantizedModel | None:
    inside = [layer for layer in list_layers(model)[1:] if isinstance(layer, QuantizedModel)]
    made_for = (layer.made_for() for layer in list_scheduled_layers(model) if layer.made_for)
    return next((owner for owner in [*inside, *made_for] if owner is not None), None)


ScheduledLayer.make_exact = staticmethod(make_exact)
