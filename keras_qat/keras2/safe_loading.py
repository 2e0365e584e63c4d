"""Refuses saved configurations that would run code during loading."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

from tensorflow.python.util import tf_export

from keras_qat.keras2.backend import keras
from keras_qat.messages import LIBRARIES

serialization: Any = inspect.getmodule(keras.saving.deserialize_keras_object)

EFFECTS = ("write_file", "print", "py_func", "numpy_func", "rpc_call", "custom_call", "shutdown")
"""Words in the names of TensorFlow operations with side effects."""


def get_safe_mode() -> bool | None:
    """Returns True if Keras is loading a file in safe mode, or None if the mode is unknown."""
    mode = serialization.in_safe_mode()
    frame = inspect.currentframe() if mode is None else None
    while frame is not None:  # Keras sets no mode for .h5 files and SavedModels.
        if frame.f_code.co_name == "load_model" and "safe_mode" in frame.f_locals:
            return bool(frame.f_locals["safe_mode"])
        frame = frame.f_back
    return mode


@contextlib.contextmanager
def safe_scope(config: object, custom_objects: dict[str, Any] | None = None) -> Iterator[None]:
    """Applies Keras' safe mode inside a `with` block, even to .h5 files.

    Args:
        config: the configuration that is loaded in the block.
        custom_objects: maps names to accepted classes and functions.

    Raises:
        ValueError: if the configuration names code that Keras must not import or call.
    """
    mode = get_safe_mode()
    if mode is not False:
        with keras.utils.custom_object_scope(custom_objects or {}):
            check_code(config)
    with contextlib.nullcontext() if mode is None else serialization.SafeModeScope(mode):
        yield


def check_code(config: object) -> None:
    """Raises a `ValueError` if a configuration names code that Keras must not import or call.

    Classes and functions that are registered with Keras are accepted. Other code must belong to a
    library, such as Keras, or to an imported module. It must be a class with `from_config`, a
    user's function, or an operation that only computes tensors.
    """
    if isinstance(config, dict):
        if reason := _find_reason(config):
            raise ValueError(
                f"The model's configuration {reason}. If you trust the file, pass "
                f"safe_mode=False. Or register the custom class or function with Keras, or import "
                f"its module before you load the file."
            )
        config = list(config.values())
    if isinstance(config, (list, tuple)):
        for entry in config:
            check_code(entry)


def _find_reason(config: dict[str, Any]) -> str:
    """Return the reason why a configuration is refused, or "" if it is accepted."""
    kind, contents = config.get("class_name"), config.get("config")
    if kind == "TensorFlowOpLayer":
        return "has a TensorFlowOpLayer, which runs any operation of TensorFlow"
    if isinstance(contents, dict) and kind in ("TFOpLambda", "SlicingOpLambda", "ClassMethod"):
        symbol = str(contents.get("cls_symbol" if kind == "ClassMethod" else "function"))
        if kind == "ClassMethod":
            is_safe = symbol == "RaggedTensor"
        else:
            is_safe = _only_computes(tf_export.get_symbol_from_name(symbol), symbol)
        return "" if is_safe else f"calls {symbol!r}, which does more than compute tensors"
    is_function = kind == "function"
    module, name = config.get("module"), contents if is_function else config.get("spec_name", kind)
    if not isinstance(module, str) or not isinstance(name, str):
        return ""
    registered_name = str(config.get("registered_name"))
    known = keras.utils.get_registered_object(name if is_function else registered_name)
    if known is not None:
        return ""
    package = module.split(".")[0]
    described = f"the {'function' if is_function else 'class'} {name!r} of the module {module!r}"
    if package not in LIBRARIES and module not in sys.modules:
        return f"has {described}, which is not imported"
    for found_name in (name, registered_name):
        if not _is_harmless(_find_object(module, found_name), package, found_name):
            return f"has {described}, which is neither a layer nor an operation on tensors"
    return ""


def _find_object(module: str, name: str) -> Any:
    """Return the object that Keras finds by a module and a name, or None."""
    if found := tf_export.get_symbol_from_name(f"{module}.{name}"):
        return found
    loaded: Any = None
    is_renamed = module.startswith("keras") and keras.__name__.startswith("tf_keras")
    with contextlib.suppress(ImportError):
        loaded = importlib.import_module(f"tf_{module}" if is_renamed else module)
    found = vars(loaded).get(name) if loaded else None
    outer, _, inner = name.partition(".")
    return getattr(vars(loaded).get(outer), inner, None) if inner and loaded else found


def _is_harmless(found: Any, package: str, name: str) -> bool:
    if found is None:
        return True
    if package in sys.stdlib_module_names:
        return package == "builtins" and not hasattr(builtins, name)
    if inspect.isclass(found):
        return hasattr(found, "from_config") or hasattr(found, "_deserialize")
    if package in LIBRARIES:
        return _only_computes(found, name)
    path = getattr(sys.modules[package], "__file__", None) or ""
    return inspect.isfunction(found) and "-packages" not in path


def _only_computes(function: Any, name: str) -> bool:
    names = (name, str(getattr(function, "__name__", "")))
    if any(word in name for word in EFFECTS for name in names):
        return False
    return hasattr(function, "_tf_fallback_dispatchers") or name.split(".")[0] == "signal"
