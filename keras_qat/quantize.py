"""The verbs that users call on models."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import numpy as np

from keras_qat.arithmetic.families import Family
from keras_qat.keras2.float_model import read_float
from keras_qat.keras2.precision import float32_policy
from keras_qat.keras2.saving import warn_of_closed
from keras_qat.keras3 import as_keras_2
from keras_qat.layers import Quantize, QuantizeWeights
from keras_qat.layers.per_tensor import folded
from keras_qat.layers.weights import weight_at
from keras_qat.placement import place
from keras_qat.plan import Plan
from keras_qat.recipes import Recipe
from keras_qat.replicas import strategy_scope
from keras_qat.rewrite import PREFIX, QuantizedModel, rewrite
from keras_qat.schedule import check_quantized, is_quantized, scheduled_layers
from keras_qat.scope import Scope
from keras_qat.specs import FixedSpec, QuantSpec
from keras_qat.targets import Target, problems
from keras_qat.targets.target import settings

__all__ = [
    "Quantizer",
    "activation_quantizers",
    "layer_quantizers",
    "plan",
    "quantize_model",
    "quantized_weight",
    "quantizers",
]


def quantize_model(
    model: Any,
    recipe: str | Recipe | None = None,
    *,
    scope: Scope | None = None,
    strict: bool = False,
    kernels: Family | None = None,
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
    qat.kernels = family
    qat.target = place_of_use
    warn_of_closed(found.graph, found.float_layers)
    if not is_quantized(qat):
        warnings.warn(
            f"recipe {recipe.name} quantizes nothing of '{model.name}', so that it stays a float "
            f"model. keras_qat.plan(model, recipe) says why of each layer.",
            stacklevel=2,
        )
    return qat


def plan(
    model: Any,
    recipe: str | Recipe | None = None,
    *,
    scope: Scope | None = None,
    target: str | Target | None = None,
    inputs: Any = None,
) -> Plan:
    """Says what `quantize_model` would do to each tensor and why, before anything is trained.

    With a `target` it also names each operator that would not run there, why, and what helps.

    Args and errors: as for `quantize_model`.

    Example:
        >>> print(keras_qat.plan(model, target="ethos_u55"))
    """
    if is_quantized(model):
        raise ValueError(
            f"'{model.name}' is quantized already. Plan the float model, or look at "
            f"keras_qat.summary(model)."
        )
    recipe, family, place_of_use = settings(recipe, None, target)
    model, graph = read_float(as_keras_2(model), inputs, recipe.activations.bits < 16)
    found = place(graph, recipe, scope, family)
    if place_of_use is None:
        return found
    with float32_policy():
        lacking = problems(rewrite(found, model), place_of_use)
    return dataclasses.replace(found, target=place_of_use, problems=lacking)


@dataclasses.dataclass(frozen=True)
class Quantizer:
    """A quantizer of a model and what it is set to.

    Args:
        name: unique in the model: the layer's name and `output` or the weight's.
        quantizes: the tensors of the float model it quantizes.
        spec: how.
        minimum: lower end of its range; an array for one range per channel.
        maximum: upper end.
    """

    name: str
    quantizes: tuple[str, ...]
    spec: QuantSpec | FixedSpec
    minimum: Any
    maximum: Any

    @property
    def calibrated(self) -> bool:
        """Whether it has a range: without one it passes values through."""
        starts_with_one = isinstance(self.spec, QuantSpec) and self.spec.initial_range is not None
        known = starts_with_one or np.any(self.maximum > self.minimum)
        return bool(np.all(np.isfinite([self.minimum, self.maximum])) and known)


def quantizers(model: Any) -> list[Quantizer]:
    """Lists every quantizer of a quantization-aware model, in the order of the layers.

    Raises:
        ValueError: if the model is not quantization-aware.

    Example:
        >>> for quantizer in keras_qat.quantizers(qat):
        ...     print(quantizer.name, quantizer.quantizes, quantizer.minimum, quantizer.maximum)
    """
    check_quantized(model, ": call keras_qat.quantize_model(model) first.")
    return [
        each
        for layer in scheduled_layers(model)
        for part in layer_quantizers(layer)
        for each in part
    ]


def activation_quantizers(model: Any) -> list[Quantizer]:
    """Those of `quantizers` that quantize activations: they are quick to list."""
    return [each for layer in scheduled_layers(model) for each in _activation_quantizers(layer)]


def layer_quantizers(layer: Any) -> tuple[list[Quantizer], list[Quantizer]]:
    """Those of a layer: of its weights, and of activations."""
    return _weight_quantizers(layer), _activation_quantizers(layer)


def quantized_weight(layer: Any, name: str) -> Any:
    """The weight of a layer that a quantizer of this name quantizes."""
    if isinstance(layer, QuantizeWeights) or len(layer.weight_axes) > 1:
        return weight_at(layer.layer, name)
    return folded(layer) if layer.fold == "per_tensor" else getattr(layer.layer, name)


def _weight_quantizers(layer: Any) -> list[Quantizer]:
    found = []
    for name, quantizer in getattr(layer, "weight_quantizers", {}).items():
        limits = quantizer.current_range(quantized_weight(layer, name))
        label = f"{layer.name.removeprefix(PREFIX)}/{name}"
        found.append(Quantizer(f"{layer.name}/{name}", (label,), quantizer.spec, *limits))
    return found


def _activation_quantizers(layer: Any) -> list[Quantizer]:
    """Those inside of a layer first, then that of its output."""
    tensors = layer.tensors if isinstance(layer, Quantize) else (getattr(layer, "tensor", ""),)
    inner = getattr(layer, "inner", {})
    names = [*inner, *["output"] * (len(layer.quantizers) - len(inner))]
    return [
        Quantizer(
            f"{layer.name}/{name}",
            tuple(f"{each}/{name}" for each in tensors) if name in inner else tensors,
            each.spec,
            *each.current_range(),
        )
        for name, each in zip(names, layer.quantizers, strict=True)
    ]


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
