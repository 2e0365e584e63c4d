"""Files of quantization-aware models: replaced by whole ones, and refused if they are of others."""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from keras_qat.frontend.keras2.serialization import read_at_once
from keras_qat.io.atomic_files import whole

__all__ = ["WholeFiles"]

FILES = (".keras", ".h5", ".hdf5")
"""Endings of the names of what Keras writes as one file."""

FLOAT_WEIGHTS = (
    "Weights of a float model are loaded into that, before keras_qat.quantize_model copies them."
)
"""What to do with weights that do not fit."""


EXPORTED = {".tflite": "export_tflite", ".onnx": "export_onnx", ".cc": "export_c"}
"""Ending of a file that is no Keras model -> the verb that writes it."""


class WholeFiles:
    """A Keras model that replaces files by whole ones, and takes no weights of a float model."""

    name: str
    weights: list[Any]

    def save(self, filepath: Any, overwrite: bool = True, *args: Any, **kwargs: Any) -> None:
        """As Keras documents it. A file is replaced by a whole one, also if the process is killed.

        Keras writes to the file itself: what was there is lost as soon as it begins.

        Raises:
            ValueError: if the path ends as those of exported files, where Keras would make a
                directory of that name.
        """
        verb = EXPORTED.get(os.path.splitext(str(filepath))[1])
        if verb is not None:
            raise ValueError(
                f"save writes Keras models, and {filepath} is none: call "
                f"keras_qat.{verb}(model, {str(filepath)!r})."
            )
        with whole(filepath, FILES if overwrite else ()) as path:
            super().save(path, overwrite, *args, **kwargs)  # type: ignore[misc]

    def save_weights(self, filepath: Any, overwrite: bool = True, *args: Any, **kwargs: Any) -> Any:
        """As Keras documents it; a file is replaced by a whole one, as in `save`."""
        with whole(filepath, FILES if overwrite else ()) as path:
            return super().save_weights(path, overwrite, *args, **kwargs)  # type: ignore[misc]

    def load_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        """As Keras documents it, of weights that a quantization-aware model saved."""
        try:
            if _is_checkpoint_of_floats(filepath):
                raise ValueError(f"The checkpoint {filepath} holds no quantizers.")
            return super().load_weights(filepath, *args, **kwargs)  # type: ignore[misc]
        except ValueError as error:
            raise ValueError(f"{str(error).rstrip('.')}. {FLOAT_WEIGHTS}") from error

    def load_own_variables(self, store: Any) -> None:
        """As Keras documents it: called before its layers' when a `.keras` file is loaded."""
        super().load_own_variables(read_at_once(store))  # type: ignore[misc]

    def set_weights(self, weights: Any) -> None:
        """As Keras documents it, of what `get_weights` of a quantization-aware model gave."""
        if len(weights) != len(self.weights):
            raise ValueError(
                f"{len(weights)} weights are given, and '{self.name}' has {len(self.weights)}, of "
                f"which some are of quantizers. {FLOAT_WEIGHTS}"
            )
        super().set_weights(weights)  # type: ignore[misc]


def _is_checkpoint_of_floats(path: Any) -> bool:
    """Whether it is one without quantizers: Keras would load a part of it, and say nothing."""
    if not isinstance(path, (str, os.PathLike)) or not os.path.exists(f"{os.fspath(path)}.index"):
        return False
    names = [name for name, _ in tf.train.list_variables(os.fspath(path))]
    return not any("quantize_from" in name for name in names)
