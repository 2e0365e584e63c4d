"""The visitor that clones a model along its plan, with wrappers and quantizers in place."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import tensorflow as tf

from keras_qat import specs
from keras_qat.arithmetic.families import Family, check_family
from keras_qat.keras2.backend import (
    Customs,
    KeepsTrainable,
    applications_scope,
    check_modules,
    customs_of,
    in_safe_mode,
    is_in_converter,
    keras,
    left_out,
    register,
    resolve_training,
)
from keras_qat.keras2.graph import (
    Call,
    Graph,
    Value,
    clone,
    config_of,
    layers_in,
    name_outputs,
    rebuild,
    values_in,
)
from keras_qat.keras2.graph_copy import Between, Instead, copied
from keras_qat.keras2.phases import PhasedModel
from keras_qat.keras2.precision import (
    ScalesLoss,
    computing_in_float32,
    float32_policy,
    is_half,
    policy_of,
)
from keras_qat.layers import Quantize, QuantizeWeights, QuantizeWrapper
from keras_qat.layers.left_in_float import (
    ask_for_integers,
    asked_for_integers,
    leave_in_float,
    why_left_in_float,
)
from keras_qat.layers.scheduled import NEVER, Phase, shapes_only
from keras_qat.model_files import WholeFiles
from keras_qat.ops.registry import on_request
from keras_qat.patterns import Group
from keras_qat.plan import Plan, Range
from keras_qat.ranges.weights import start_limits
from keras_qat.recipes import Recipe
from keras_qat.replicas import agree, observed_alike
from keras_qat.resolved.inference import Inference, is_exact
from keras_qat.resolved.names import PREFIX
from keras_qat.schedule import schedule, scheduled_layers
from keras_qat.targets.target import Target, remembered

__all__ = ["PREFIX", "QuantizedModel", "rewrite"]


@register
class QuantizedModel(PhasedModel, ScalesLoss, KeepsTrainable, WholeFiles, keras.Model):
    """A quantization-aware Keras model: what `quantize_model` returns, and `load_model` too.

    It is compiled, trained, evaluated and saved as any functional model. Training simulates
    quantization; `predict` and `evaluate` compute what the exported file gives, code for code.

    Shapes: inputs and outputs have the names and shapes of the float model's, and are real numbers,
    whatever types the file takes.
    """

    recipe: Recipe
    """What it was quantized with."""
    float_config: dict[str, Any] | None
    """Configuration of the float model, as `keras.Model.from_config` takes it."""
    customs: Customs = Customs({}, False)
    """Custom classes of that, which are known as long as nothing was saved."""

    safe_mode: bool = False
    """Whether no code of its configuration may run: it was loaded, not in safe_mode=False."""

    _kernels: Family = "xnnpack"
    target: Target | None = None
    """Where its file is to run, as `quantize_model` was told; None if it was not."""
    _inference: Inference | None = None

    @property
    def kernels(self) -> Family:
        """Whose rounding inference has; may be set at any time.

        "xnnpack" (phones, desktops), "tflm" (TFLite Micro: microcontrollers), or "reference":
        TFLite's portable kernels.
        """
        return self._kernels

    @kernels.setter
    def kernels(self, kernels: Family) -> None:
        object.__setattr__(self, "_kernels", check_family(kernels))
        object.__setattr__(self, "_inference", None)
        self.predict_function = self.test_function = None

    @tf.autograph.experimental.do_not_convert
    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        """What training simulates; at inference what the kernels of `kernels` compute."""
        inference = self._exact_inference()
        if inference is None:
            return self.simulated(inputs, training, mask)
        if is_in_converter():
            raise ValueError(
                f"TFLiteConverter does not take '{self.name}', which computes as the int8 kernels "
                f"do. Call keras_qat.export_tflite(model, path): it writes the TFLite file itself."
            )
        return inference(inputs, resolve_training(training), given=training, mask=mask)

    def simulated(self, inputs: Any, given: Any, mask: Any) -> Any:
        """What training computes, if `given` is the `training` of `call`."""
        is_inference = resolve_training(given) is False
        with computing_in_float32(self) if is_inference else contextlib.nullcontext():
            outputs = super().call(inputs, training=given, mask=mask)
        if not is_inference:
            agree(self.weights)
        return outputs

    def _exact_inference(self) -> Inference | None:
        """How it computes in integers; None for the original's models, which simulate."""
        if self._inference is None and self.recipe.fold != "correction":
            # Past Keras, which would track the graph.
            object.__setattr__(self, "_inference", Inference(self, self._kernels))
        return self._inference

    def settle(self, phase: Phase | None) -> None:
        inference = self._exact_inference()
        if inference is not None and is_exact(phase):
            inference.settle()

    @property
    def inference_version(self) -> int:
        return 0 if self._inference is None else self._inference.settled.version

    def keep_recipe(self, recipe: Recipe) -> None:
        """Sets `recipe`, also for models that are made of this one's layers."""
        self.recipe = recipe
        for layer in scheduled_layers(self):
            layer.recipe = recipe

    def keep_float_model(self, model: Any) -> None:
        """Sets `float_config` and `customs`, past Keras, which would track what is in them."""
        config = None
        with contextlib.suppress(TypeError):  # Activations that no configuration can hold.
            config = config_of(model)
        object.__setattr__(self, "float_config", config)
        object.__setattr__(self, "customs", customs_of(layers_in(model)))

    def _float_config_to_save(self) -> dict[str, Any] | None:
        """`float_config`, None if Keras cannot save what is in it."""
        try:
            with contextlib.suppress(ValueError):  # Keras asks in another way for SavedModels.
                keras.saving.serialize_keras_object(self.float_config)
        except TypeError:
            return None
        return self.float_config

    def get_config(self) -> dict[str, Any]:
        reasons = {each.name: why_left_in_float(each) for each in self.layers}
        config = super().get_config()
        for each in config["layers"]:
            each["config"].update(left_out(self.get_layer(each["name"])))
        return {
            **config,
            "recipe": self.recipe.to_config(),
            "float_config": self._float_config_to_save(),
            "output_names": list(self.output_names),
            "float_layers": {name: reason for name, reason in reasons.items() if reason},
            "asked_for": [each.name for each in self.layers if asked_for_integers(each)],
            "kernels": self._kernels,
            **({} if self.target is None else {"target": self.target.name}),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        if in_safe_mode() is not False:
            check_modules(config)
        config = dict(config)
        recipe, output_names = config.pop("recipe"), config.pop("output_names")
        float_config, float_layers = config.pop("float_config"), config.pop("float_layers", {})
        asked_for = config.pop("asked_for", ())
        kernels, target = config.pop("kernels", "xnnpack"), config.pop("target", None)
        with applications_scope(), shapes_only(), float32_policy(), observed_alike():
            model = super().from_config(config, custom_objects)
        model.safe_mode = in_safe_mode() is not False
        model.keep_recipe(Recipe.from_config(recipe))
        object.__setattr__(model, "float_config", float_config)
        name_outputs(model, output_names)
        if not isinstance(float_layers, dict):  # The first version's, without reasons.
            float_layers = dict.fromkeys(float_layers, "left in float")
        for name, reason in float_layers.items():
            leave_in_float(model.get_layer(name), reason)
        for name in asked_for:
            ask_for_integers(model.get_layer(name))
        if kernels != "xnnpack":
            model.kernels = kernels
        if target is not None:
            model.target = remembered(target, model.name)
        return model


# Keras' .h5 files name a model's class without the package it was registered in.
keras.utils.get_custom_objects()["QuantizedModel"] = QuantizedModel


_NO_SCOPE = re.compile(r"^[^A-Za-z0-9.]|[^A-Za-z0-9_.\\/>-]")
"""What TensorFlow does not take in the name of a scope."""


def _scope(name: str) -> str:
    """A value's name as that of a scope, which has neither the mark of a call nor of an output."""
    return _NO_SCOPE.sub(".", name.replace("#", "_call").replace(":", "_output"))


def _clone(layer: Any, **changes: Any) -> Any:
    """A copy of a layer; of a Normalization one in float32, as it holds numbers of its own."""
    if isinstance(layer, keras.layers.Normalization):
        changes["dtype"] = "float32"
    return clone(layer, **changes)


def rewrite(plan: Plan, float_model: Any) -> QuantizedModel:
    """Builds the quantization-aware model of a plan of a float model, with its weights."""
    visitor = _Visitor(plan)
    with observed_alike():
        graph = visitor.visit()
    with shapes_only(), observed_alike():
        model = rebuild(graph, QuantizedModel)
    model.keep_recipe(plan.recipe)
    model.keep_float_model(float_model)
    name_outputs(model, graph.output_names)
    for layer, weights in visitor.sources.items():
        for new, old in zip(layer.weights, weights, strict=True):
            new.assign(tf.cast(old, new.dtype))
        layer.finalize_state()  # Normalization computes with what it makes of its weights.
    start_limits(model)
    recipe = plan.recipe
    if recipe.quant_delay or recipe.freeze_bn_delay is not None:
        frozen_from = NEVER if recipe.freeze_bn_delay is None else recipe.freeze_bn_delay
        schedule(model, quantize_from=recipe.quant_delay, freeze_from=frozen_from)
    return model


class _Visitor:
    """Makes the calls of the quantization-aware model from those of the float model."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.group_of = {call: group for group in plan.groups for call in group.calls}
        self.range_of = {
            value: each for each in plan.ranges for value in each.observed + each.rounded
        }
        self.mixed = any(is_half(value.dtype) for value in plan.graph.values())
        self.weights_only = {call.layer: how for call, how in plan.weights_only.items()}
        self.layers: dict[Any, Any] = {}
        self.quantizers: dict[Range, Quantize] = {}
        self.names: set[str] = set()
        self.sources: dict[Any, list[Any]] = {}
        """New layer -> the weights that it starts from."""

    def visit(self) -> Graph:
        graph, instead = self.plan.graph, {}
        for call in [*graph.calls, *graph.aside]:
            group = self.group_of.get(call)
            if group is None:
                instead[call] = Instead(self._clone(call), call)
            elif call is group.calls[-1]:
                instead[call] = Instead(self._wrap(group), group.kernel)
        made = values_in([graph.inputs, [call.outputs for call in instead]])
        behind = {value: self._behind(value) for value in made}
        ends = {
            value: self._conversion(value, "float32")
            for value in dict.fromkeys(values_in(graph.outputs))
            if is_half(value.dtype)
        }
        return copied(graph, instead, behind, ends)

    def _behind(self, value: Value) -> list[Between]:
        """What comes behind a value: its quantizer, for an input the way to half precision."""
        found = [self._quantizer(value)]
        if value.producer is None and is_half(value.dtype):
            found.append(self._conversion(value, policy_of(value.dtype)))
        return [each for each in found if each is not None]

    def _conversion(self, value: Value, policy: str) -> Between:
        """Converts an input to half precision, or an output to float32, as predictions are."""
        name = self._unique(f"{_scope(value.name)}_{policy}")
        return Between(keras.layers.Activation("linear", dtype=policy, name=name), name, {})

    def _clone(self, call: Call) -> Any:
        """A copy of a layer that is not wrapped: one for all of its calls."""
        if call.layer not in self.layers:
            name = PREFIX + call.name
            if call.layer in self.weights_only:
                spec, paths = self.weights_only[call.layer]
                inner, axes = clone(call.layer), dict.fromkeys(paths, ())
                layer = QuantizeWeights(inner, axes, spec, name=name, mixed=self.mixed)
            else:
                layer = inner = _clone(call.layer, name=name)
            if call.layer in self.plan.replaced:
                new_class = self.plan.replaced[call.layer]
                layer = inner = new_class.from_config({**layer.get_config(), **left_out(layer)})
            self.layers[call.layer] = layer
            self._start_from(inner, call.layer)
        if call.name in self.plan.left_in_float:
            leave_in_float(self.layers[call.layer], self.plan.left_in_float[call.name])
        elif on_request(call.layer):
            ask_for_integers(self.layers[call.layer])
        return self.layers[call.layer]

    def _wrap(self, group: Group) -> QuantizeWrapper:
        """The wrapper of a group: one for all calls of its kernel layer."""
        layer = group.kernel.layer
        if layer not in self.layers:
            is_wide = self.plan.recipe.activations.bits == 16
            is_lstm = isinstance(layer, keras.layers.LSTM)
            norm = group.batch_norm
            inner = [each and _clone(each.layer) for each in (group.kernel, norm)]
            self.layers[layer] = QuantizeWrapper(
                inner[0],
                group.weights,
                self.plan.weights[group],
                batch_norm=inner[1],
                batch_norm_frozen=norm is not None and norm.kwargs.get("training") is False,
                fold=self.plan.recipe.fold,
                activation=group.activation and clone(group.activation.layer),
                output_spec=self._spec_inside(group.output),
                tensor=group.output.name,
                inner_specs=self.plan.inner.get(group),
                state_bits=16 if is_lstm and is_wide else 8,
                name=PREFIX + group.kernel.name,
                mixed=self.mixed,
            )
            for call, new in zip((group.kernel, norm), inner, strict=True):
                if call is not None:
                    self._start_from(new, call.layer)
        return self.layers[layer]

    def _start_from(self, new: Any, old: Any) -> None:
        self.sources[new] = self.plan.graph.weights.get(old, old.weights)

    def _spec_inside(self, value: Value) -> specs.QuantSpec | specs.FixedSpec | None:
        """The specification of a wrapper's own output quantizer.

        None if the range is shared, by several tensors or by several calls of the layer: then a
        layer of its own quantizes.
        """
        found = self.range_of.get(value)
        if found is None or len(found.observed + found.rounded) > 1:
            return None
        group = self.group_of.get(value.producer) if value.producer else None
        if group is None or group.shared:
            return None
        return found.spec

    def _unique(self, name: str) -> str:
        """A name that no other `Quantize` layer has."""
        while name in self.names:
            name += "_"
        self.names.add(name)
        return name

    def _quantizer(self, value: Value) -> Between | None:
        """The `Quantize` layer behind a value with a range that no wrapper holds."""
        found = self.range_of.get(value)
        if found is None or self._spec_inside(value) is not None:
            return None
        name = self._unique(_scope(value.name) + "_quant")
        if found not in self.quantizers:
            self.quantizers[found] = Quantize(
                found.spec,
                slots=len(found.observed),
                tensors=tuple(each.name for each in found.observed),
                name=name,
                mixed=self.mixed,
            )
        slot = found.observed.index(value) if value in found.observed else None
        return Between(self.quantizers[found], name, {"slot": slot})
