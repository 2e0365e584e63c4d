"""Unpacks TFLite files into objects of their schema, and names the schema's numbers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorflow.lite.python import schema_py_generated as schema

TYPES: dict[str, int] = {
    name: getattr(schema.TensorType, name.upper())
    for name in (
        *("int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"),
        *("float16", "float32", "float64", "complex64", "bool"),
    )
}
"""Name of a NumPy type -> its number in a file."""

TYPE_NAMES = {number: name for name, number in TYPES.items()}

OPERATORS = {
    number: name for name, number in vars(schema.BuiltinOperator).items() if name.isupper()
}
"""Number of an operator in a file -> its name."""


def new(kind: str, **fields: Any) -> Any:
    """Makes an object of the schema, e.g. a `TensorT`, with fields. Old TensorFlows take none."""
    item = getattr(schema, kind)()
    for name, value in fields.items():
        setattr(item, name, value)
    return item


def contents_of(file: str | os.PathLike[str] | bytes) -> bytes:
    """Returns the contents of a TFLite file, given its path or the contents themselves.

    Raises:
        ValueError: if this is not a TFLite file.
    """
    if hasattr(file, "get_layer"):
        raise ValueError(
            f"Expected the path or the contents of a TFLite file, got the model "
            f"{getattr(file, 'name', '')!r}: pass what keras_qat.export_tflite returns for it."
        )
    if not isinstance(file, (str, bytes, os.PathLike)):
        raise ValueError(
            f"Expected the path or the contents of a TFLite file, got {type(file).__name__}: "
            f"arguments come in the order model, file, data."
        )
    contents = file if isinstance(file, bytes) else Path(file).read_bytes()
    if contents[4:8] != b"TFL3":
        name = "These bytes are" if isinstance(file, bytes) else f"{file} is"
        raise ValueError(f"{name} not a TFLite file. Pass a file from keras_qat.export_tflite.")
    return contents


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Runs a block that reads a file, and says so if the file is damaged.

    Raises:
        ValueError: if the block raises what Python does where a part is missing or is no text.
    """
    try:
        yield
    except (UnicodeDecodeError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(damage(error)) from error


def damage(error: object) -> str:
    """Returns the sentence that says that a file is damaged, and in which way."""
    return f"The TFLite file is damaged or cut short ({error}). Export it again."


def unpack(contents: bytes) -> Any:
    """Unpacks a file's contents into a `ModelT`."""
    return schema.ModelT.InitFromObj(schema.Model.GetRootAs(contents, 0))


def code_of(code: Any) -> int:
    """Returns the operator number of an `OperatorCodeT`; old runtimes read small ones elsewhere."""
    return max(code.builtinCode, code.deprecatedBuiltinCode)
