"""Exports to TFLite: writes the operators of the resolved graph (`integer_graph`) one by one."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any, Literal

from keras_qat.arithmetic.kernel_families import DEFAULT, XNNPACK, kernel_family
from keras_qat.config.targets.target import Target, describe_problems, get
from keras_qat.export.read_back import check_contents
from keras_qat.export.target_problems import find_batch_size, find_file_problems
from keras_qat.export.target_rewrites import rewrite_for
from keras_qat.export.tflite_writer import write_graph
from keras_qat.integer_graph.file_inference import WRITERS
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.passes import (
    fuse_padding,
    has_int4,
    pack_if_requested,
    quantize_outputs,
    set_batch_size,
)
from keras_qat.integer_graph.pixel_inputs import (
    RAW,
    Rescaling,
    accept_pixels,
    begins_with_rescaling,
    read_rescalings,
)
from keras_qat.integer_graph.resolve import resolve_to_export
from keras_qat.io.atomic_files import write_contents
from keras_qat.io.counts import check_count
from keras_qat.keras2.backend import keras, one_at_a_time
from keras_qat.messages import pluralize, warn_caller
from keras_qat.placement.plan import report_float_layers
from keras_qat.tflite.builder import Builder
from keras_qat.training.readiness import check_before_export, list_some
from keras_qat.training.recurrent import list_states
from keras_qat.training.schedule import get_float_reason
from keras_qat.version import __version__

EndType = Literal["int8", "uint8", "int16", "float32"]


@one_at_a_time
def export_tflite(
    model: keras.Model,
    path: str | os.PathLike[str] | None = None,
    *,
    input_dtype: EndType | None = None,
    output_dtype: EndType | None = None,
    input_range: tuple[float, float] | None = None,
    rescaling: Any = None,
    pack_int4: bool | None = None,
    batch_size: int | None = None,
    target: str | Target | None = None,
) -> bytes:
    """Exports a trained quantization-aware model to an int8 TFLite file.

    The inputs and outputs of the file, and of its signature `serving_default`, have the model's
    names and order. `read_metadata` returns the recipe and other settings of the file. The same
    model always produces the same bytes.

    Args:
        model: a result of `quantize_model`, or a model that is built from layers of such models.
        path: the path of the file, or None. An existing file is replaced only on success.
        input_dtype: type of the file's inputs: "int8", "uint8" or "float32". With 16-bit
            activations: "int16" or "float32". The default is the type of the activations.
            Integer inputs must be quantized with the scale and zero point in the file. If the model
            starts with `Rescaling` or `Normalization`, "uint8" inputs are pixels. If the target
            does not support float, inputs with token ids are int32 by default.
        output_dtype: type of the file's outputs, as for inputs. By default, outputs of layers that
            stay in float are float32, without rounding.
        input_range: minimum and maximum of inputs without a quantizer, as in `recipes.contrib`.
            Without `input_range`, these inputs and the layers that read them are float. The range
            is widened to include zero.
        rescaling: how training data were computed from pixels, if uint8 inputs are pixels from 0 to
            255. Pass (scale, offset) for `scale * pixel + offset`, as scalars or one value per
            channel. Or pass the `Rescaling` or `Normalization` layer. For several inputs, pass a
            dict by name. For training data from -1 to 1, pass `(1 / 127.5, -1)`.
        pack_int4: whether weights of at most 4 bits are packed, two in a byte. Weights of depthwise
            convolutions are not packed, because few runtimes support this. The default is
            `model.pack_int4`. Packing halves the file. Inference is slower, because kernels unpack
            the weights first (docs/export.md has figures). These kernels round results more
            coarsely. About 2 % of a layer's quantized outputs are then off by one. With
            `model.pack_int4 = True`, `predict` computes like the packed file.
        batch_size: fixed batch size of the file. Microcontrollers and NPUs require batch size 1.
            The default is the target's batch size. Without a target, the file accepts batches of
            any size. Files of stateful models have the batch size of the states.
        target: the target of the file, by default the target of `quantize_model`. A warning lists
            operators that run neither on the target nor on its CPU. `targets.problems` also lists
            operators that run on the CPU.

    Returns:
        The file's contents.

    Raises:
        ValueError: if the model is not quantized, or if a quantizer has no usable range. Arguments
            must be valid and fit the target. TFLite must have operators for all float layers. The
            message names the argument or the layer.
        OSError: if `path` cannot be written.

    Example:
        >>> keras_qat.export_tflite(qat, "model.tflite")
    """
    if rescaling is not None and _get_name(input_dtype) != "uint8":
        raise ValueError("rescaling requires input_dtype='uint8'.")
    if batch_size is not None:
        batch_size = check_count("batch_size", batch_size)
    device = None if target is None else get(target)
    check_before_export(model, path, but_not=(".onnx", ".cc", ".h"))
    graph = resolve_to_export(model, input_range=input_range)
    graph.origin.warn()
    if not getattr(model, "told_of_float", False):
        _show_float_layers(graph)
    contents = write_file(
        graph,
        input_dtype=input_dtype,
        output_dtype=output_dtype,
        rescaling=rescaling,
        pack_int4=pack_int4,
        batch_size=batch_size,
        target=device or graph.origin.target,
    )
    return write_contents(contents, path)


def write_file(
    graph: ResolvedGraph,
    *,
    input_dtype: EndType | None = None,
    output_dtype: EndType | None = None,
    rescaling: Any = None,
    pack_int4: bool | None = None,
    batch_size: int | None = None,
    target: Target | None = None,
) -> bytes:
    """Returns the TFLite file of a resolved graph. `export_tflite` describes the arguments."""
    origin = graph.origin
    ends = {"input_dtype": input_dtype, "output_dtype": output_dtype}
    types = [_get_end_type(name, dtype, origin.is_16_bit) for name, dtype in ends.items()]
    packs = origin.packs_int4 if pack_int4 is None else pack_int4
    if origin.is_16_bit and packs:
        raise ValueError("pack_int4=True: no kernels support int4 weights with 16-bit activations.")
    if _get_name(output_dtype) not in (None, "float32"):
        graph = quantize_outputs(graph)
    batch_size = find_batch_size(graph, batch_size, target)
    _check_states(graph)
    _warn_of_rounding(graph)
    requested = read_rescalings(rescaling, list(graph.inputs))
    rescaled: dict[str, Rescaling] = {}
    if types[0] == "uint8":
        own = {
            name: RAW
            for name, tensor in graph.inputs.items()
            if begins_with_rescaling(graph, tensor)
        }
        graph, rescaled = accept_pixels(graph, own | requested)
    if batch_size is not None:
        is_of_target = target is not None and target.batch_size is not None
        graph = set_batch_size(graph, batch_size, is_of_target or origin.family.static_shapes)
    graph = pack_if_requested(
        graph, packs, XNNPACK if target is None else kernel_family(target.kernels)
    )
    if packs and not has_int4(graph):
        raise ValueError(
            f"pack_int4=True: '{graph.name}' has no weights of at most 4 bits in a layer with an "
            f"int4 kernel. Quantize it with recipes.int4_weights(), or leave pack_int4 out."
        )
    if packs is not origin.packs_int4:
        warn_caller(
            f"pack_int4={packs}: kernels round sums of packed weights differently, so some values "
            f"of the file differ from predict and evaluate, mostly by one step. Set "
            f"qat.pack_int4 = {packs} before the export to predict the values of the file."
        )
    builder = Builder()
    inputs, outputs = write_graph(graph, builder, *types)
    metadata = {
        "version": __version__,
        "recipe": None if origin.recipe is None else origin.recipe.to_config(),
        "fingerprint": origin.fingerprint,
    }
    if rescaled:
        metadata["rescaling"] = rescaled
    keys = {one.name: one.key for one in origin.inputs.all if one.key != one.name}
    if keys:
        metadata["keys"] = keys
    if origin.family is not DEFAULT:
        metadata["kernels"] = origin.family.name
    if origin.states:
        metadata["states"] = "kept from one run to the next"
    rewrite = rewrite_for(target or get("xnnpack"))
    contents = builder.finish(inputs, outputs, rewrite, keras_qat=metadata)
    check_contents(contents, builder.model, fuse_padding(graph))
    _check_converted(graph, contents)
    found = () if target is None else find_file_problems(contents, target)
    missing = [problem for problem in found if problem.elsewhere is None]
    if target is not None and missing:
        warn_caller("\n".join(describe_problems(target, missing)))
    return contents


WRITERS.append(write_file)


def _show_float_layers(graph: ResolvedGraph) -> None:
    """Log the layers that stay in float, except layers that only compute integers or masks."""
    calls = [(node.call, node.reason) for node in graph.nodes if node.computes_in_float]
    layers = [
        (getattr(call.layer, "layer", call.layer), get_float_reason(call.layer) or why)
        for call, why in calls
    ]
    report_float_layers(layers, "The file computes", "keras_qat.summary(model) shows where.")


def _check_states(graph: ResolvedGraph) -> None:
    """Raise a `ValueError` if a layer that keeps states is in float or is called several times."""
    for node in graph.nodes:
        if node.op is None and list_states(node.call.layer):
            reason = get_float_reason(node.call.layer) or node.reason
            raise ValueError(
                f"Layer '{node.call.layer.name}' is in float and keeps its states (stateful=True). "
                f"Files only store states of quantized layers. Reason for float: {reason}."
            )
    layers = [node.call.layer.name for node in graph.nodes if node.attributes.get("keeps")]
    for name, count in Counter(layers).items():
        if count > 1:
            raise ValueError(
                f"Layer '{name}' keeps its states and is called {count} times. In Keras the calls "
                f"share the states, but in a file they do not. Use a separate layer for each call."
            )


def _check_converted(graph: ResolvedGraph, contents: bytes) -> None:
    """Raise a `ValueError` if TFLite's converter wrote an operator that LiteRT does not run."""
    if graph.origin.family.static_shapes or all(node.op for node in graph.nodes):
        return
    if refused := find_file_problems(contents, get("xnnpack")):
        raise ValueError(f"LiteRT would not load the file: {'; '.join(map(str, refused))}.")


