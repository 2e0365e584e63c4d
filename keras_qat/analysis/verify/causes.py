"""Explains why file, model and float model differ, and gives advice."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from keras_qat.analysis.verify.results import TensorReport, compute_sqnr
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

IDEAL = 50.0
"""SQNR in dB that a tensor with 8 bits can reach."""

CLIPPED = 0.02
"""If more than this share of a tensor's values is outside its range, the range is too narrow."""

COARSE = 4.0
"""If the standard deviation of a tensor is at most this many steps (LSB), steps are too coarse."""

SMALL_PART = 1 / 8
"""If the values use less than this share of the range, the range is too wide."""

LOW_SQNR = 12.0
"""Below this SQNR in dB, quantization makes a channel of an output useless."""

MOST_CHANNELS = 100
"""`find_small_channels` skips outputs with more channels, because these are usually classes."""

FEW_VALUES = 32
"""`find_small_channels` skips channels with fewer values, because their SQNR is unreliable."""

LOST_PART = 1 / 32
"""A channel is small if its values use less than this share of the range: 8 of 256 levels."""


# Before the comparison


def find_mismatches(graph: ResolvedGraph, file_graph: FileGraph, contents: bytes) -> list[str]:
    """Returns a sentence for each sign that the file was not exported from the current model."""
    reasons = []
    if not any(tensor.is_quantized for tensor in file_graph.tensors):
        reasons.append(
            "The file computes in float: none of its tensors is quantized. Export it with "
            "keras_qat.export_tflite(model, path)."
        )
    try:
        fingerprint = read_metadata(contents).get("fingerprint")
    except ValueError:
        fingerprint = None
    expected = graph.origin.fingerprint
    if fingerprint is not None and fingerprint.get("shapes") != expected["shapes"]:
        reasons.append(
            f"The file belongs to another model than '{graph.name}': its weights have other "
            f"shapes. Pass the model that the file was exported from."
        )
    elif fingerprint is not None and fingerprint != expected:
        reasons.append(
            f"The file was exported from other weights or ranges, because '{graph.name}' was "
            f"trained, calibrated or given new weights after the export. Export it again."
        )
    if graph.origin.packs_int4 and has_int4(graph) and not file_graph.packs_int4:
        reasons.append(
            f"'{graph.name}' computes with weights packed in 4 bits (model.pack_int4 is True), but "
            f"the weights of the file are not packed. Export it again, or set model.pack_int4 = "
            f"False."
        )
    return reasons


def find_excess(
    file_graph: FileGraph, inputs: Mapping[str, NDArray], rescaled: Mapping[str, Rescaling]
) -> list[str]:
    """Returns a sentence for each input with many values outside the input's range in the file."""
    sentences = []
    for name, ends in file_graph.get_input_ranges().items():
        dtype, x = file_graph.inputs[name].dtype, inputs[name]
        if name in rescaled:
            sentences.append(describe_excess(name, x, *get_pixel_range(*rescaled[name])))
        elif dtype.kind == "f" or x.dtype != dtype:
            sentences.append(describe_excess(name, x, *ends))
    return list(filter(None, sentences))


# After the comparison


def are_equal(outputs: Sequence[NDArray], others: Sequence[NDArray]) -> bool:
    return all(map(functools.partial(np.array_equal, equal_nan=True), outputs, others))


def describe_randomness(name: str) -> str:
    return (
        f"'{name}' draws random numbers at inference: its outputs differ between two runs on the "
        f"same inputs. Draw them only in training, or make them an input."
    )


def describe_mixing(name: str, batch_size: int) -> str:
    return (
        f"'{name}' computes over all examples of a batch, for example to normalize by the batch's "
        f"statistics, so its outputs depend on the batch size, which is {batch_size} in the file. "
        f"Compute each example by itself, or export with the batch size of the data."
    )


def find_float_faults(calls: Graph, inputs: list[NDArray], exact: list[NDArray]) -> list[str]:
    """Returns problems of the float model, such as an untrained BatchNormalization."""
    inner = {layer.name: layer for call in calls.calls for layer in list_layers(call.layer)}
    fresh = [name for name, layer in inner.items() if _is_untrained_norm(layer)]
    if fresh:
        return [
            f"{pluralize(len(fresh), 'BatchNormalization has', 'BatchNormalizations have')} the "
            f"statistics of a new layer, mean 0 and variance 1: {list_some(fresh)}. Train with "
            f"training=True, then calibrate again."
        ]
    has_variety = any(np.any(example != x[0]) for x in inputs for example in x)
    if has_variety and is_constant(exact):
        return [
            "the output of the float model is the same for all examples, perhaps because units are "
            "dead or weights are zero. Train the float model first."
        ]
    return []


