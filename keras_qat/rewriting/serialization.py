"""Checks what Keras cannot save or load, and reads `.keras` files at once."""

from __future__ import annotations

import inspect
import io
from collections.abc import Iterable
from typing import Any

import h5py
import tensorflow as tf

from keras_qat.graph.calls import Call, Graph
from keras_qat.keras2.backend import keras
from keras_qat.keras2.layers_and_models import find_custom_attributes
from keras_qat.keras2.user_errors import first_line
from keras_qat.messages import warn_caller
from keras_qat.origins import LIBRARIES, package_of


def read_at_once(store: Any) -> Any:
    """Moves the weights of the `.keras` file that Keras is loading into memory.

    HDF5 seeks backwards for every weight. Before Python 3.12 `zipfile` then reads the file from
    its start again, which takes half a minute for large models.

    Args:
        store: the argument of `load_own_variables` of the model.

    Returns:
        The same group in memory, to read instead. Keras reads later groups from memory too.
    """
    frame = inspect.currentframe()
    while frame is not None and "weights_store" not in frame.f_locals:
        frame = frame.f_back
    stored: Any = None if frame is None else frame.f_locals["weights_store"]
    if getattr(stored, "archive", None) is None or not isinstance(store, h5py.Group):
        return store
    if store.file != stored.h5_file or isinstance(stored.io_file, io.BytesIO):
        return store
    name = store.name
    stored.h5_file.close()
    stored.io_file.close()
    stored.io_file = io.BytesIO(stored.archive.read(stored.root_path))
    stored.h5_file = h5py.File(stored.io_file, mode="r")
    return stored.h5_file[name]


def why_not_saved(call: Call) -> str | None:
    """Returns why a call cannot be saved or loaded again; None if no reason is known."""
    arguments = tf.nest.flatten([call.args, call.kwargs])
    if any(argument is Ellipsis for argument in arguments):
        return "no .keras file holds an Ellipsis; write x[:, :, a] for x[..., a]"
    for part in tf.nest.flatten(find_custom_attributes(call.layer, vars(call.layer))):
        regularizes = isinstance(part, keras.regularizers.Regularizer)
        module = keras.regularizers if regularizes else keras.constraints
        try:
            module.serialize(part)
        except TypeError as error:
            return f"Keras cannot save the {type(part).__name__} of a weight: {first_line(error)}"
    activation = vars(call.layer).get("activation")
    if not callable(activation) or isinstance(activation, keras.layers.Layer):
        return None
    if getattr(activation, "__name__", "") == "<lambda>":
        return "Keras loads no activation that is a lambda; name the function"
    try:
        keras.activations.serialize(activation)
    except TypeError:
        return f"no file holds an activation that is a {type(activation).__name__}"
    return None


def why_not_loaded(call: Call) -> str | None:
    """Returns why Keras cannot load a layer that is not opened; None if no reason is known."""
    if any(isinstance(argument, slice) for argument in tf.nest.flatten([call.args, call.kwargs])):
        return "no .keras file holds a slice that a layer is called with; give its ends"
    activation = vars(call.layer).get("activation")
    for part in (type(call.layer), activation if inspect.isfunction(activation) else None):
        if part is not None and not _is_known(part):
            return (
                f"{part.__name__} is not registered: load the model with custom_objects="
                f"{{'{part.__name__}': {part.__name__}}}, or decorate it with "
                f"@keras.saving.register_keras_serializable()"
            )
    return None


def _is_known(part: Any) -> bool:
    """Returns whether Keras finds a class or a function by its name."""
    name = keras.utils.get_registered_name(part)
    is_registered = keras.utils.get_registered_object(name) is not None
    return package_of(part) in LIBRARIES or is_registered


def warn_of_closed(graph: Graph, float_layers: Iterable[str]) -> None:
    """Warns of custom layers that could not be opened, and of calls that Keras cannot save."""
    closed, message = graph.closed, []
    lines = [f"  {name}: {closed[name]}" for name in float_layers if name in closed]
    if lines:
        message += ["These layers compute in float, as they cannot be opened:", *lines]
        message += [
            "Describe a layer with keras_qat.register_op, or silence this warning with "
            "override(layer, open=False)."
        ]
    lines = []
    for call in graph.calls:
        reason = why_not_saved(call)
        if reason is None and call.name in closed:
            reason = why_not_loaded(call)
        lines += [] if reason is None else [f"  {call.name}: {reason}."]
    if lines:
        message += ["The model cannot be saved and loaded again as it is:", *dict.fromkeys(lines)]
    if message:
        warn_caller("\n".join(message))
