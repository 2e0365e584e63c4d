"""TFLite files as objects of their schema, and the schema's numbers by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tensorflow.lite.python import schema_py_generated as schema

__all__ = ["OPERATORS", "TYPES", "TYPE_NAMES", "code_of", "contents_of", "new", "unpack"]

TYPES: dict[str, int] = {
    name: getattr(schema.TensorType, name.upper())
    for name in (
        *("int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"),
        *("float16", "float32", "float64", "bool"),
    )
}
"""Name of a type, as numpy has it -> its number in a file."""

TYPE_NAMES = {number: name for name, number in TYPES.items()}

OPERATORS = {
    number: name for name, number in vars(schema.BuiltinOperator).items() if name.isupper()
}
"""Number of an operator in a file -> its name."""


def new(kind: str, **fields: Any) -> Any:
    """An object of the schema, e.g. a `TensorT`; older TensorFlows set no fields at once."""
    made = getattr(schema, kind)()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def contents_of(file: str | os.PathLike[str] | bytes) -> bytes:
    """The contents of a TFLite file, given its path or the contents themselves.

    Raises:
        ValueError: if it is none.
    """
    if not isinstance(file, (str, bytes, os.PathLike)):
        raise ValueError(
            f"Expected the path or the contents of a TFLite file, got {type(file).__name__}: "
            f"arguments come in the order model, file, data."
        )
    contents = file if isinstance(file, bytes) else Path(file).read_bytes()
    if contents[4:8] != b"TFL3":
        name = "The given bytes are" if isinstance(file, bytes) else f"{file} is"
        raise ValueError(f"{name} no TFLite file. Pass what keras_qat.export_tflite wrote.")
    return contents


def unpack(contents: bytes) -> Any:
    """A file's contents as a `ModelT`."""
    return schema.ModelT.InitFromObj(schema.Model.GetRootAs(contents, 0))


def code_of(code: Any) -> int:
    """The operator of an `OperatorCodeT`: small numbers are in a field for old runtimes."""
    return max(code.builtinCode, code.deprecatedBuiltinCode)