def is_constant(outputs: Iterable[NDArray]) -> bool:
    """Returns True if all outputs are the same for all examples."""
    return all(np.ptp(y, 0).max(initial=0) == 0 for y in outputs)


def _is_untrained_norm(layer: keras.layers.Layer) -> bool:
    if not isinstance(layer, keras.layers.BatchNormalization):
        return False
    mean, variance = layer.moving_mean.numpy(), layer.moving_variance.numpy()
    return not mean.any() and bool((variance == 1).all())


def find_small_channels(outputs: Iterable[tuple[str, NDArray, NDArray]]) -> list[str]:
    """Returns a sentence for each output if its channels have very different ranges.

    For example, an output with scores up to 1 and boxes up to 300 pixels has a range of 0 to 300.
    All scores are then rounded to 0 or 1. `outputs` are tuples (name, float values, quantized
    values).
    """
    sentences = []
    for name, in_float, quantized in outputs:
        channels = in_float.shape[-1] if in_float.ndim > 1 else 0
        full_range = np.ptp(in_float)
        if not 1 < channels <= MOST_CHANNELS or full_range <= 1:  # Probabilities may all be small.
            continue
        if in_float.size < FEW_VALUES * channels:
            continue
        lost = [
            channel
            for channel in range(channels)
            if np.abs(in_float[..., channel]).max() < LOST_PART * full_range
            and (sqnr := compute_sqnr(in_float[..., channel], quantized[..., channel])) is not None
            and sqnr < LOW_SQNR
        ]
        if 0 < len(lost) < channels:
            sentences.append(
                f"the values in channels {list_some(list(map(str, lost)))} of the {channels} "
                f"channels of '{name}' are too small for the range that all channels share. Scale "
                f"them to similar ranges, or export the tensors before they are concatenated: "
                f"quantize_model(model, outputs=[...]). plan(model) lists their names."
            )
    return sentences


def find_weakest(tensors: Sequence[TensorReport], all_vary: bool) -> TensorReport | None:
    """Returns the tensor that loses most SQNR, compared with the inputs of its operator.

    Args:
        tensors: the tensors, in the order of computation.
        all_vary: True if all outputs differ between examples. Tensors that are the same for all
            examples, such as a positional embedding, are then ignored. They are always ignored if
            an operator computes different values from them.
    """
    in_use = {name for tensor in tensors if tensor.sqnr is not None for name in tensor.reads}
    sqnr_of: dict[str, float | None] = {}
    losses: list[tuple[float, TensorReport]] = []
    for tensor in tensors:
        before = [sqnr_of[name] for name in tensor.reads if name in sqnr_of]
        if tensor.sqnr is None and (all_vary or tensor.name in in_use):
            continue
        sqnr_of[tensor.name] = tensor.sqnr
        if None not in before:
            best = min([IDEAL, *filter(None, before)])
            losses.append((np.inf if tensor.sqnr is None else best - tensor.sqnr, tensor))
    return max(losses, key=lambda loss: loss[0], default=(0.0, None))[1]


def explain_loss(tensor: TensorReport) -> str:
    """Returns why a tensor has a low SQNR, with advice. Returns "" for an unknown cause."""
    (low, high), (lowest, highest) = tensor.range, tensor.float_range
    ends, values = f"{low:.4g} to {high:.4g}", f"{lowest:.4g} to {highest:.4g}"
    if tensor.sqnr is None:
        return "it is the same for all examples, in float too. Check its weights and the data."
    width = high - low
    is_far = lowest < low - width or highest > high + width
    if tensor.clipped > CLIPPED or (tensor.clipped > 0 and is_far):
        advice = (
            "Calibrate on data like this, after the last change of the weights."
            if tensor.reads
            else "Scale the inputs as in training, or calibrate on data like this."
        )
        share = f"{tensor.clipped:.0%}" if tensor.clipped >= 0.01 else "less than 1%"
        return (
            f"{share} of its values are outside its range of {ends}; the float values are "
            f"{values}. {advice}"
        )
    step = width / (2**tensor.bits - 1)
    if tensor.spread > COARSE * step:
        return ""
    if tensor.bits < 8:
        return f"it has only {tensor.bits} bits. Train the quantized model, or use more bits."
    if highest - lowest < SMALL_PART * width:
        shared = ", or scale down the larger tensors that share its range" * bool(tensor.reads)
        return (
            f"its range is {ends}, but its values are only {values}. Calibrate on data without "
            f"outliers, scaled as in training{shared}."
        )
    return (
        f"its range, {ends}, has steps of {step:.3g}, too coarse for values that vary by "
        f"{tensor.spread:.3g}. Remove outliers and placeholders for missing values from the data, "
        f"or use 16 bits."
    )
