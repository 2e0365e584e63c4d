"""Saving of model files in one piece, and refusal of weights from other models."""

from __future__ import annotations

import os
from typing import Any

import h5py
import tensorflow as tf

from keras_qat.io.atomic_files import whole
from keras_qat.messages import counted
from keras_qat.rewriting.serialization import read_at_once

FILES = (".keras", ".h5", ".hdf5")
"""Suffixes of the formats that Keras writes as one file."""

FLOAT_WEIGHTS = (
    "Load the weights of a float model into the float model, and quantize that afterwards."
)
"""Advice for weights that do not fit."""


EXPORTED = {".tflite": "export_tflite", ".onnx": "export_onnx", ".cc": "export_c"}
"""Suffix of a file that is no Keras model -> the function that writes it."""


class WholeFiles:
    """A Keras model that replaces files in one piece, and refuses weights of a float model."""

    name: str
    layers: list[Any]
    weights: list[Any]

    def save(self, filepath: Any, overwrite: bool = True, *args: Any, **kwargs: Any) -> None:
        """Saves the model as Keras documents it, but never leaves half a file behind.

        Keras itself writes into the old file or folder, which is lost if the process is killed
        meanwhile, or the disk is full.

        Raises:
            ValueError: if the suffix is that of an exported file, for which Keras would make a
                directory.
        """
        verb = EXPORTED.get(os.path.splitext(str(filepath))[1])
        if verb is not None:
            raise ValueError(
                f"save writes Keras models, and {filepath} is none: call "
                f"keras_qat.{verb}(model, {str(filepath)!r})."
            )
        is_folder = (args or (kwargs.get("save_format"),))[0] in (None, "tf")
        with whole(filepath, FILES if overwrite else (), overwrite and is_folder) as path:
            super().save(path, overwrite, *args, **kwargs)  # type: ignore[misc]

    def save_weights(self, filepath: Any, overwrite: bool = True, *args: Any, **kwargs: Any) -> Any:
        """Saves the weights as Keras documents it, but in one piece, as `save` does."""
        with whole(filepath, FILES if overwrite else ()) as path:
            return super().save_weights(path, overwrite, *args, **kwargs)  # type: ignore[misc]

    def load_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        """Loads weights that a quantization-aware model saved, as Keras documents it."""
        try:
            if _is_checkpoint_of_floats(filepath):
                raise ValueError(f"The checkpoint {filepath} holds no quantizers.")
            if kwargs.get("by_name") and not self._is_named_in(filepath):
                raise ValueError(f"No layer of {filepath} has the name of one of '{self.name}'.")
            return super().load_weights(filepath, *args, **kwargs)  # type: ignore[misc]
        except ValueError as error:
            raise ValueError(f"{str(error).rstrip('.')}. {FLOAT_WEIGHTS}") from error

    def _is_named_in(self, path: Any) -> bool:
        """Returns whether an HDF5 file names a layer with weights: Keras would load nothing."""
        if not h5py.is_hdf5(path):
            return True
        with h5py.File(path, "r") as file:
            stored = set(file.get("model_weights", file))
        return not stored.isdisjoint(layer.name for layer in self.layers if layer.weights)

    def load_own_variables(self, store: Any) -> None:
        """Loads the model's own variables from a `.keras` file, before those of its layers."""
        super().load_own_variables(read_at_once(store))  # type: ignore[misc]

    def set_weights(self, weights: Any) -> None:
        """Sets weights that `get_weights` of a quantization-aware model returned."""
        if len(weights) != len(self.weights):
            raise ValueError(
                f"{counted(len(weights), 'weight is', 'weights are')} given, and '{self.name}' has "
                f"{len(self.weights)}, of which some are of quantizers. {FLOAT_WEIGHTS}"
            )
        super().set_weights(weights)  # type: ignore[misc]


def _is_checkpoint_of_floats(path: Any) -> bool:
    """Whether a path is a checkpoint without quantizers, of which Keras would load a part."""
    if not isinstance(path, (str, os.PathLike)) or not os.path.exists(f"{os.fspath(path)}.index"):
        return False
    names = [name for name, _ in tf.train.list_variables(os.fspath(path))]
    return not any("quantize_from" in name for name in names)
