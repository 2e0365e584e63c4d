"""Export to TFLite: the resolved graph, written operator by operator."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any, Literal

from keras_qat.arithmetic.kernel_families import DEFAULT, XNNPACK, kernel_family
from keras_qat.config.arguments import answers_unknown
from keras_qat.config.targets.target import Target, describe_problems, get
from keras_qat.export.read_back import check_contents
from keras_qat.export.target_problems import file_problems
from keras_qat.export.target_rewrites import rewrite_for
from keras_qat.export.tflite_writer import write_graph
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
from keras_qat.keras2.backend import one_at_a_time
from keras_qat.messages import pluralize, warn_caller
from keras_qat.placement.float_notice import report_float_layers
from keras_qat.tflite.builder import Builder
from keras_qat.training.readiness import check_before_export, list_some
from keras_qat.training.recurrent import list_states
from keras_qat.training.schedule import get_float_reason
from keras_qat.version import __version__

EndType = Literal["int8", "uint8", "int16", "float32"]


@one_at_a_time
@answers_unknown(
    inference_input_type='input_dtype="int8"',
    inference_output_type='output_dtype="int8"',
    optimizations="nothing, as the file is int8 by the model's recipe",
    representative_dataset="the data to calibrate",
)
def export_tflite(
    model: Any,
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

    The file has the model's inputs and outputs by name (as tensors and in its signature
    `serving_default`) and in the model's order, takes batches of any size, and says in its
    metadata how it was made: `read_metadata`. The same model gives the same bytes.

    Args:
        model: the model; also one made of parts of quantization-aware models.
        path: where to write the file, or None. An existing file is replaced at the end only.
        input_dtype: type of the file's inputs: "int8", "uint8" or "float32" (with 16-bit
            activations "int16" or "float32"), by default that of its activations. With integers
            the caller quantizes, by the scale and zero point that the file gives. With "uint8"
            the inputs of a model that begins with `Rescaling` or `Normalization` take pixels.
            Tokens that the model takes as real numbers are int32 for targets without float, unless
            "float32" is asked for.
        output_dtype: type of its outputs, likewise. Outputs of layers that are left in float on
            request are float32 by default, and are not rounded.
        input_range: minimum and maximum of inputs that have no quantizer, as those of
            `recipes.contrib`. Without it such inputs and the layers that read them are float.
            Zero is made part of it.
        rescaling: for uint8 inputs that take pixels, 0 to 255, of a model that takes them
            rescaled: the scale and offset that made its training data, `scale * pixel + offset`,
            numbers or one for each channel, or the `Rescaling` or `Normalization` layer. Of a model
            with several inputs a dict by name. `(1 / 127.5, -1)`: the file's pixels 0 to 255 are
            the model's -1 to 1.
        pack_int4: whether weights of at most 4 bits are stored two in a byte instead of one, except
            those of depthwise convolutions, which few runtimes take; by default as
            `model.pack_int4` says. That halves the file. Kernels sum packed weights in wider steps,
            so that some 2 % of a layer's codes are off by one: set `model.pack_int4 = True`, and
            `predict` gives what the packed file gives. A warning says so if the two are not alike.
            Kernels unpack the weights first, so that it is slower (docs/export.md has figures).
        batch_size: how many examples a run takes, for all time: microcontrollers and NPUs ask for
            shapes that are known, and 1. None: as the target has it, without one any number. A
            model that keeps states has a batch of its own.
        target: where the file is to run, by default what `quantize_model` was told. A warning
            names what does not run there at all; `targets.problems` what runs elsewhere.

    Returns:
        The file's contents.

    Raises:
        ValueError: if the model is not quantized, a quantizer has no usable range, a type,
            `input_range`, `rescaling` or `batch_size` is none or not one of the target, or
            TFLite has no operator for a layer in float, or one keeps its states; the message names
            it.
        OSError: if `path` cannot be written; checked before the work begins.

    Example:
        >>> keras_qat.export_tflite(qat, "model.tflite")
    """
    if rescaling is not None and _name_of(input_dtype) != "uint8":
        raise ValueError("rescaling is of uint8 inputs: give input_dtype='uint8' too.")
    if batch_size is not None:
        batch_size = check_count("batch_size", batch_size)
    device = None if target is None else get(target)
    check_before_export(model, path, but_not=(".onnx", ".cc", ".h"))
    graph = resolve_to_export(model, input_range=input_range)
    graph.origin.warn()
    if not getattr(model, "told_of_float", False):
        _show_in_float(graph)
    contents = file_of(
        graph,
        input_dtype=input_dtype,
        output_dtype=output_dtype,
        rescaling=rescaling,
        pack_int4=pack_int4,
        batch_size=batch_size,
        target=device or graph.origin.target,
    )
    return write_contents(contents, path)


