"""The model that `quantize_model` returns."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, cast

import tensorflow as tf

from keras_qat.arithmetic.kernel_families import (
    XNNPACK,
    KernelFamily,
    find_saved_family,
    kernel_family,
)
from keras_qat.config.arguments import switch
from keras_qat.config.recipe import Recipe
from keras_qat.config.targets.target import Target, find_or_warn
from keras_qat.graph.precision import ScalesLoss, compute_in_float32, use_float32
from keras_qat.graph.read_model import list_symbols
from keras_qat.graph.rebuild_model import find_used_inputs, get_functional_config
from keras_qat.imports.keras3.backend import refuse_files
from keras_qat.imports.keras3.parts import RefusesKeras3
from keras_qat.integer_graph.keras_inference import Inference
from keras_qat.keras2.backend import (
    AUTOGRAPH_AS_USUAL,
    KeepsTrainable,
    is_in_converter,
    keras,
    register,
    resolve_training,
)
from keras_qat.keras2.configurations import (
    CustomObjects,
    applications_scope,
    check_modules,
    collect_custom_objects,
    find_missing_config,
    get_safe_mode,
)
from keras_qat.keras2.layers_and_models import (
    get_nested_inputs,
    list_layers,
    name_outputs,
    restore_names,
    set_known_sizes,
)
from keras_qat.keras2.readability import explain_config_errors
from keras_qat.messages import warn_caller
from keras_qat.rewriting.float_configs import float_config_of
from keras_qat.rewriting.instead import INSTEAD
from keras_qat.rewriting.saving import WholeFiles
from keras_qat.tracing.layer_weights import hash_constant_masks
from keras_qat.training.distribution import agree, observed_alike
from keras_qat.training.fake_quantization.phase import Flag, Phase, is_exact
from keras_qat.training.phase_graphs import PhasedModel
from keras_qat.training.readiness import check_settings, settings_of
from keras_qat.training.schedule import (
    ask_for_integers,
    asked_for_integers,
    check_process,
    leave_in_float,
    scheduled_layers,
    why_left_in_float,
)
from keras_qat.training.scheduled_layer import shapes_only, tell_of_plain_model
from keras_qat.training.steps.custom_training import class_config, from_class_config, take_training
from keras_qat.training.steps.step_tensors import computed_together

LOADER = "import keras_qat; keras_qat.keras.models.load_model(path): Keras 3 cannot load it"
"""The first entry of a model's configuration, with which the error of Keras 3 begins."""
CONVERTS = "convert_with_keras_qat.export_tflite"
"""Scope of the operations. TFLiteConverter prints it if it is given a SavedModel of the model."""


