"""Saves model files atomically, and explains why Keras cannot save or load a model."""

from __future__ import annotations

import inspect
import io
import os
from collections.abc import Iterable
from typing import Any

import h5py
import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Graph
from keras_qat.io.atomic_files import saving_to
from keras_qat.keras2.backend import keras
from keras_qat.keras2.layers_and_models import find_custom_attributes
from keras_qat.keras2.readability import get_first_line
from keras_qat.messages import LIBRARIES, get_package, pluralize, warn_caller

FilePath = str | os.PathLike[str]

FILES = (".keras", ".h5", ".hdf5")
"""Suffixes of the formats that Keras writes as one file."""

FLOAT_WEIGHTS = "Load float weights into the float model, and then quantize it."
"""Advice in error messages for weights of a float model."""

EXPORTED = {".tflite": "export_tflite", ".cc": "export_c"}
"""Maps the suffix of an exported file to the function that writes it."""


class WholeFiles:
    """Mixin for a Keras model. Saves files atomically, and rejects the weights of float models."""

    name: str
    layers: list[keras.layers.Layer]
    weights: list[tf.Variable]

    def save(self, filepath: FilePath, overwrite: bool = True, *args: Any, **kwargs: Any) -> None:
        """Saves the model like `save` of Keras, but atomically.

        `save` of Keras first empties the old file. If the process is then killed or the disk is
        full, both versions are lost.

        Raises:
            ValueError: if the suffix belongs to an exported file, such as `.tflite`.
        """
        verb = EXPORTED.get(os.path.splitext(str(filepath))[1])
        if verb is not None:
            raise ValueError(
                f"save writes Keras models, but {filepath} names another format: call "
                f"keras_qat.{verb}(model, {str(filepath)!r})."
            )
        is_folder = (args or (kwargs.get("save_format"),))[0] in (None, "tf")
        with saving_to(filepath, FILES if overwrite else (), overwrite and is_folder) as path:
            # Not the `save` of a custom model class, which may have other arguments.
            keras.Model.save(self, path, overwrite, *args, **kwargs)

    def save_weights(
        self, filepath: FilePath, overwrite: bool = True, *args: Any, **kwargs: Any
    ) -> Any:
        """Saves the weights like `save_weights` of Keras, but atomically."""
        with saving_to(filepath, FILES if overwrite else ()) as path:
            return keras.Model.save_weights(self, path, overwrite, *args, **kwargs)

    def load_weights(self, filepath: FilePath, *args: Any, **kwargs: Any) -> Any:
        """Loads weights of a quantization-aware model, like `load_weights` of Keras."""
        try:
            if _is_float_checkpoint(filepath):
                raise ValueError(f"The checkpoint {filepath} holds no quantizers.")
            if kwargs.get("by_name") and not self._is_named_in(filepath):
                raise ValueError(
                    f"No layer of {filepath} has the name of a layer of '{self.name}'."
                )
            return super().load_weights(filepath, *args, **kwargs)  # type: ignore[misc]
        except ValueError as error:
            raise ValueError(f"{str(error).rstrip('.')}. {FLOAT_WEIGHTS}") from error

    def _is_named_in(self, path: FilePath) -> bool:
        """Return False if an HDF5 file contains no layer with the name of a layer of the model."""
        if not h5py.is_hdf5(path):
            return True
        with h5py.File(path, "r") as file:
            stored = set(file.get("model_weights", file))
        return not stored.isdisjoint(layer.name for layer in self.layers if layer.weights)

    def load_own_variables(self, store: h5py.Group) -> None:
        """Called by Keras when it loads a `.keras` file."""
        super().load_own_variables(read_at_once(store))  # type: ignore[misc]

    def set_weights(self, weights: list[np.ndarray]) -> None:
        """Sets weights from `get_weights` of a quantization-aware model."""
        if len(weights) != len(self.weights):
            raise ValueError(
                f"{pluralize(len(weights), 'weight was', 'weights were')} passed, but "
                f"'{self.name}' has {len(self.weights)}, including weights of quantizers. "
                f"{FLOAT_WEIGHTS}"
            )
        super().set_weights(weights)  # type: ignore[misc]


