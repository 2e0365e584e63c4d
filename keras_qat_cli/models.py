"""Loads models of Keras 2 or 3, float or quantization-aware."""

from __future__ import annotations

import importlib
import json
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["FILES", "import_modules", "load", "quantized"]

FILES = (".keras", ".h5", ".hdf5")


def import_modules(names: Iterable[str]) -> None:
    """Imports a user's modules, also from the current directory."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    for name in names:
        importlib.import_module(name)


def load(path: Path, trust: bool = False) -> Any:
    """Loads a model from a `.keras` or `.h5` file or from the directory of a SavedModel.

    Args:
        path: the file or directory.
        trust: whether code in the file may run, such as `Lambda` layers.

    Raises:
        ValueError: if Keras cannot load the model; the message says what to do.
    """
    from keras_qat import keras

    if not path.is_dir() and path.suffix not in FILES:
        raise ValueError(f"{path} is not a model: pass a SavedModel or a {', '.join(FILES)} file.")
    if path.is_dir() and not (path / "keras_metadata.pb").exists():
        raise ValueError(
            f"{path} holds no Keras model. Pass a SavedModel from model.save; one from "
            f"keras_qat.export_saved_model is for servers only."
        )
    models = keras.models
    if _is_of_keras_3(path):
        import keras as keras_3

        models = keras_3.models
    try:
        options = (
            {} if path.is_dir() or path.suffix in (".h5", ".hdf5") else {"safe_mode": not trust}
        )
        return models.load_model(str(path), compile=False, **options)
    except (TypeError, ValueError, AttributeError, OSError) as error:
        raise ValueError(
            f"Keras cannot load {path}. Import custom layers with --import MODULE, and allow code "
            f"in the file with --trust. Keras' error: {str(error)[:400]}"
        ) from error


def _is_of_keras_3(path: Path) -> bool:
    if path.suffix != ".keras" or not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        metadata = json.loads(archive.read("metadata.json"))
    return str(metadata.get("keras_version", "")).startswith("3")


def quantized(model: Any, recipe: str | None, scope: tuple[str, ...], target: str | None) -> Any:
    """Returns a quantization-aware model: the loaded one, or one made from it."""
    import keras_qat
    from keras_qat.training.schedule import is_quantized

    if not is_quantized(model):
        return keras_qat.quantize_model(model, recipe, scope=list(scope) or None, target=target)
    options = {"--recipe": recipe, "--scope": scope, "--target": target}
    for option, value in options.items():
        if value:
            raise ValueError(f"'{model.name}' is quantized already: {option} is for float models.")
    return model
