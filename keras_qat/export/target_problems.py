"""Finds operators in a model's file that do not run on a target."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from keras_qat.arithmetic.kernel_families import kernel_family
from keras_qat.config.targets.target import Check, Problem, Target, get
from keras_qat.export.target_rewrites import rewrite_for
from keras_qat.export.tflite_writer import write_graph
from keras_qat.integer_graph.float_inference import mixes_rows
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.passes import pack_if_requested, set_batch_size
from keras_qat.integer_graph.resolve import resolve
from keras_qat.keras2.backend import keras
from keras_qat.tflite.builder import Builder
from keras_qat.tflite.reader import FileGraph, Site
from keras_qat.tflite.schema import SCOPE, read_contents, report_damage
from keras_qat.training.quantizers import PREFIX
from keras_qat.training.schedule import check_quantized, is_quantized

WEIGHTED = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "TRANSPOSE_CONV")

ACTIVATION = "use an activation that the target has, such as ReLU"
CHANGES = {
    **dict.fromkeys(("GELU", "HARD_SWISH", "ELU", "PRELU", "EXP", "LOG"), ACTIVATION),
    "RESIZE_BILINEAR": "resize by 2, or with interpolation='nearest'",
    "RESIZE_NEAREST_NEIGHBOR": "resize by 2",
    **dict.fromkeys(("ARG_MAX", "ARG_MIN"), "pass output_type=tf.int32 in the call"),
    "GATHER": "index before the model",
    "WHILE": "unroll the layer, or leave it out of the model",
}
"""Maps operators to advice for users whose target has no kernel for them."""

IN_FLOAT = "keras_qat.plan(model).float_layers explains why it stays float"


def problems(
    model: Any, target: str | Target, *, input_range: tuple[float, float] | None = None
) -> tuple[Problem, ...]:
    """Finds the operators of a model or a file that a target does not run.

    Args:
        model: a result of `quantize_model`, before or after training, or a file's contents.
        target: the target: a name, such as "ethos_u55", or a `keras_qat.targets.Target`.
        input_range: minimum and maximum of inputs without a quantizer, as in `recipes.contrib`.
            Without `input_range`, these inputs and the layers that read them are float.

    Returns:
        One entry for each operator that the target does not run, in the order of computation.

    Raises:
        ValueError: if `model` is not quantized or not readable, or another argument is not valid.

    Example:
        >>> for problem in keras_qat.targets.problems(qat, "tflm"):
        ...     print(problem)
    """
    target = get(target)
    if isinstance(model, bytes):
        contents = read_contents(model)
        with report_damage():
            return find_file_problems(contents, target)
    if isinstance(model, keras.Model) and not is_quantized(model):
        raise ValueError(
            f"'{model.name}' is a float model. Pass the result of keras_qat.quantize_model, or "
            f"read keras_qat.plan(model, target={target.name!r}).problems."
        )
    check_quantized(model)
    return find_file_problems(
        write_planned_file(resolve(model, input_range=input_range), target), target
    )


def write_planned_file(graph: ResolvedGraph, target: Target) -> bytes:
    """Returns a TFLite file to check operators for a target. The model need not be trained."""
    if (batch_size := find_batch_size(graph, None, target)) is not None:
        graph = set_batch_size(graph, batch_size)
    graph = pack_if_requested(graph, None, kernel_family(target.kernels))
    graph = dataclasses.replace(graph, origin=dataclasses.replace(graph.origin, target=target))
    builder = Builder()
    ends = write_graph(graph, builder)
    return builder.finish(*ends, rewrite_for(target))


def find_batch_size(
    graph: ResolvedGraph, requested: int | None, target: Target | None
) -> int | None:
    """Returns the batch size of a file: `requested`, the target's size, or the model's size.

    Models that keep states, or combine the examples of a batch, require the model's batch size.
    None means that the file keeps the shapes of the model.

    Raises:
        ValueError: if `requested` differs from the size that the model or the target needs.
    """
    required = None if target is None else target.batch_size
    origin, rows = graph.origin, graph.origin.fixed_batch
    others = [size for size in (requested, required) if size not in (None, rows)]
    if rows and others and (origin.kept_batch or mixes_rows(origin.calls, rows, others[0])):
        if requested not in (None, rows):
            does = "keeps the states of" if origin.states else "computes together"
            raise ValueError(
                f"batch_size={requested}: '{graph.name}' {does} {rows} examples. Build the model "
                f"again with keras.Input(batch_size={requested}), and copy the weights: "
                f"new.set_weights(old.get_weights())."
            )
        return rows
    if target is not None and required is not None and requested not in (None, required):
        raise ValueError(
            f"batch_size={requested}: {target.title} requires batch size {required}. Leave "
            f"batch_size out, or pass target='xnnpack'."
        )
    return requested or required or origin.kept_batch


def count_channel_bytes(contents: bytes, target: Target) -> int:
    """Returns the bytes of memory that a target needs for the per-channel scales of a file."""
    graph = FileGraph(contents)
    weights = [
        (operation.kernel, graph.tensors[operation.inputs[1]])
        for operation in graph.operations
        if operation.kernel in target.channel_bytes
    ]
    return sum(
        target.channel_bytes[kernel] * tensor.shape[0]
        for kernel, tensor in weights
        if tensor.type == "int8" and not tensor.scale
    )


def find_file_problems(contents: bytes, target: Target) -> tuple[Problem, ...]:
    return tuple(_find_problems(target, FileGraph(contents)))


def _find_problems(target: Target, graph: FileGraph) -> Iterator[Problem]:
    for index, operation in enumerate(graph.operations):
        site = Site(graph, operation)
        refusal = _find_refusal(target, site)
        if refusal is not None:
            reason, change = refusal
            name = site.outputs[0].name.removeprefix(f"{SCOPE}/").removeprefix(PREFIX)
            elsewhere = target.elsewhere
            if target.host is not None and (missing := _find_refusal(target.host, site)):
                elsewhere = None
                if missing[0] != reason:
                    reason += f", and in {target.host.title} {missing[0]}"
            is_fault = refusal == _find_fault(target, site)
            yield Problem(name, operation.kernel, reason, change, elsewhere, index, is_fault)
            continue
        for inner in graph.get_subgraphs(operation):
            for problem in _find_problems(target, inner):
                yield dataclasses.replace(problem, index=index)


def _find_refusal(target: Target, site: Site) -> tuple[str, str] | None:
    name = site.operation.kernel
    if target.operators is None:
        return _run_checks(target.checks, site) or _find_fault(target, site)
    kernel = target.operators.get(name)
    is_float = any(tensor.type.startswith(("float", "complex")) for tensor in site.tensors)
    change = IN_FLOAT if is_float else CHANGES.get(name, "")
    ends = site.graph.inputs.values()
    if name == "GATHER" and site.inputs[1] not in ends:  # A lookup table of an activation.
        change = ""
    if kernel is None:
        return "no kernel", change
    first = site.inputs[0] if site.inputs else None
    unknown_types = [
        tensor.type
        for tensor in site.tensors
        if tensor.type not in ((tensor is first and kernel.reads) or kernel.types)
    ]
    if unknown_types:
        only = ", only for int32" * (unknown_types[0] == "int64" and "int32" in kernel.types)
        return f"no kernel for {unknown_types[0]}{only}", change
    if len(site.inputs) > kernel.max_inputs:
        return f"at most {kernel.max_inputs} inputs, not {len(site.inputs)}", ""
    axes = max(len(tensor.shape) for tensor in site.tensors)
    if axes > kernel.max_axes:
        return f"at most {kernel.max_axes} axes, not {axes}", ""
    open_inputs = [x for x in site.tensors if -1 in x.shape and x in ends]
    if target.batch_size is not None and open_inputs:
        return "fixed sizes only", open_inputs[0].advise_on_sizes()
    refused = _run_checks((*target.checks, *kernel.checks), site)
    refused = refused or _find_fault(target, site)
    if refused is not None:
        return refused
    if not target.per_channel and name in WEIGHTED:
        weights = site.inputs[1]
        if weights is not None and weights.scale == 0:
            change = "quantize with recipes.int8(per_channel=False)"
            return "slow with a scale for each channel", change
    return None


def _find_fault(target: Target, site: Site) -> tuple[str, str] | None:
    fault = target.fault(site)
    return None if fault is None else (fault.reason, fault.change)


def _run_checks(checks: Sequence[Check], site: Site) -> tuple[str, str] | None:
    reasons = (check(site) for check in checks)
    return next(((reason, "") for reason in reasons if reason is not None), None)