def _is_float_checkpoint(path: FilePath) -> bool:
    """Return True for a TensorFlow checkpoint of a model without quantizers."""
    if not isinstance(path, (str, os.PathLike)) or not os.path.exists(f"{os.fspath(path)}.index"):
        return False
    names = [name for name, _ in tf.train.list_variables(os.fspath(path))]
    return not any("quantize_from" in name for name in names)


def read_at_once(store: h5py.Group) -> h5py.Group:
    """Moves the weights of a `.keras` file into memory, while Keras loads the file.

    HDF5 jumps back in the file for every weight. Before Python 3.12, `zipfile` then unpacks the
    file again from the start. Large models would take half a minute to load.

    `store` is the argument of `load_own_variables`. Returns the same group in memory.
    """
    frame = inspect.currentframe()
    while frame is not None and "weights_store" not in frame.f_locals:
        frame = frame.f_back
    stored: Any = None if frame is None else frame.f_locals["weights_store"]
    if getattr(stored, "archive", None) is None or not isinstance(store, h5py.Group):
        return store
    if store.file != stored.h5_file or isinstance(stored.io_file, io.BytesIO):
        return store
    name = store.name
    stored.h5_file.close()
    stored.io_file.close()
    stored.io_file = io.BytesIO(stored.archive.read(stored.root_path))
    stored.h5_file = h5py.File(stored.io_file, mode="r")
    return stored.h5_file[name]


def explain_not_saved(call: Call) -> str | None:
    """Returns why Keras cannot save a layer or its arguments, or None if no reason is known."""
    arguments = tf.nest.flatten([call.args, call.kwargs])
    if any(argument is Ellipsis for argument in arguments):
        return "a .keras file cannot store an Ellipsis; write x[:, :, a] for x[..., a]"
    for attribute in tf.nest.flatten(find_custom_attributes(call.layer, vars(call.layer))):
        regularizes = isinstance(attribute, keras.regularizers.Regularizer)
        module = keras.regularizers if regularizes else keras.constraints
        try:
            module.serialize(attribute)
        except TypeError as error:
            name = type(attribute).__name__
            return f"Keras cannot save the {name} of a weight: {get_first_line(error)}"
    activation = vars(call.layer).get("activation")
    if not callable(activation) or isinstance(activation, keras.layers.Layer):
        return None
    if getattr(activation, "__name__", "") == "<lambda>":
        return "Keras cannot load an activation that is a lambda; define a named function"
    try:
        keras.activations.serialize(activation)
    except TypeError:
        return f"a file cannot store an activation that is a {type(activation).__name__}"
    return None


def explain_not_loaded(call: Call) -> str | None:
    """Returns why Keras cannot load a custom layer again, or None if no reason is known."""
    if any(isinstance(argument, slice) for argument in tf.nest.flatten([call.args, call.kwargs])):
        return "a .keras file cannot store a slice as an argument; pass its start and end"
    activation = vars(call.layer).get("activation")
    for item in (type(call.layer), activation if inspect.isfunction(activation) else None):
        if item is None or get_package(item) in LIBRARIES:
            continue
        registered = keras.utils.get_registered_object(keras.utils.get_registered_name(item))
        if registered is None:
            return (
                f"{item.__name__} is not registered: load the model with custom_objects="
                f"{{'{item.__name__}': {item.__name__}}}, or decorate it with "
                f"@keras.saving.register_keras_serializable()"
            )
    return None


def warn_about_opaque(graph: Graph, float_layers: Iterable[str]) -> None:
    """Warns about custom layers that stay in float, and about layers that Keras cannot save."""
    opaque, message = graph.opaque, []
    lines = [f"  {name}: {opaque[name]}" for name in float_layers if name in opaque]
    if lines:
        message += ["These layers compute in float, because they cannot be traced:", *lines]
        message += [
            "Describe a layer with keras_qat.register_op, or silence this warning with "
            "override(layer, open=False)."
        ]
    lines = []
    for call in graph.calls:
        reason = explain_not_saved(call)
        if reason is None and call.name in opaque:
            reason = explain_not_loaded(call)
        lines += [] if reason is None else [f"  {call.name}: {reason}."]
    if lines:
        message += ["The model cannot be saved and loaded again:", *dict.fromkeys(lines)]
    if message:
        warn_caller("\n".join(message))