@register
class QuantizedModel(
    RefusesKeras3, PhasedModel, ScalesLoss, KeepsTrainable, WholeFiles, keras.Model
):
    """A quantization-aware Keras model, as `quantize_model` and `load_model` return it.

    It is compiled, trained, evaluated and saved as any functional model. Training simulates
    quantization; `predict` and `evaluate` compute the same codes as the exported file.

    Shapes: inputs and outputs have the names and shapes of the float model's, and are real numbers
    whatever the types in the file.
    """

    _recipe: Recipe | None = None
    float_config: dict[str, Any] | None
    """Configuration of the float model, as `keras.Model.from_config` takes it."""
    float_masks: Iterable[int] = ()
    """Checksums of the masks in the float model's variables, which are constants here."""
    differing_outputs: str = ""
    """Names of outputs that the float model computed otherwise when it was quantized."""
    customs: CustomObjects = CustomObjects({}, False)
    """Custom classes of the float model, known until the model is saved and loaded."""

    class_before: type | None = None
    """The class of the model before it took over the training of a float model's class."""
    trained_as: dict[str, Any] | None = None
    """Configuration of the float model's class, if that defines how it trains."""
    left_out: Mapping[str, str] = MappingProxyType({})
    """Attribute of that class's models that this model does not have -> the class."""

    safe_mode: bool = False
    """Whether code in its configuration may not run, as it was loaded without safe_mode=False."""

    file_outputs: Mapping[str, str] = MappingProxyType({})
    """Name of each output of exported files -> the tensor; none if they are the model's own."""
    _file_model: QuantizedModel | None = None

    _family: KernelFamily = XNNPACK
    _packs_int4: bool = False
    target: Target | None = None
    """The target that was given to `quantize_model`, or None."""
    _inference: Inference | None = None
    told_of_float: bool = False
    """Whether `quantize_model` told in this process which layers stay in float."""

    @property
    def recipe(self) -> Recipe:
        """The recipe that it was quantized with. It cannot be changed."""
        return cast(Recipe, self._recipe)

    @recipe.setter
    def recipe(self, recipe: Recipe) -> None:
        if self._recipe not in (None, recipe):
            raise ValueError(
                f"The recipe of '{self.name}' cannot be changed: quantize the float model anew, "
                f"with keras_qat.quantize_model(model, recipe)."
            )
        object.__setattr__(self, "_recipe", recipe)

    @property
    def kernels(self) -> str:
        """The kernel family whose rounding inference has; may be set at any time.

        "xnnpack" (on x86), "xnnpack_arm64" (phones: 64-bit ARM), "tflm" (TFLite Micro:
        microcontrollers) or "reference" (TFLite's portable kernels).
        """
        return self._family.name

    @kernels.setter
    def kernels(self, kernels: str) -> None:
        object.__setattr__(self, "_family", kernel_family(kernels))
        self._forget_inference()

    @property
    def pack_int4(self) -> bool:
        """Whether weights of at most 4 bits are packed, two in a byte; may be set at any time.

        Kernels sum packed weights in wider steps. Inference computes as they do, and
        `export_tflite` writes such a file. Training does not depend on it.
        """
        return self._packs_int4

    @pack_int4.setter
    def pack_int4(self, packs: bool) -> None:
        packs = switch("pack_int4", packs)
        if packs and self.recipe.activations.bits == 16:
            raise ValueError("pack_int4: there are no kernels for int4 weights and 16 bits.")
        object.__setattr__(self, "_packs_int4", packs)
        self._forget_inference()

    def _forget_inference(self) -> None:
        object.__setattr__(self, "_inference", None)
        self.predict_function = self.test_function = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tell_of_plain_model(self._recipe, kwargs.get("training"))
        return super().__call__(*args, **kwargs)

    @tf.autograph.experimental.do_not_convert
    def call(
        self, inputs: tf.Tensor, training: Flag | None = None, mask: tf.Tensor | None = None
    ) -> Any:
        """Simulates quantization in training; computes as the kernels do at inference."""
        inference = self.exact_inference()
        if inference is None:
            return self.simulated(inputs, training, mask)
        check_process(self)
        check_settings(self)
        if is_in_converter():
            raise ValueError(
                f"TFLiteConverter does not take '{self.name}', which computes as the int8 kernels "
                f"do. Call keras_qat.export_tflite(model, path): it writes the TFLite file itself."
            )
        phase = resolve_training(training)
        with tf.name_scope(CONVERTS):
            return inference(inputs, phase, training_argument=training, mask=mask)

    def simulated(self, inputs: tf.Tensor, training_argument: Any, mask: tf.Tensor | None) -> Any:
        """Computes with fake quantization, as in training; the arguments are those of `call`."""
        set_known_sizes(self, inputs)
        is_inference = resolve_training(training_argument) is False
        layers = scheduled_layers(self)
        scope = compute_in_float32(self) if is_inference else computed_together(layers)
        with scope, AUTOGRAPH_AS_USUAL:
            outputs = super().call(inputs, training=training_argument, mask=mask)
        if not is_inference:
            agree(self.weights)
        return outputs

    @property
    def simulates(self) -> bool:
        """Whether it computes with fake quantization at inference too, as recipe `contrib`."""
        if self._recipe is None:  # A part of a model, saved by Keras before it was exact.
            return any(getattr(x, "fold", "") == "correction" for x in scheduled_layers(self))
        return self._recipe.fold == "correction"

    def exact_inference(self) -> Inference | None:
        """Returns the inference in integers; None for recipe `contrib`, which simulates."""
        if self._inference is None and not self.simulates:
            # Past Keras, which would track the graph.
            object.__setattr__(self, "_inference", Inference(self, self._family))
        return self._inference

    def settle(self, phase: Phase | None) -> None:
        check_settings(self)
        inference = self.exact_inference()
        if inference is not None and is_exact(phase):
            inference.settle()

    @property
    def inference_version(self) -> int:
        return 0 if self._inference is None else self._inference.settled.version

    def keep_recipe(self, recipe: Recipe) -> None:
        """Sets `recipe`, on the layers too, for models that users make of them."""
        self.recipe = recipe
        object.__setattr__(self, "settings", settings_of(self))
        for layer in scheduled_layers(self):
            layer.recipe, layer.made_for = recipe, weakref.ref(self)

    def keep_float_model(self, model: keras.Model) -> None:
        """Sets what is known of the float model, past Keras, which would track the contents."""
        config = None
        # Some activations, constants, and layers of a class without `get_config` have none.
        with contextlib.suppress(TypeError, ValueError, NotImplementedError):
            config = float_config_of(model)
        object.__setattr__(self, "float_config", config)
        object.__setattr__(self, "float_masks", hash_constant_masks(model))
        object.__setattr__(self, "customs", collect_custom_objects(list_layers(model)))

    def keep_file_outputs(self, outputs: Mapping[str, str]) -> None:
        """Sets `file_outputs`, past Keras, which would track them."""
        object.__setattr__(self, "file_outputs", dict(outputs))

    @property
    def file_model(self) -> QuantizedModel:
        """The part of the model that exported files hold, with the same layers and weights.

        It is the model itself unless `quantize_model` was given `outputs`.
        """
        if not self.file_outputs:
            return self
        part = self._file_model
        if part is None:
            tensors = list_symbols(self)
            ends = [tensors[tensor] for tensor in self.file_outputs.values()]
            inputs = find_used_inputs(get_nested_inputs(self), ends)
            part = QuantizedModel(inputs=inputs, outputs=ends, name=self.name)
            object.__setattr__(part, "part_of", self)
            part.recipe, part.target = self.recipe, self.target
            part.told_of_float = self.told_of_float
            part.differing_outputs = self.differing_outputs
            name_outputs(part, list(self.file_outputs))
            object.__setattr__(self, "_file_model", part)
        for choice in ("kernels", "pack_int4"):
            if getattr(part, choice) != getattr(self, choice):
                setattr(part, choice, getattr(self, choice))
        return part

    def keep_training(self, model: keras.Model, left_out: Iterable[str]) -> None:
        """Trains from now on as a float model does whose class has its own way, `train_step` say.

        Args:
            model: the float model.
            left_out: its attributes that only it can use, such as its layers.
        """
        take_training(self, model, left_out)
        object.__setattr__(self, "trained_as", class_config(model))
        classes = {**self.customs.classes, type(model).__name__: type(model)}
        object.__setattr__(self, "customs", self.customs._replace(classes=classes))

    def __getattr__(self, name: str) -> Any:
        message = f"'{type(self).__name__}' object has no attribute '{name}'"
        if name in self.left_out:
            message = (
                f"'{name}' of {self.left_out[name]} is a part of the float model. '{self.name}' "
                f"has layers of its own, and trains if it is called as a whole: self(x). To train "
                f"parts one by one, quantize the models of the parts, and make a "
                f"{self.left_out[name]} of these."
            )
        elif name in INSTEAD:
            message += f". {INSTEAD[name]}"
        raise AttributeError(message)

    def _float_config_to_save(self) -> dict[str, Any] | None:
        """Returns `float_config`, or None if Keras cannot save its contents."""
        try:
            with contextlib.suppress(ValueError):  # Raised while Keras saves a SavedModel.
                json.dumps(keras.saving.serialize_keras_object(self.float_config))
        except TypeError:
            return None
        return self.float_config

    def _class_config_to_save(self) -> dict[str, Any]:
        return {**(self.trained_as or {}), "left_out": list(self.left_out)}

    def _train_as_saved(self, config: dict[str, Any], custom_objects: Any) -> None:
        """Trains as the class of a configuration says, if that is known here."""
        left_out, made_of = config.pop("left_out"), config
        if config["config"] is None:
            made_of = {**config, "config": self.float_config}
        try:
            original = from_class_config(made_of, custom_objects)
        except ValueError as error:
            name = config["class_name"]
            warn_caller(
                f"'{self.name}' is loaded without the train_step and the like of {name}, which "
                f"cannot be made: {error} Register the class, pass it in custom_objects, and give "
                f"it a get_config that its constructor takes; or load the weights alone into a "
                f"model that quantize_model makes of a {name}."
            )
            return
        self.keep_training(original, left_out)

    def get_config(self) -> dict[str, Any]:
        reasons = {layer.name: why_left_in_float(layer) for layer in self.layers}
        config = {
            **get_functional_config(self),
            "trainable": self.trainable,
        }  # Users' classes may differ.
        layers = {layer.name: layer for layer in self.layers}
        for entry in config["layers"]:
            if layer := layers.get(entry["name"]):  # Added losses have other names in it.
                entry["config"].update(find_missing_config(layer))
        return {
            "load_with": LOADER,
            **config,
            "recipe": None if self._recipe is None else self._recipe.to_config(),
            "float_config": self._float_config_to_save(),
            **({"float_masks": list(self.float_masks)} if self.float_masks else {}),
            **({"differing_outputs": self.differing_outputs} if self.differing_outputs else {}),
            "output_names": list(self.output_names),
            "float_layers": {name: reason for name, reason in reasons.items() if reason},
            "asked_for": [layer.name for layer in self.layers if asked_for_integers(layer)],
            "kernels": self.kernels,
            **({"pack_int4": True} if self.pack_int4 else {}),
            **({"file_outputs": dict(self.file_outputs)} if self.file_outputs else {}),
            **({} if self.trained_as is None else {"trained_as": self._class_config_to_save()}),
            **({} if self.target is None else {"target": self.target.name}),
        }

    @classmethod
    @explain_config_errors()
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        config = dict(config)
        trained_as = config.pop("trained_as", None)
        if get_safe_mode() is not False:
            check_modules(config)
        config.pop("load_with", None)
        recipe, output_names = config.pop("recipe"), config.pop("output_names")
        float_config, float_layers = config.pop("float_config"), config.pop("float_layers", {})
        asked_for = config.pop("asked_for", ())
        file_outputs, masks = config.pop("file_outputs", {}), config.pop("float_masks", ())
        packs_int4, differing = config.pop("pack_int4", False), config.pop("differing_outputs", "")
        kernels, target = config.pop("kernels", XNNPACK.name), config.pop("target", None)
        with applications_scope(), shapes_only(), use_float32(), observed_alike():
            plain_class: Any = cls.class_before or cls
            model = super(QuantizedModel, plain_class).from_config(config, custom_objects)
        restore_names(model, config)
        model.safe_mode = get_safe_mode() is not False
        if recipe is not None:  # Not known of a part that Keras saved before it was exact.
            model.keep_recipe(Recipe.from_config(recipe))
        object.__setattr__(model, "float_config", float_config)
        object.__setattr__(model, "float_masks", masks)
        model.differing_outputs = differing
        name_outputs(model, output_names)
        model.keep_file_outputs(file_outputs)
        if not isinstance(float_layers, dict):  # Earlier files have no reasons.
            float_layers = dict.fromkeys(float_layers, "left in float")
        for name, reason in float_layers.items():
            leave_in_float(model.get_layer(name), reason)
        for name in asked_for:
            ask_for_integers(model.get_layer(name))
        model.kernels = find_saved_family(kernels, model.name).name
        model.pack_int4 = packs_int4
        if target is not None:
            model.target = find_or_warn(target, model.name)
        if trained_as is not None:
            model._train_as_saved(dict(trained_as), custom_objects)
        return model


refuse_files(
    "keras_qat",
    QuantizedModel.__name__,
    "This file holds a quantization-aware model, which is a model of Keras 2. Load it with "
    "keras_qat.keras.models.load_model(path).",
)
