"""Feeds a file that takes pixels and its model the same values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.pixel_inputs import Rescaling
from keras_qat.tflite.interpreter import FileInterpreter, to_pixels

SAME = 1e-3
"""Distance of a value from a pixel, in pixels, that float32 arithmetic may make."""


def rounded_to_pixels(
    graph: ResolvedGraph,
    file: FileInterpreter,
    inputs: Mapping[str, np.ndarray],
    rescaled: Mapping[str, Rescaling],
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], list[str]]:
    """Rounds the inputs for which a file takes pixels, which it rounds otherwise than the model.

    Args:
        graph: the model's resolved graph.
        file: the file.
        inputs: what the model was given.
        rescaled: scale and offset by which inputs of the model are made of the file's pixels.

    Returns:
        The inputs of the file; those of the model, of the same pixels; a sentence for each input
        that had other values.
    """
    of_file, of_model, notes = dict(inputs), dict(inputs), []
    for name, detail in file.inputs.items():
        rescaling = rescaled.get(name) or _own_rescaling(graph.inputs[name].params, detail)
        if rescaling is None or (inputs[name].dtype == np.uint8 and name not in rescaled):
            continue
        scale, offset = (np.asarray(part, np.float64) for part in rescaling)
        given, of_file[name] = inputs[name], to_pixels(inputs[name], scale, offset)
        rounded = of_file[name] * scale + offset
        is_other = (np.abs(given - rounded) > SAME * np.abs(scale)) & (scale != 0)
        if is_other.any():
            of_model[name] = np.where(is_other, rounded, given).astype(np.float32)
            notes.append(
                f"Input '{name}' of the file accepts integer pixels, but {is_other.mean():.0%} of "
                f"the values are fractions of a pixel or outside 0 to 255. The file and the model "
                f"both received the nearest pixels."
            )
    return of_file, of_model, notes


def _own_rescaling(params: QuantParams | None, detail: dict[str, Any]) -> Rescaling | None:
    """Returns scale and offset of a uint8 input that the model has on another scale, else None."""
    scale, zero_point = detail["quantization"]
    if np.dtype(detail["dtype"]) != np.uint8 or not scale or params is None:
        return None
    is_same = np.float32(params.scale) == np.float32(scale)
    return None if is_same else (scale, -zero_point * scale)
