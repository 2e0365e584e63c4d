"""Models from files: of Keras 2 or 3, float or quantization-aware."""

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
    """Imports modules of the user's, from the current directory too."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    for name in names:
        importlib.import_module(name)


def load(path: Path, trust: bool = False) -> Any:
    """A model from a `.keras` or `.h5` file or the directory of a SavedModel.

    Args:
        path: of the file or directory.
        trust: whether code in the file may run, as that of `Lambda` layers.

    Raises:
        ValueError: if Keras cannot load it; says what to do.
    """
    from keras_qat import keras

    if not path.is_dir() and path.suffix not in FILES:
        raise ValueError(f"{path} is no model: those are {', '.join(FILES)} files and SavedModels.")
    if path.is_dir() and not (path / "keras_metadata.pb").exists():
        raise ValueError(
            f"{path} holds no Keras model. Of SavedModels those can be loaded that model.save "
            f"wrote; what keras_qat.export_saved_model wrote is for servers."
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
            f"Keras cannot load {path}. Custom layers have to be imported (--import MODULE), code "
            f"in files to be trusted (--trust). It says: {str(error)[:400]}"
        ) from error


def _is_of_keras_3(path: Path) -> bool:
    if path.suffix != ".keras" or not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        metadata = json.loads(archive.read("metadata.json"))
    return str(metadata.get("keras_version", "")).startswith("3")


def quantized(model: Any, recipe: str | None, scope: tuple[str, ...], target: str | None) -> Any:
    """A quantization-aware model: what was loaded, or made from it."""
    import keras_qat
    from keras_qat.training.schedule import is_quantized

    if not is_quantized(model):
        return keras_qat.quantize_model(model, recipe, scope=list(scope) or None, target=target)
    given = {"--recipe": recipe, "--scope": scope, "--target": target}
    for option, value in given.items():
        if value:
            raise ValueError(f"'{model.name}' is quantized already: {option} is for float models.")
    return model
