"""Reads and writes the library's metadata in TFLite files."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from typing import Any

import numpy as np
from tensorflow.lite.python import schema_py_generated as schema

from keras_qat.keras2.layers_and_models import list_weights
from keras_qat.tflite.schema import contents_of

DAMAGED = (struct.error, zlib.error)
"""Errors that reading a damaged file raises, besides Python's own."""


def fingerprint(model: Any) -> dict[str, str]:
    """Returns digests of a model's weights and ranges, to recognize files exported from it.

    Names, the order of the weights and counters of training steps do not change the digests.

    Returns:
        `weights`, a digest of the numbers, and `shapes`, a digest of their shapes.
    """
    arrays = [
        np.asarray(weight.value()) for weight in list_weights(model) if weight.dtype.is_floating
    ]
    shapes = [repr(array.shape).encode() for array in arrays]
    numbers = [
        _digest(shape, np.ascontiguousarray(array))
        for shape, array in zip(shapes, arrays, strict=True)
    ]
    return {"weights": _digest(*sorted(numbers)).hex(), "shapes": _digest(*sorted(shapes)).hex()}


def _digest(*parts: Any) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.digest()


def read_metadata(tflite: str | os.PathLike[str] | bytes) -> dict[str, Any]:
    """Reads the metadata that `export_tflite` wrote into a file.

    Args:
        tflite: path or contents of the file.

    Returns:
        A dict with the `version` of keras_qat, the `recipe` as JSON data for `Recipe.from_config`,
        and the `fingerprint` by which `verify` knows the model that the file was exported from.
        Files that take pixels where the model takes other numbers have `rescaling`, a dict from the
        name of an input to scale and offset; those of models that take a dict whose keys are not
        the inputs' names have `keys`, from name to key; those whose model computes as other kernels
        than XNNPACK's have `kernels`, their name; and those that keep the states of recurrent
        layers have `states`.

    Raises:
        ValueError: if this is not an undamaged TFLite file that `export_tflite` wrote.

    Example:
        >>> keras_qat.read_metadata("model.tflite")["recipe"]["name"]
        'int8'
    """
    contents = contents_of(tflite)
    try:
        model = schema.Model.GetRootAsModel(contents, 0)
        for index in range(model.MetadataLength()):
            entry = model.Metadata(index)
            if entry.Name() == b"keras_qat":
                return _unpacked(model.Buffers(entry.Buffer()).DataAsNumpy().tobytes())
    except (*DAMAGED, LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            "The TFLite file is damaged or cut short: its metadata cannot be read. Export it again."
        ) from error
    raise ValueError("The file has no metadata of keras_qat: another program wrote or changed it.")


def compressed(entry: Any) -> bytes:
    """Compresses an entry, as JSON is a large part of a small network's file."""
    text = json.dumps(entry, sort_keys=True, separators=(",", ":"))
    return zlib.compress(text.encode(), 9)


def _unpacked(data: bytes) -> Any:
    """Unpacks an entry of a file. Earlier versions did not compress it."""
    return json.loads(data if data.startswith(b"{") else zlib.decompress(data))


def _entry(contents: bytes, name: str) -> Any:
    """Returns an entry of a file's metadata; an empty dict if the file has none."""
    try:
        return read_metadata(contents).get(name, {})
    except ValueError:
        return {}


def input_keys(contents: bytes) -> dict[str, str]:
    """Returns the keys of the dict that the model takes, where inputs have other names, by name."""
    return _entry(contents, "keys")


def model_kernels(contents: bytes) -> str:
    """Returns the name of the kernels that the model's `predict` computes as."""
    return _entry(contents, "kernels") or "xnnpack"


def rescaled_inputs(contents: bytes) -> dict[str, tuple[Any, Any]]:
    """Returns the scale and offset of each input that takes pixels, by name."""
    rescaling = _entry(contents, "rescaling")
    return {name: (scale, offset) for name, (scale, offset) in rescaling.items()}
