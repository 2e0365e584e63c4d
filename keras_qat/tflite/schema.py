"""Objects, types and operators of the TFLite schema, and names of tensors in files."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
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
"""Maps NumPy types, such as "int8", to integers in `schema.TensorType`."""

TYPE_NAMES = {code: name for name, code in TYPES.items()}

OPERATORS = {code: name for name, code in vars(schema.BuiltinOperator).items() if name.isupper()}
"""Maps integers in `schema.BuiltinOperator` to names, such as "CONV_2D"."""

SCOPE = "keras_qat"
"""Prefix of the names of all tensors that keras_qat writes. TFLiteConverter uses other names."""


def new(kind: str, **fields: object) -> Any:
    """Makes a `TensorT` or other schema object. Old TensorFlow's classes accept no arguments."""
    item = getattr(schema, kind)()
    for name, value in fields.items():
        setattr(item, name, value)
    return item


def read_contents(file: str | os.PathLike[str] | bytes) -> bytes:
    """Returns the contents of a TFLite file. `file` is a path, or the contents.

    Raises:
        ValueError: if this is not a TFLite file.
    """
    if hasattr(file, "get_layer"):
        raise ValueError(
            f"Expected the path or the contents of a TFLite file, got the model "
            f"{getattr(file, 'name', '')!r}: pass a file from keras_qat.export_tflite."
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
def report_damage() -> Iterator[None]:
    """Explains errors in a `with` block that reads a TFLite file.

    Raises:
        ValueError: if missing or wrong data cause an error in the block.
    """
    try:
        yield
    except (UnicodeDecodeError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(describe_damage(error)) from error


def describe_damage(error: object) -> str:
    return f"The TFLite file is damaged or cut short ({error}). Export it again."


def unpack(contents: bytes) -> Any:
    return schema.ModelT.InitFromObj(schema.Model.GetRootAs(contents, 0))


def operator_code(entry: schema.OperatorCodeT) -> int:
    """Returns the code of an operator. Old files store the code in another field."""
    return max(entry.builtinCode, entry.deprecatedBuiltinCode)


def as_scope(name: str) -> str:
    """Replaces characters that TensorFlow does not accept in the name of a scope."""
    return re.sub(r"[^A-Za-z0-9_.\\/>-]", ">", name)


def find_scope(name: str, scopes: Iterable[str]) -> str | None:
    """Returns the longest of `scopes` that is a prefix of the path `name`, or None."""
    path = name.split(";")[0].removeprefix(f"{SCOPE}/").split("/")
    candidates = ["/".join(path[:end]) for end in range(len(path), 0, -1)]
    known = set(scopes)
    return next((scope for scope in candidates if scope in known), None)
