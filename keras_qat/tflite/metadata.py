"""Reads and writes the metadata that keras_qat stores in TFLite files."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from typing import Any

import numpy as np
from tensorflow.lite.python import schema_py_generated as schema

from keras_qat.keras2.backend import keras
from keras_qat.keras2.layers_and_models import list_weights
from keras_qat.tflite.schema import read_contents


def compute_fingerprint(model: keras.Model) -> dict[str, str]:
    """Returns hashes of a model's weights and ranges. `verify` compares them with a file's hashes.

    The hashes ignore names, the order of weights, and counters of training steps.

    Returns:
        A dict. `weights` is a hash of all values, and `shapes` is a hash of all shapes.
    """
    weights = [weight for weight in list_weights(model) if weight.dtype.is_floating]
    arrays = [np.asarray(weight.value()) for weight in weights]
    shapes = [repr(array.shape).encode() for array in arrays]
    values = [
        _digest(shape, array.reshape(-1).view(np.uint8).data)
        for shape, array in zip(shapes, arrays, strict=True)
    ]
    return {"weights": _digest(*sorted(values)).hex(), "shapes": _digest(*sorted(shapes)).hex()}


def _digest(*pieces: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def read_metadata(tflite: str | os.PathLike[str] | bytes) -> dict[str, Any]:
    """Reads the metadata that `export_tflite` wrote into a file.

    Args:
        tflite: path or contents of the file.

    Returns:
        A dict with the `version` of keras_qat, the `recipe` as JSON data for `Recipe.from_config`,
        and the `fingerprint`, which `verify` compares with the model. Some files have more entries.
        `rescaling` has the scale and offset of each input that accepts pixels. `keys` maps the name
        of an input to its key in the model's input dict, if they differ. `kernels` is the kernel
        family of `predict`, and is missing if this is "xnnpack". `states` means that the file keeps
        states of recurrent layers.

    Raises:
        ValueError: if `export_tflite` did not write this file, or the file is damaged.

    Example:
        >>> keras_qat.read_metadata("model.tflite")["recipe"]["name"]
        'int8'
    """
    contents = read_contents(tflite)
    try:
        model = schema.Model.GetRootAsModel(contents, 0)
        for index in range(model.MetadataLength()):
            entry = model.Metadata(index)
            if entry.Name() == b"keras_qat":
                data = model.Buffers(entry.Buffer()).DataAsNumpy().tobytes()
                # Earlier versions did not compress.
                return json.loads(data if data.startswith(b"{") else zlib.decompress(data))
    except (
        *(struct.error, zlib.error),
        *(LookupError, TypeError, AttributeError, ValueError),
    ) as error:
        raise ValueError(
            "The TFLite file is damaged or cut short: its metadata cannot be read. Export it again."
        ) from error
    raise ValueError("The file has no metadata of keras_qat: another program wrote or changed it.")


def compress(entry: object) -> bytes:
    """Returns an entry of the metadata as compressed JSON."""
    text = json.dumps(entry, sort_keys=True, separators=(",", ":"))
    return zlib.compress(text.encode(), 9)


def _read_entry(contents: bytes, name: str) -> Any:
    try:
        return read_metadata(contents).get(name, {})
    except ValueError:
        return {}


def read_input_keys(contents: bytes) -> dict[str, str]:
    """Maps input names of a file to keys of the model's input dict, if these differ."""
    return _read_entry(contents, "keys")


def read_kernels(contents: bytes) -> str:
    """Returns the kernel family that the exported model used for `predict`, such as "xnnpack"."""
    return _read_entry(contents, "kernels") or "xnnpack"


def read_rescalings(contents: bytes) -> dict[str, tuple[Any, Any]]:
    """Maps the name of each input that accepts pixels to its scale and offset."""
    rescaling = _read_entry(contents, "rescaling")
    return {name: (scale, offset) for name, (scale, offset) in rescaling.items()}