def _get_end_type(name: str, dtype: str | None, wide: bool) -> str | None:
    """Return the name of a valid data type. Return None if the activations have this type."""
    dtype = _get_name(dtype)
    own, *others = ["int16", "float32"] if wide else ["int8", "uint8", "float32"]
    if dtype is not None and dtype not in (own, *others):
        *rest, last = map(repr, (own, *others))
        raise ValueError(f"{name}={dtype!r}: use {', '.join(rest)} or {last}.")
    return None if dtype == own else dtype


def _get_name(dtype: object) -> Any:
    return getattr(dtype, "name", getattr(dtype, "__name__", dtype))


def _warn_of_rounding(graph: ResolvedGraph) -> None:
    """Warn if weights have asymmetric 8-bit ranges, because the file rounds them again."""
    wide = {
        node.layer.name: node.weights.rounding
        for node in graph.nodes
        if node.weights is not None and node.weights.rounding
    }
    if wide:
        warn_caller(
            f"The weights of {pluralize(len(wide), 'layer')} are rounded again, by up to "
            f"{max(wide.values()):.2g} steps: {list_some(list(wide))}. Their 8-bit ranges are not "
            f"symmetric, and TFLite's int8 kernels have no zero point for weights. For an exact "
            f"file, train with symmetric weights (recipes.contrib(symmetric=True), recipes.int8()) "
            f"or with at most 7 bits."
        )