def file_of(
    graph: ResolvedGraph,
    *,
    input_dtype: EndType | None = None,
    output_dtype: EndType | None = None,
    rescaling: Any = None,
    pack_int4: bool | None = None,
    batch_size: int | None = None,
    target: Target | None = None,
) -> bytes:
    """Writes a resolved graph as a TFLite file. Arguments and errors as for `export_tflite`."""
    origin = graph.origin
    ends = {"input_dtype": input_dtype, "output_dtype": output_dtype}
    types = [_end_type(name, dtype, origin.is_16_bit) for name, dtype in ends.items()]
    packs = origin.packs_int4 if pack_int4 is None else pack_int4
    if origin.is_16_bit and packs:
        raise ValueError("pack_int4=True: there are no kernels for int4 weights and 16 bits.")
    if _name_of(output_dtype) not in (None, "float32"):
        graph = quantize_outputs(graph)
    batch_size = _file_batch_size(graph, batch_size, target)
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
            f"pack_int4=True: '{graph.name}' has no weights of at most 4 bits in a layer whose "
            f"kernel takes int4. Quantize it with recipes.int4_weights(), or leave it out."
        )
    if packs is not origin.packs_int4:
        _warn_of_packing(packs)
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
    if target is not None:
        _warn_of_problems(contents, target)
    return contents


def _show_in_float(graph: ResolvedGraph) -> None:
    """Tells which layers the file computes in float, not those of integers and masks alone."""
    calls = [(node.call, node.reason) for node in graph.nodes if node.computes_in_float]
    layers = [
        (getattr(call.layer, "layer", call.layer), get_float_reason(call.layer) or why)
        for call, why in calls
    ]
    report_float_layers(layers, "The file computes", "keras_qat.summary(model) shows where.")


def _file_batch_size(
    graph: ResolvedGraph, batch_size: int | None, target: Target | None
) -> int | None:
    """Returns the batch size of a file, which the target or kept states may say.

    Raises:
        ValueError: if they contradict what was asked for.
    """
    if target is not None and target.batch_size is not None:
        if batch_size not in (None, target.batch_size):
            raise ValueError(
                f"batch_size={batch_size}: {target.title} takes {target.batch_size} at a time. "
                f"Leave it out, or say target='xnnpack'."
            )
        batch_size = target.batch_size
    kept_batch = graph.origin.kept_batch
    if kept_batch is not None and batch_size not in (None, kept_batch):
        raise ValueError(
            f"'{graph.name}' keeps the states of {kept_batch} sequences, and its file shall take "
            f"{batch_size}: build it with keras.Input(batch_size={batch_size}), and give it "
            f"the weights, other.set_weights(model.get_weights())."
        )
    return batch_size if kept_batch is None else kept_batch


def _check_states(graph: ResolvedGraph) -> None:
    """Raises a `ValueError` if a layer that keeps states is in float or called several times."""
    for node in graph.nodes:
        if node.op is None and list_states(node.call.layer):
            reason = get_float_reason(node.call.layer) or node.reason
            raise ValueError(
                f"Layer '{node.call.layer.name}' keeps its states (stateful=True) and computes in "
                f"float, where files keep none: {reason}."
            )
    layers = [node.call.layer.name for node in graph.nodes if node.attributes.get("keeps")]
    for name, count in Counter(layers).items():
        if count > 1:
            raise ValueError(
                f"Layer '{name}' keeps its states and is called {count} times, which share them in "
                f"Keras; in a file each call has states of its own. Use a layer for each."
            )


def _check_converted(graph: ResolvedGraph, contents: bytes) -> None:
    """Raises a `ValueError` if TFLite's converter wrote what LiteRT has no kernel for."""
    if graph.origin.family.static_shapes or all(node.op for node in graph.nodes):
        return
    if refused := file_problems(contents, get("xnnpack")):
        raise ValueError(f"LiteRT would not load the file: {'; '.join(map(str, refused))}.")


def _warn_of_problems(contents: bytes, target: Target) -> None:
    """Warns of operators with which the file does not run at all."""
    refused = file_problems(contents, target)
    if refused and target.elsewhere is None:
        warn_caller("\n".join(describe_problems(target, refused)))


def _end_type(name: str, dtype: str | None, wide: bool) -> str | None:
    """Returns the type of an input or output; None for the type of its quantized values."""
    dtype = _name_of(dtype)
    own, *others = ["int16", "float32"] if wide else ["int8", "uint8", "float32"]
    if dtype is not None and dtype not in (own, *others):
        *rest, last = map(repr, (own, *others))
        raise ValueError(f"{name}={dtype!r}: use {', '.join(rest)} or {last}.")
    return None if dtype == own else dtype


def _name_of(dtype: Any) -> Any:
    """Returns a type's name. TFLiteConverter takes tf.uint8 and np.uint8, and so do we."""
    return getattr(dtype, "name", getattr(dtype, "__name__", dtype))


def _warn_of_packing(packs: bool) -> None:
    """Warns that `predict` does not compute what the file does."""
    warn_caller(
        f"pack_int4={packs}: kernels sum packed weights in other steps, so that the file gives "
        f"other values than predict and evaluate, most of them by one step. Set qat.pack_int4 = "
        f"{packs} before, and they give those of the file."
    )


def _warn_of_rounding(graph: ResolvedGraph) -> None:
    """Warns of weights that TFLite cannot hold as they were trained."""
    wide = {
        node.layer.name: node.weights.rounding
        for node in graph.nodes
        if node.weights is not None and node.weights.rounding
    }
    if wide:
        warn_caller(
            f"The weights of {pluralize(len(wide), 'layer')} are rounded again, by up to "
            f"{max(wide.values()):.2g} steps: {list_some(list(wide))}. Their 8-bit ranges are not "
            f"symmetric, and TFLite's int8 kernels have no zero point for weights. Train with "
            f"symmetric weights (recipes.contrib(symmetric=True), recipes.int8()) or with at "
            f"most 7 bits for a file that computes what was trained."
        )
