"""Operators that a target does not run, found in the file that a model becomes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from keras_qat.arithmetic.kernel_families import kernel_family
from keras_qat.config.targets.target import Check, Problem, Target, get
from keras_qat.export.target_rewrites import rewrite_for
from keras_qat.export.tflite_writer import write_graph
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
    "RESIZE_BILINEAR": "resize by 2, or by interpolation='nearest'",
    "RESIZE_NEAREST_NEIGHBOR": "resize by 2",
    **dict.fromkeys(("ARG_MAX", "ARG_MIN"), "say output_type=tf.int32 in the call"),
    "GATHER": "index before the model",
    "WHILE": "unroll the layer, or leave it out of the model",
}
"""Operator -> advice where a target lacks it."""

OPEN = (
    "export with batch_size=1, and quantize keras.Model(x, model(x)), where x is a keras.Input "
    "that has all other sizes"
)
IN_FLOAT = "keras_qat.plan says why it computes in float"


def problems(
    model: Any, target: str | Target, *, input_range: tuple[float, float] | None = None
) -> tuple[Problem, ...]:
    """Finds what a target does not run of a model, before or after training, or of a file.

    Args:
        model: what `quantize_model` returned, with or without ranges, or a file's contents.
        target: where it is to run: a name, such as "ethos_u55", or a `keras_qat.targets.Target`.
        input_range: minimum and maximum of inputs that have no quantizer, as those of
            `recipes.contrib`. Without it such inputs and the layers that read them are float.

    Returns:
        One entry for each operator, in the order of computation; none if all is well.

    Raises:
        ValueError: as `resolve`, or on an unknown target.

    Example:
        >>> for problem in keras_qat.targets.problems(qat, "tflm"):
        ...     print(problem)
    """
    target = get(target)
    if isinstance(model, bytes):
        contents = read_contents(model)
        with report_damage():
            return file_problems(contents, target)
    if isinstance(model, keras.Model) and not is_quantized(model):
        raise ValueError(
            f"'{model.name}' is a float model. Pass what keras_qat.quantize_model returns, or read "
            f"keras_qat.plan(model, target={target.name!r}).problems."
        )
    check_quantized(model)
    return file_problems(planned_file(resolve(model, input_range=input_range), target), target)


def planned_file(graph: ResolvedGraph, target: Target) -> bytes:
    """Returns the file that a model becomes for a target, also before training."""
    if target.batch_size is not None:
        graph = set_batch_size(graph, target.batch_size)
    graph = pack_if_requested(graph, None, kernel_family(target.kernels))
    graph = dataclasses.replace(graph, origin=dataclasses.replace(graph.origin, target=target))
    builder = Builder()
    ends = write_graph(graph, builder)
    return builder.finish(*ends, rewrite_for(target))


def channel_bytes(contents: bytes, target: Target) -> int:
    """Returns the bytes of memory that a target keeps for channels with a scale each."""
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


def file_problems(contents: bytes, target: Target) -> tuple[Problem, ...]:
    """Finds what a target does not run of a file; returns what `problems` returns."""
    return tuple(_problems(target, FileGraph(contents)))


def _problems(target: Target, graph: FileGraph) -> Iterator[Problem]:
    for index, operation in enumerate(graph.operations):
        site = Site(graph, operation)
        refusal = _refusal(target, site)
        if refusal is not None:
            reason, change = refusal
            name, elsewhere = _name(site), target.elsewhere
            yield Problem(name, operation.kernel, reason, change, elsewhere, index)
            continue
        for inner in graph.get_subgraphs(operation):
            for problem in _problems(target, inner):
                yield dataclasses.replace(problem, index=index)


def _name(site: Site) -> str:
    return site.outputs[0].name.removeprefix(f"{SCOPE}/").removeprefix(PREFIX)


def _is_open(site: Site) -> bool:
    """Whether an operator reads an input of the file that has an open size."""
    ends = site.graph.inputs.values()
    return any(tensor in ends and -1 in tensor.shape for tensor in site.tensors)


def _refusal(target: Target, site: Site) -> tuple[str, str] | None:
    """Returns why a target does not run an operator, with advice; None if it does."""
    name = site.operation.kernel
    if target.operators is None:
        return _checked(target.checks, site) or _met(target, site)
    kernel = target.operators.get(name)
    is_float = any(tensor.type.startswith("float") for tensor in site.tensors)
    change = IN_FLOAT if is_float else CHANGES.get(name, "")
    if kernel is None:
        return "no kernel", change
    first = site.inputs[0] if site.inputs else None
    unknown_types = [
        tensor.type
        for tensor in site.tensors
        if tensor.type not in ((tensor is first and kernel.reads) or kernel.types)
    ]
    if unknown_types:
        return f"no kernel for {unknown_types[0]}", change
    if len(site.inputs) > kernel.max_inputs:
        return f"at most {kernel.max_inputs} inputs, not {len(site.inputs)}", ""
    axes = max(len(tensor.shape) for tensor in site.tensors)
    if axes > kernel.max_axes:
        return f"at most {kernel.max_axes} axes, not {axes}", ""
    if target.batch_size is not None and _is_open(site):
        return "known sizes only", OPEN
    refused = _checked((*target.checks, *kernel.checks), site)
    refused = refused or _met(target, site)
    if refused is not None:
        return refused
    if not target.per_channel and name in WEIGHTED:
        weights = site.inputs[1]
        if weights is not None and weights.scale == 0:
            change = "quantize with recipes.int8(per_channel=False)"
            return "slow with a scale for each channel", change
    return None


def _met(target: Target, site: Site) -> tuple[str, str] | None:
    """Returns the reason and the advice of the first fault that an operator meets."""
    fault = target.fault(site)
    return None if fault is None else (fault.reason, fault.change)


def _checked(checks: Sequence[Check], site: Site) -> tuple[str, str] | None:
    """Returns the reason of the first check that refuses an operator."""
    reasons = (check(site) for check in checks)
    return next(((reason, "") for reason in reasons if reason is not None), None)
