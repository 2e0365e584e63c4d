"""What the library notes in the files that it writes."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from typing import Any

import numpy as np
from tensorflow.lite.python import schema_py_generated as schema

from keras_qat.frontend import graph as graph_lib
from keras_qat.tflite.schema import contents_of

__all__ = ["compressed", "fingerprint", "read_metadata", "rescaled_inputs"]

DAMAGED = (struct.error, zlib.error)
"""What reading a damaged file raises besides Python's own errors."""


def fingerprint(model: Any) -> dict[str, str]:
    """What tells whether a file is of a model as it is now: digests of its weights and ranges.

    They do not depend on names, on the order of the weights, or on counters of training steps.

    Returns:
        `weights`, a digest of the numbers, and `shapes`, one of their shapes alone.
    """
    arrays = [
        np.asarray(weight.value())
        for weight in graph_lib.weights_in_order(model)
        if weight.dtype.is_floating
    ]
    shapes = [repr(array.shape).encode() for array in arrays]
    numbers = [
        _digest(shape, np.ascontiguousarray(array))
        for shape, array in zip(shapes, arrays, strict=True)
    ]
    return {
        "weights": _digest(*sorted(numbers)).hex(),
        "shapes": _digest(*sorted(shapes)).hex(),
    }


def _digest(*parts: Any) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(part)
    return found.digest()


def read_metadata(tflite: str | os.PathLike[str] | bytes) -> dict[str, Any]:
    """Reads what `export_tflite` noted in a file.

    Args:
        tflite: path or contents of the file.

    Returns:
        A dict with `version`, that of keras_qat, `recipe`, the recipe as JSON data, of which
        `Recipe.from_config` makes a recipe, and `fingerprint`, by which `verify` tells whether
        the file is of a model as it is now. Of files that take pixels where the model takes other
        numbers also `rescaling`: name of the input -> scale and offset. Of files that keep the
        states of recurrent layers also `states`.

    Raises:
        ValueError: if it is no TFLite file, a damaged one, or not one that `export_tflite` wrote.

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
    raise ValueError(
        "The file holds no metadata of keras_qat: another program has written or changed it."
    )


def compressed(entry: Any) -> bytes:
    """An entry as files hold it: JSON, compressed, as it is much of a small network's file."""
    text = json.dumps(entry, sort_keys=True, separators=(",", ":"))
    return zlib.compress(text.encode(), 9)


def _unpacked(data: bytes) -> Any:
    """An entry of a file; earlier versions did not compress it."""
    return json.loads(data if data.startswith(b"{") else zlib.decompress(data))


def rescaled_inputs(contents: bytes) -> dict[str, tuple[Any, Any]]:
    """Inputs of a file that take pixels: name -> scale and offset that make the model's input."""
    try:
        found = read_metadata(contents).get("rescaling", {})
    except ValueError:
        return {}
    return {name: (scale, offset) for name, (scale, offset) in found.items()}
