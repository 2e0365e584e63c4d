"""Export to SavedModel, for servers."""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from keras_qat.export.files import check_writable, replacing
from keras_qat.export.inference import inference_module
from keras_qat.exportable import check_exportable

__all__ = ["export_saved_model"]


def export_saved_model(model: Any, path: str | os.PathLike[str]) -> None:
    """Writes the folded, fake-quantized inference function as a SavedModel.

    It loads where only TensorFlow is installed. Its signature `serving_default` takes the model's
    inputs by name and returns its outputs by name, in float.

    Args:
        model: a trained quantization-aware model.
        path: the directory to write. An existing SavedModel is replaced once the new one
            is complete.

    Raises:
        ValueError: if the model is not quantized or a quantizer has no usable range.
        OSError: if `path` cannot be written.

    Example:
        >>> keras_qat.export_saved_model(qat, "model")
        >>> tf.saved_model.load("model").signatures["serving_default"](image=x)
    """
    check_exportable(model)
    path = check_writable(path, directory=True)
    module = inference_module(model)
    with replacing(path) as scratch:
        tf.saved_model.save(module, str(scratch), signatures={"serving_default": module.serve})
