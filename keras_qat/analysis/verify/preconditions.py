"""Whether a file and inputs belong to a model as it is now, asked before they are compared."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keras_qat.graph.calls import Graph
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.passes import has_int4
from keras_qat.integer_graph.pixel_inputs import Rescaling
from keras_qat.io.inputs import describe_excess, get_pixel_range
from keras_qat.keras2.backend import keras
from keras_qat.keras2.layers_and_models import list_layers
from keras_qat.messages import pluralize
from keras_qat.tflite.metadata import read_metadata
from keras_qat.tflite.reader import FileGraph
from keras_qat.training.readiness import list_some


def doubts(
    graph: ResolvedGraph,
    file_graph: FileGraph,
    contents: bytes,
    cut_off: list[str],
) -> list[str]:
    """Returns sentences on why model and file may differ whatever the arithmetic is.

    Args:
        graph: the model's resolved graph.
        file_graph: the file.
        contents: its contents.
        cut_off: what `beyond_ranges` returned.
    """
    return [
        *_in_float(file_graph),
        *_other_weights(graph, contents),
        *_in_bytes(graph, file_graph),
        *cut_off,
    ]


def _in_float(file_graph: FileGraph) -> list[str]:
    """Returns a sentence if no tensor of the file is quantized, as in a converter's float file."""
    if any(tensor.is_quantized for tensor in file_graph.tensors):
        return []
    return [
        "The file computes in float: none of its tensors is quantized. Export it with "
        "keras_qat.export_tflite(model, path)."
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
            f"The file belongs to another model than '{graph.name}': its weights have other "
            f"shapes. Verify the model that the file was exported from."
        ]
    return [
        f"The file was exported from other weights or ranges than '{graph.name}' has now. The "
        f"model was trained or calibrated, or its weights were set, after the export. Export it "
        f"again."
    ]


def _in_bytes(graph: ResolvedGraph, file_graph: FileGraph) -> list[str]:
    """Says that the model computes with packed weights, and the file does not."""
    if file_graph.packs_int4 or not (graph.origin.packs_int4 and has_int4(graph)):
        return []
    return [
        f"'{graph.name}' computes with weights packed in 4 bits (model.pack_int4 is True), but "
        f"the weights of the file are not packed. Export it again, or set model.pack_int4 = False."
    ]


def beyond_ranges(
    file_graph: FileGraph, inputs: dict[str, np.ndarray], rescaled: Mapping[str, Rescaling]
) -> list[str]:
    """Returns sentences on inputs of which many values are beyond what the file can hold.

    Args:
        file_graph: the file.
        inputs: what the model was given.
        rescaled: scale and offset of the inputs that take pixels in the file.
    """
    failures = []
    for name, ends in file_graph.get_input_ranges().items():
        dtype, x = file_graph.inputs[name].dtype, inputs[name]
        if name in rescaled:
            failures.append(describe_excess(name, x, *get_pixel_range(*rescaled[name])))
        elif dtype.kind == "f" or x.dtype != dtype:
            failures.append(describe_excess(name, x, *ends))
    return list(filter(None, failures))


def randomness(name: str, expected: Sequence[np.ndarray], again: Sequence[np.ndarray]) -> list[str]:
    """Says so if a model computes other outputs of the same inputs the second time.

    Args:
        name: the model's name.
        expected, again: its outputs, and those of another time.
    """
    if all(map(functools.partial(np.array_equal, equal_nan=True), expected, again)):
        return []
    return [
        f"'{name}' draws random numbers at inference: its outputs differ each time for the same "
        f"inputs. Draw them only in training, or make them an input."
    ]


def mixing(
    name: str, expected: Sequence[np.ndarray], others: Sequence[np.ndarray], size: int
) -> list[str]:
    """Says so if a model computes other outputs in batches as the file takes them.

    Args:
        name: the model's name.
        expected, others: its outputs, and those in batches of the file's size.
        size: the size of these.
    """
    if all(map(functools.partial(np.array_equal, equal_nan=True), expected, others)):
        return []
    return [
        f"'{name}' computes over all examples of a batch, for example to normalize by the batch's "
        f"statistics: its outputs differ in batches of {size}, the file's batch size. Compute each "
        f"example by itself, or export with the batch size of the data."
    ]


def check_rows(
    graph: ResolvedGraph, codes: Mapping[str, np.ndarray], expected: Sequence[np.ndarray]
) -> None:
    """Checks that an output of the file has as many rows as the model's, for the same examples.

    Args:
        graph: the model's resolved graph.
        codes: what the file returned for each output, by name.
        expected: what the model predicted, in the order of its outputs.

    Raises:
        ValueError: if it has not, as where a layer takes the first example of each batch.
    """
    for name, computed in zip(graph.outputs, expected, strict=True):
        if codes[name].shape[:1] != computed.shape[:1]:
            raise ValueError(
                f"'{graph.name}' computes over all examples of a batch: for the same data, the "
                f"model's output '{name}' has {len(computed)} rows and the file's "
                f"{len(codes[name])}. Compute each example by itself, or export with the batch "
                f"size of the data."
            )


def faults(calls: Graph, inputs: list[np.ndarray], exact: list[np.ndarray]) -> list[str]:
    """Says what is wrong with a model in float, whatever quantization does.

    Args:
        calls: the model's graph.
        inputs: the examples.
        exact: what the model computes of them in float, for each output.
    """
    inner = {layer.name: layer for call in calls.calls for layer in list_layers(call.layer)}
    fresh = [name for name, layer in inner.items() if _is_fresh(layer)]
    if fresh:
        return [
            f"{pluralize(len(fresh), 'BatchNormalization has', 'BatchNormalizations have')} the "
            f"statistics of a new layer, mean 0 and variance 1: {list_some(fresh)}. Train with "
            f"training=True, or call keras_qat.reestimate_batch_norm(model, data). Then calibrate "
            f"again."
        ]
    has_variety = any(np.any(x != x[:1]) for x in inputs)
    if has_variety and all(np.ptp(y, 0).max(initial=0) == 0 for y in exact):
        return [
            "the output of the float model is the same for all examples, as if units were dead or "
            "weights zero. Train the float model first."
        ]
    return []


def _is_fresh(layer: Any) -> bool:
    """Whether a layer is a BatchNormalization that has never seen data."""
    if not isinstance(layer, keras.layers.BatchNormalization):
        return False
    mean, variance = layer.moving_mean.numpy(), layer.moving_variance.numpy()
    return not mean.any() and bool((variance == 1).all())
