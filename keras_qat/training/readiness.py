"""The check whether a model can be exported, with advice where it cannot."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from keras_qat.config import specs
from keras_qat.io.atomic_files import check_writable
from keras_qat.messages import counted
from keras_qat.training.fixed_settings import check_settings
from keras_qat.training.quantizers import activation_quantizers
from keras_qat.training.schedule import check_is_graph, check_process, check_quantized

DIVERGED = "The training diverged: go back to an earlier checkpoint and lower the learning rate."


def check_before_export(
    model: Any,
    path: str | os.PathLike[str] | None,
    directory: bool = False,
    but_not: Collection[str] = (),
) -> None:
    """Raises an error before any work if a model is not quantized or `path` cannot be written.

    Args:
        model: the model to export.
        path: where to write, or None.
        directory: whether a directory is written.
        but_not: endings of other formats, which `path` may not have.
    """
    check_quantized(model)
    if path is not None and Path(path).suffix in but_not:
        raise ValueError(
            f"{str(path)!r} is the name of another format. export_tflite writes .tflite files, "
            f"export_onnx .onnx, export_c .cc, and export_saved_model directories."
        )
    if path is not None:
        check_writable(path, directory)


def check_exportable(model: Any) -> None:
    """Raises a `ValueError` if a model is not quantized, or a quantizer has no usable range."""
    check_quantized(model)
    check_is_graph(model)
    check_process(model)
    check_settings(model)
    listed = [q for q in activation_quantizers(model) if isinstance(q.spec, specs.QuantSpec)]
    unusable = [q for q in listed if not np.all(np.isfinite([q.minimum, q.maximum]))]
    broken = [q.name for q in unusable]
    inputs = [name for name in model.input_names if any(name in q.quantizes for q in unusable)]
    if inputs:
        raise ValueError(
            f"The data for {some(list(map(repr, inputs)))} held NaN or infinity in training, which "
            f"spoiled {counted(len(broken), 'range')}. Remove such examples, and continue "
            f"from an earlier checkpoint."
        )
    if broken:
        raise ValueError(
            f"{counted(len(broken), 'quantizer has', 'quantizers have')} a range with NaN or "
            f"infinity: {some(broken)}. {DIVERGED}"
        )
    broken = [weight.name for weight in model.weights if not _is_finite(weight)]
    if broken:
        raise ValueError(
            f"{counted(len(broken), 'weight holds', 'weights hold')} NaN or infinity: "
            f"{some(broken)}. {DIVERGED}"
        )
    blind = [q.name for q in listed if not q.calibrated]
    if blind:
        raise ValueError(
            f"{counted(len(blind), 'quantizer has', 'quantizers have')} seen no data yet: "
            f"{some(blind)}. Train the model (fit, or calls with training=True) so that ranges are "
            f"observed, or take them from examples with keras_qat.calibrate(model, data); then "
            f"export."
        )


def _is_finite(weight: Any) -> bool:
    """Whether a weight is finite. If its sum is, it is, and that is quick to compute."""
    if not weight.dtype.is_floating:
        return True
    values = np.asarray(weight.value())  # Makes no copy.
    with np.errstate(all="ignore"):
        return bool(np.isfinite(np.sum(values)) or np.all(np.isfinite(values)))


def some(names: list[str]) -> str:
    """Joins the first five names for a message."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
