"""What the library notes in the files that it writes."""

from __future__ import annotations

import json
import os
import struct
from typing import Any

from tensorflow.lite.python import schema_py_generated as schema

from keras_qat.tflite.objects import contents_of

__all__ = ["read_metadata"]


def read_metadata(tflite: str | os.PathLike[str] | bytes) -> dict[str, Any]:
    """Reads what `export_tflite` noted in a file.

    Args:
        tflite: path or contents of the file.

    Returns:
        A dict with `version`, that of keras_qat, and `recipe`, the recipe as JSON data:
        `Recipe.from_config` makes a recipe of it.

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
                return json.loads(model.Buffers(entry.Buffer()).DataAsNumpy().tobytes())
    except (struct.error, LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            "The TFLite file is damaged or cut short: its metadata cannot be read. Export it again."
        ) from error
    raise ValueError(
        "The file holds no metadata of keras_qat: another program has written or changed it."
    )
