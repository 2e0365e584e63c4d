"""The model that `quantize_model` returns."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, cast

import tensorflow as tf

from keras_qat.arithmetic.kernel_families import XNNPACK, KernelFamily, kernel_family
from keras_qat.config.arguments import switch
from keras_qat.config.recipe import Recipe
from keras_qat.config.targets.target import Target
from keras_qat.graph.precision import ScalesLoss, compute_in_float32, use_float32
from keras_qat.graph.read_model import list_symbols
from keras_qat.graph.rebuild_model import find_used_inputs
from keras_qat.imports.keras3.backend import RefusesKeras3, refuse_files
from keras_qat.integer_graph.file_inference import InferenceRuntime, check_runtime
from keras_qat.integer_graph.keras_inference import Inference
from keras_qat.keras2 import backend
from keras_qat.keras2.backend import KeepsTrainable, create_quickly, keras
from keras_qat.keras2.configurations import (
    CustomObjects,
    applications_scope,
    collect_custom_objects,
)
from keras_qat.keras2.layers_and_models import (
    get_nested_inputs,
    list_layers,
    name_outputs,
    set_known_sizes,
)
from keras_qat.keras2.readability import explain_config_errors
from keras_qat.keras2.safe_loading import safe_scope
from keras_qat.rewriting.saved_config import (
    Config,
    describe_model,
    get_float_config,
    restore_model,
    split_config,
)
from keras_qat.rewriting.saving import WholeFiles
from keras_qat.tracing.layer_weights import hash_constant_masks
from keras_qat.training.distribution import agree, observe_alike
from keras_qat.training.fake_quantization.phase import Flag, Phase, is_exact
from keras_qat.training.phase_graphs import PhasedModel
from keras_qat.training.readiness import Settings, check_settings, read_settings
from keras_qat.training.schedule import check_process, list_scheduled_layers
from keras_qat.training.scheduled_layer import note_plain_model, shapes_only
from keras_qat.training.steps.custom_training import get_class_config, take_training
from keras_qat.training.steps.step_tensors import compute_together

CONVERTS = "convert_with_keras_qat.export_tflite"
"""Name scope of operations at inference. Users of TFLiteConverter may see the name. It tells them
to call `export_tflite` instead."""


@backend.register
class QuantizedModel(
    RefusesKeras3, PhasedModel, ScalesLoss, KeepsTrainable, WholeFiles, keras.Model
):
    """The quantization-aware Keras model that `quantize_model` and `load_model` return.

    It is compiled, trained, evaluated and saved like any functional model. Training simulates
    quantization. `predict` and `evaluate` return the same quantized values as the exported file.

    Shapes: inputs and outputs have the names and shapes of the float model. All inputs and outputs
    are float, even if the exported file has integer inputs and outputs.
    """

    _recipe: Recipe | None = None
    settings: Settings = ()
    """Constructor arguments of all layers. `check_settings` raises an error if one has changed."""
    float_config: Config | None
    """Configuration of the float model, for `keras.Model.from_config`."""
    float_masks: Iterable[int] = ()
    """Checksums of attention masks that are variables of the float model. This model has no such
    variables, so `strip_quantization` needs the checksums."""
    differing_outputs: str = ""
    """Names of outputs that differed from the float model directly after quantization."""
    customs: CustomObjects = CustomObjects({}, False)
    """Custom classes of the float model. Saved files do not contain custom classes."""

    class_before: type | None = None
    """The class before `train_step` and other methods of the float model were added."""
    trained_as: Config | None = None
    """Class name and configuration of the float model if it has custom training, otherwise None."""
    left_out: Mapping[str, str] = MappingProxyType({})
    """Maps attributes that were not copied from the float model to the float model's class name.
    If code reads such an attribute, the error message shows this name."""

    safe_mode: bool = False
    """True if `load_model` had `safe_mode=True`. Lambdas from the file must then not run."""

    file_outputs: Mapping[str, str] = MappingProxyType({})
    """Maps the `outputs` passed to `quantize_model` to names of symbolic tensors."""
    _file_model: QuantizedModel | None = None

    _family: KernelFamily = XNNPACK
    _packs_int4: bool = False
    _runtime: InferenceRuntime = "auto"
    target: Target | None = None
    """The target passed to `quantize_model`, or None."""
    _inference: Inference | None = None
    told_of_float: bool = False
    """True if `quantize_model` has reported the float layers in this process."""

    def set_untracked(self, **attributes: object) -> None:
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    @property
    def recipe(self) -> Recipe:
        """The recipe of the model. It cannot be changed."""
        return cast(Recipe, self._recipe)

    @recipe.setter
    def recipe(self, recipe: Recipe) -> None:
        if self._recipe not in (None, recipe):
            raise ValueError(
                f"The recipe of '{self.name}' cannot be changed. Quantize the float model again: "
                f"keras_qat.quantize_model(model, recipe)."
            )
        self.set_untracked(_recipe=recipe)

    @property
    def kernels(self) -> str:
        """The kernel family that determines how inference rounds. It can be set at any time.

        The families are "xnnpack" (x86), "xnnpack_arm64" (phones with 64-bit ARM), "tflm" (TFLite
        Micro) and "reference" (TFLite's portable kernels).
        """
        return self._family.name

    @kernels.setter
    def kernels(self, kernels: str) -> None:
        self.set_untracked(_family=kernel_family(kernels))
        self._forget_inference()

    @property
    def pack_int4(self) -> bool:
        """True if weights of at most 4 bits are packed, two in a byte. It can be set at any time.

        TFLite kernels round sums with packed weights more coarsely. Inference rounds in the same
        way, and `export_tflite` writes a packed file. Training does not depend on `pack_int4`.
        """
        return self._packs_int4

    @pack_int4.setter
    def pack_int4(self, packs: bool) -> None:
        packs = switch("pack_int4", packs)
        if packs and self.recipe.activations.bits == 16:
            raise ValueError("pack_int4: there are no kernels for int4 weights and 16 bits.")
        self.set_untracked(_packs_int4=packs)
        self._forget_inference()

    @property
    def runtime(self) -> InferenceRuntime:
        """The runtime of `predict`, `evaluate` and validation in `fit`. It can be set at any time.

        "interpreter" runs the exported file in TFLite's interpreter. "tensorflow" computes the same
        values with TensorFlow. "auto" chooses the interpreter for data so large that it is faster.
        """
        return self._runtime

    @runtime.setter
    def runtime(self, runtime: InferenceRuntime) -> None:
        self.set_untracked(_runtime=check_runtime(runtime))
        self._forget_inference()

    def _forget_inference(self) -> None:
        self.set_untracked(_inference=None)
        self.predict_function = self.test_function = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        note_plain_model(self._recipe, kwargs.get("training"))
        return super().__call__(*args, **kwargs)

    @tf.autograph.experimental.do_not_convert
    def call(self, inputs: Any, training: Flag | None = None, mask: tf.Tensor | None = None) -> Any:
        """Simulates quantization in training. At inference, computes like the TFLite kernels."""
        inference = self.exact_inference()
        if inference is None:
            return self.simulated(inputs, training, mask)
        check_process(self)
        check_settings(self)
        if backend.is_in_converter():
            raise ValueError(
                f"TFLiteConverter cannot convert '{self.name}', which imitates int8 kernels with "
                f"other operations. Call keras_qat.export_tflite(model, path), which writes the "
                f"TFLite file itself."
            )
        phase = backend.resolve_training(training)
        with tf.name_scope(CONVERTS):
            return inference(inputs, phase, training_argument=training, mask=mask)

    def simulated(self, inputs: Any, training_argument: Flag | None, mask: tf.Tensor | None) -> Any:
        """Computes with fake quantization, as in training. Arguments are as for `call`."""
        set_known_sizes(self, inputs)
        is_inference = backend.resolve_training(training_argument) is False
        layers = list_scheduled_layers(self)
        scope = compute_in_float32(self) if is_inference else compute_together(layers)
        with scope, backend.AUTOGRAPH_AS_USUAL:
            outputs = super().call(inputs, training=training_argument, mask=mask)
        if not is_inference:
            agree(self.weights)
        return outputs

    @property
    def simulates(self) -> bool:
        """True if inference also uses fake quantization. The recipe `contrib` does this."""
        if self._recipe is None:  # Keras saved a part of a model before `make_exact`.
            return any(getattr(x, "fold", "") == "correction" for x in list_scheduled_layers(self))
        return self._recipe.fold == "correction"

    def exact_inference(self) -> Inference | None:
        """Returns the object that computes like TFLite's kernels. Returns None if `simulates`."""
        if self._inference is None and not self.simulates:
            self.set_untracked(_inference=Inference(self, self._family))
        return self._inference

    def settle(self, phase: Phase | None) -> None:
        check_settings(self)
        inference = self.exact_inference()
        if inference is not None and is_exact(phase):
            inference.settle()

    def choose_inference(self, phase: Phase | None) -> tuple[int, bool]:
        inference = self._inference
        if inference is None:
            return 0, False
        return inference.choose(self._runtime if is_exact(phase) else "tensorflow")

    def keep_recipe(self, recipe: Recipe) -> None:
        """Stores the recipe in the model, and in its layers for models that are built from them."""
        self.recipe = recipe
        self.set_untracked(settings=read_settings(self))
        for layer in list_scheduled_layers(self):
            layer.recipe, layer.made_for = recipe, weakref.ref(self)

    def keep_float_model(self, model: keras.Model) -> None:
        """Stores what `strip_quantization` needs to create the float model again."""
        config = None
        # Some activations, constants, and layers without `get_config` have no configuration.
        with contextlib.suppress(TypeError, ValueError, NotImplementedError):
            config = get_float_config(model)
        customs = collect_custom_objects(list_layers(model))
        masks = hash_constant_masks(model)
        self.set_untracked(float_config=config, float_masks=masks, customs=customs)

    @property
    def file_model(self) -> QuantizedModel:
        """The model that is exported. It shares layers and weights with this model.

        If `outputs` were passed to `quantize_model`, the exported model has only these outputs.
        Otherwise, it is this model.
        """
        if not self.file_outputs:
            return self
        part = self._file_model
        if part is None:
            tensors = list_symbols(self)
            ends = [tensors[tensor] for tensor in self.file_outputs.values()]
            inputs = find_used_inputs(get_nested_inputs(self), ends)
            part = QuantizedModel(inputs=inputs, outputs=ends, name=self.name)
            part.set_untracked(part_of=self)
            part.recipe, part.target = self.recipe, self.target
            part.told_of_float = self.told_of_float
            part.differing_outputs = self.differing_outputs
            name_outputs(part, list(self.file_outputs))
            self.set_untracked(_file_model=part)
        for choice in ("kernels", "pack_int4"):
            if getattr(part, choice) != getattr(self, choice):
                setattr(part, choice, getattr(self, choice))
        return part

    def keep_training(self, model: keras.Model, left_out: Iterable[str]) -> None:
        """Adds the `train_step` and similar methods of the float model's class to this model.

        Args:
            model: the float model.
            left_out: attributes that are not copied, such as layers of the float model.
        """
        take_training(self, model, left_out)
        classes = {**self.customs.classes, type(model).__name__: type(model)}
        customs = self.customs._replace(classes=classes)
        self.set_untracked(trained_as=get_class_config(model), customs=customs)

    def __getattr__(self, name: str) -> Any:
        message = f"'{type(self).__name__}' object has no attribute '{name}'"
        if name in self.left_out:
            message = (
                f"'{name}' of {self.left_out[name]} is a part of the float model. '{self.name}' "
                f"has copies of its layers, which train only if code calls the entire model: "
                f"self(x). To train parts separately, quantize the model of each part, and build a "
                f"{self.left_out[name]} from the results."
            )
        raise AttributeError(message)

    def get_config(self) -> Config:
        return describe_model(self)

    @classmethod
    def from_config(cls, config: Config, custom_objects: Config | None = None) -> Any:
        contents = {name: value for name, value in config.items() if name != "trained_as"}
        with explain_config_errors(config, custom_objects), safe_scope(contents, custom_objects):
            return cls._from_config(config, custom_objects)

    @classmethod
    def _from_config(cls, config: Config, custom_objects: Config | None) -> Any:
        config, saved = split_config(config)
        with applications_scope(), shapes_only(), use_float32(), observe_alike(), create_quickly():
            plain_class: Any = cls.class_before or cls
            model = super(QuantizedModel, plain_class).from_config(config, custom_objects)
        restore_model(model, config, saved, custom_objects)
        return model


refuse_files(
    "keras_qat",
    QuantizedModel.__name__,
    "This file holds a quantization-aware model, which is a model of Keras 2. Load it with "
    "keras_qat.keras.models.load_model(path).",
)
