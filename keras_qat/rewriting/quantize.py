"""The verbs that users call on models."""

from __future__ import annotations

import warnings
from typing import Any

from keras_qat.config.recipes import Recipe
from keras_qat.config.targets import Target
from keras_qat.config.targets.target import settings
from keras_qat.frontend.keras2.precision import float32_policy
from keras_qat.frontend.keras2.read_float import read_float
from keras_qat.frontend.keras2.serialization import warn_of_closed
from keras_qat.frontend.keras3 import as_keras_2
from keras_qat.placement import place
from keras_qat.placement.layer_selection import Scope
from keras_qat.rewriting.quantized_model import QuantizedModel
from keras_qat.rewriting.rewrite import rewrite
from keras_qat.training.distribution import strategy_scope
from keras_qat.training.schedule import is_quantized

__all__ = ["quantize_model"]


def quantize_model(
    model: Any,
    recipe: str | Recipe | None = None,
    *,
    scope: Scope | None = None,
    strict: bool = False,
    kernels: str | None = None,
    target: str | Target | None = None,
    inputs: Any = None,
) -> QuantizedModel:
    """Makes a quantization-aware copy of a float model.

    The copy has the float model's weights, layer names (with the prefix `quant_`), `trainable`
    flags, input and output names, and its `tf.distribute` strategy; compile it anew. A quantizer
    that has seen no data passes values through, so before training only the weights are quantized.

    Args:
        model: a built Sequential or functional Keras 2 model, or a subclassed one whose `call`
            takes symbolic tensors. It is not changed. A model that
            was quantized with the same recipe gives an equal copy. Of one of Keras 3 it is what
            `from_keras_3` makes of it, with a warning that says so.
        recipe: a recipe or its name; by default the target's, without one "int8".
        scope: the layers to quantize: a name, the beginning of names up to a `_`, `/`, `.` or
            `-`, a pattern with `*`, a class name, a list of those, or a function that takes a
            layer. All layers by default.
        strict: whether a layer that would stay in float is an error.
        kernels: whose rounding `predict` and `evaluate` have: "xnnpack" (phones, desktops),
            "tflm" (TFLite Micro: microcontrollers) or "reference" (TFLite's portable kernels). The
            model's attribute `kernels` changes it at any time; training does not depend on it, but
            for an LSTM with activations of 16 bits, which "tflm" alone has in integers. By
            default the target's, without one "xnnpack".
        target: where the file is to run: "xnnpack", "tflm", "cmsis_nn", "ethos_u55", "ethos_u65",
            "ethos_u85", "edgetpu", "stm32_npu", "esp_nn", a `keras_qat.targets.Target`, or None. It
            says recipe and kernels, and `export_tflite` writes for it; `plan` names what it lacks.
        inputs: for a subclassed model that was not called yet: what it is to be called on, such as
            `keras.Input(shape)`, or a structure of them.

    Returns:
        The quantization-aware model, not compiled.

    Raises:
        ValueError: if the model cannot be read, trains in its own way, is quantized with another
            recipe, has tensors without elements or numbers in float64, an entry of the scope
            matches no layer, `strict` and a layer stays in float, there are no such kernels or no
            such target, or these contradict each other.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="logits")])
        >>> [layer.name for layer in keras_qat.quantize_model(model).layers]
        ['input_1', 'input_1_quant', 'quant_logits']
    """
    recipe, family, place_of_use = settings(recipe, kernels, target)
    if is_quantized(model):
        return _copy_quantized(model, recipe)
    model, graph = read_float(as_keras_2(model), inputs, recipe.activations.bits < 16)
    found = place(graph, recipe, scope, family)
    if strict and found.float_layers:
        lines = [f"  {name}: {reason}" for name, reason in found.float_layers.items()]
        raise ValueError(
            f"{len(lines)} layer{'s' * (len(lines) > 1)} of '{model.name}' would stay in float:\n"
            + "\n".join(lines)
            + "\nLeave strict=False to let them compute in float."
        )
    with float32_policy(), strategy_scope(model):
        qat = rewrite(found, model)
    qat.kernels = family.name
    qat.target = place_of_use
    warn_of_closed(found.graph, found.float_layers)
    if not is_quantized(qat):
        warnings.warn(
            f"recipe {recipe.name} quantizes nothing of '{model.name}', so that it stays a float "
            f"model. keras_qat.plan(model, recipe) says why of each layer.",
            stacklevel=2,
        )
    return qat


def _copy_quantized(model: Any, recipe: Recipe) -> QuantizedModel:
    if getattr(model, "recipe", None) != recipe:
        name = getattr(getattr(model, "recipe", None), "name", "unknown")
        raise ValueError(
            f"'{model.name}' is already quantized, with recipe '{name}' and other settings. "
            f"Quantize the float model it was made from instead."
        )
    with strategy_scope(model):
        copy = type(model).from_config(model.get_config())
    copy.set_weights(model.get_weights())
    copy.safe_mode = model.safe_mode
    return copy
