"""Whether a file and inputs belong to a model as it is now, asked before they are compared."""

from __future__ import annotations

import numpy as np

from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.tflite.interpreter import to_values
from keras_qat.tflite.metadata import read_metadata
from keras_qat.tflite.micro_interpreter import Runner
from keras_qat.tflite.reader import FileGraph

FEW = 0.25
"""Share of an input's numbers that may lie beyond its range: of another scale, most of them do."""


def doubts(
    graph: ResolvedGraph,
    file: Runner,
    file_graph: FileGraph,
    contents: bytes,
    inputs: dict[str, np.ndarray],
) -> list[str]:
    """Why model and file may differ whatever the arithmetic is: sentences."""
    return [*_in_float(file_graph), *_other_weights(graph, contents), *_beyond_ranges(file, inputs)]


def _in_float(file_graph: FileGraph) -> list[str]:
    """Returns a sentence if no tensor of the file is quantized, as in a converter's float file."""
    if any(tensor.is_quantized for tensor in file_graph.tensors):
        return []
    return [
        "The file computes in float: none of its tensors is quantized. "
        "keras_qat.export_tflite(model, path) writes the int8 file."
    ]


def _other_weights(graph: ResolvedGraph, contents: bytes) -> list[str]:
    """Whether the file was written of other numbers. Nothing is said of files that do not tell."""
    try:
        there = read_metadata(contents).get("fingerprint")
    except ValueError:
        return []
    here = graph.origin.fingerprint
    if there is None or there == here:
        return []
    if there.get("shapes") != here["shapes"]:
        return [
            f"The file is of another model than '{graph.name}': they have other weights. Verify "
            f"the model that it was exported from."
        ]
    return [
        f"The file was exported from other weights or ranges than '{graph.name}' has now: since, "
        f"the model was trained, calibrated or given other weights. Export it again."
    ]


def _beyond_ranges(file: Runner, inputs: dict[str, np.ndarray]) -> list[str]:
    """Whether many numbers lie beyond what the file's inputs can hold."""
    found = []
    for name, detail in file.inputs.items():
        dtype, x = np.dtype(detail["dtype"]), inputs[name]
        if not detail["quantization"][0] or x.dtype == dtype:
            continue
        ends = np.array([np.iinfo(dtype).min, np.iinfo(dtype).max], dtype)
        low, high = to_values(ends, detail)
        step = (high - low) / 255
        share = np.mean((x < low - step) | (x > high + step))
        if share > FEW:
            found.append(
                f"{share:.0%} of the numbers given for input '{name}' lie beyond its range, "
                f"{low:.3g} to {high:.3g}, and are cut off there. Scale them as in training, or "
                f"calibrate on more data."
            )
    return found
