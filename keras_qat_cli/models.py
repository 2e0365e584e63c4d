"""Loads models of Keras 2 or 3, float or quantization-aware."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

__all__ = [
    "FILES",
    "ModelFile",
    "check_modules",
    "import_modules",
    "is_quantized",
    "load",
    "takes_pixels",
]

FILES = (".keras", ".h5", ".hdf5")

UNREADABLE = (
    *(zipfile.BadZipFile, zlib.error, EOFError, KeyError, TypeError, ValueError),
    *(AttributeError, OSError, RuntimeError),  # For encrypted or too deeply nested contents.
)
"""Exceptions that occur when a damaged model is read."""


class ModelFile(click.Path):
    """A saved model, checked without importing TensorFlow.

    Args:
        quantized: whether the model must be quantization-aware. None allows any model.
    """

    def __init__(self, quantized: bool | None = None) -> None:
        super().__init__(exists=True, path_type=Path)
        self.quantized = quantized

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Returns the path if Keras can load the model."""
        path = Path(str(super().convert(value, param, ctx)))
        is_aware = is_quantized(path)
        if is_aware and self.quantized is False:
            raise ValueError(f"{path} is already quantized. Pass the float model.")
        if not is_aware and self.quantized:
            raise ValueError(
                f"{path} is a float model. Quantize it first: keras-qat calibrate {path} DATA -o "
                f"qat.keras. Or save the result of keras_qat.quantize_model after training."
            )
        return path


def is_quantized(path: Path) -> bool:
    """Returns True if a file holds a quantization-aware model."""
    return "keras_qat>" in _configuration(path)


def takes_pixels(path: Path) -> bool:
    """Returns True if a saved model has a layer that scales pixels from 0 to 255."""
    scales = re.findall(
        r'"Rescaling"(?:[^{}]|\{[^{}]*?)*?"scale": ([\d.e-]+)', _configuration(path)
    )
    return any(0.99 <= 255 * float(scale) <= 2.01 for scale in scales)


def _configuration(path: Path) -> str:
    """Return the configuration of a saved model as text.

    Raises:
        ValueError: if the file contains no model.
    """
    if path.is_dir():
        metadata = path / "keras_metadata.pb"
        if not metadata.exists():
            raise ValueError(
                f"{path} contains no Keras model. Pass a SavedModel from model.save. A SavedModel "
                f"from keras_qat.export_saved_model is for servers only."
            )
        return metadata.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".keras":
        try:
            with zipfile.ZipFile(path) as archive:
                return archive.read("config.json").decode()
        except UNREADABLE as error:
            raise ValueError(f"{path} is not a Keras model, or it is damaged.") from error
    if path.suffix in FILES:
        import h5py

        try:
            with h5py.File(path) as file:
                return str(file.attrs["model_config"])
        except OSError as error:
            raise ValueError(f"{path} is not a Keras model, or it is damaged.") from error
        except KeyError as error:
            raise ValueError(
                f"{path} contains weights, but no layers. Save the model with model.save."
            ) from error
    if path.suffix == ".tflite":
        raise ValueError(
            f"{path} is a TFLite file. Pass the quantization-aware model that it was exported "
            f"from, a .keras file, which computes the same integers."
        )
    raise ValueError(f"{path} is not a model. Pass a SavedModel or a {', '.join(FILES)} file.")


def check_modules(names: Iterable[str]) -> None:
    """Raises a `ValueError` if a module does not exist. Does not import it."""
    _search_here()
    for name in names:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            raise ValueError(
                f"There is no module {name} in this directory or among the installed packages."
            )


def import_modules(names: Iterable[str]) -> None:
    """Imports a user's modules, also from the current directory."""
    _search_here()
    for name in names:
        importlib.import_module(name)


def load(path: Path, trust: bool = False, compiled: bool = False) -> Any:
    """Loads a model from a `.keras` or `.h5` file or from the directory of a SavedModel.

    Args:
        path: the file or directory.
        trust: whether to run code in the file, such as `Lambda` layers and the graph of a
            SavedModel.
        compiled: whether to load the loss and metrics too.

    Raises:
        ValueError: if Keras cannot load the model, or if it is a SavedModel and `trust` is False.
            The message contains advice.
    """
    from keras_qat import keras
    from keras_qat.keras2.safe_loading import check_code, serialization

    if path.is_dir() and not trust:
        raise ValueError(
            f"{path} is a SavedModel, whose graph can read and write files while it runs. If you "
            f"trust it, pass --trust: keras-qat --trust COMMAND ..."
        )
    try:
        if _is_of_keras_3(path):
            import keras as keras_3

            return keras_3.models.load_model(str(path), compile=compiled, safe_mode=not trust)
        if not trust:
            check_code(json.loads(_configuration(path)))
        with serialization.SafeModeScope(not trust):
            return keras.models.load_model(str(path), compile=compiled, safe_mode=not trust)
    except UNREADABLE as error:
        raise ValueError(
            f"Keras cannot load {path}. Import custom layers with --import MODULE, and allow code "
            f"in the file with --trust. The error from Keras: {str(error)[:400]}"
        ) from error


def _is_of_keras_3(path: Path) -> bool:
    if path.suffix != ".keras":
        return False
    with zipfile.ZipFile(path) as archive:
        metadata = json.loads(archive.read("metadata.json"))
    return str(metadata.get("keras_version", "")).startswith("3")


def _search_here() -> None:
    if "" not in sys.path:
        sys.path.insert(0, "")
