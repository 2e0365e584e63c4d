"""A target is data: which operators it has, of which types and sizes, and how it rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from keras_qat.arithmetic.families import Family
from keras_qat.resolved.batch import with_batch
from keras_qat.resolved.names import PREFIX
from keras_qat.resolved.resolve import resolve
from keras_qat.schedule import check_quantized
from keras_qat.tflite.builder import Builder
from keras_qat.tflite.names import SCOPE
from keras_qat.tflite.read import FileGraph, Operation
from keras_qat.tflite.write import write_graph

__all__ = ["Kernel", "Problem", "Target", "problems"]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What a kernel takes.

    Args:
        types: of all of its tensors, e.g. "int8"; sizes and places count too.
        max_axes: of any of its tensors.
        reads: of its first input, where that may be less; None: as `types`.
        max_inputs: how many tensors it reads at most.
    """

    types: tuple[str, ...]
    max_axes: int = 99
    reads: tuple[str, ...] | None = None
    max_inputs: int = 99


@dataclasses.dataclass(frozen=True)
class Target:
    """A place where files run.

    Args:
        name: what users call it.
        title: what its makers do.
        kernels: whose rounding it has, as of `quantize_model(kernels=...)`.
        batch_size: of files, None for any.
        operators: TFLite's name of each operator that it has -> what its kernel takes.
    """

    name: str
    title: str
    kernels: Family
    batch_size: int | None
    operators: Mapping[str, Kernel]


@dataclasses.dataclass(frozen=True)
class Problem:
    """An operator of a file that a target does not run.

    Args:
        tensor: what it computes: the layer, and what the file calls a part of it.
        operator: TFLite's name of it.
        reason: why, in a few words.
    """

    tensor: str
    operator: str
    reason: str

    def __str__(self) -> str:
        return f"{self.tensor}: {self.operator}, {self.reason}"


def problems(
    model: Any, target: Target, *, input_range: tuple[float, float] | None = None
) -> tuple[Problem, ...]:
    """What of a model a target does not run: asked before training, or of a file.

    Args:
        model: what `quantize_model` returned, with or without ranges, or a file's contents.
        target: where it is to run, e.g. `keras_qat.targets.TFLM`.
        input_range: as of `export_tflite`.

    Returns:
        One entry for each operator, in the order of computation; none if all is well.

    Raises:
        ValueError: as `resolve`.

    Example:
        >>> for each in keras_qat.targets.problems(qat, keras_qat.targets.TFLM):
        ...     print(each)
    """
    if not isinstance(model, bytes):
        model = _written(model, target, input_range)
    graph = FileGraph(model)
    return tuple(
        Problem(_name(graph, each), each.kernel, reason)
        for each in graph.operations
        for reason in _reasons(target, graph, each)
    )


def _name(graph: FileGraph, operation: Operation) -> str:
    name = graph.tensors[operation.outputs[0]].name
    return name.removeprefix(f"{SCOPE}/").removeprefix(PREFIX)


def _written(model: Any, target: Target, input_range: Any) -> bytes:
    check_quantized(model, ": quantize it first.")
    graph = resolve(model, input_range=input_range)
    if target.batch_size is not None:
        graph = with_batch(graph, target.batch_size)
    builder = Builder()
    return builder.finish(*write_graph(graph, builder))


def _reasons(target: Target, graph: FileGraph, operation: Operation) -> Iterator[str]:
    kernel = target.operators.get(operation.kernel)
    if kernel is None:
        yield f"which {target.title} has no kernel for"
        return
    tensors = [
        graph.tensors[index] for index in (*operation.inputs, *operation.outputs) if index >= 0
    ]
    first = graph.tensors[operation.inputs[0]] if operation.inputs else tensors[0]
    others = [each.dtype.name for each in tensors if each.dtype.name not in kernel.types]
    if first.dtype.name not in (kernel.reads or kernel.types):
        others = [first.dtype.name]
    axes = max(len(each.shape) for each in tensors)
    if others:
        yield f"which {target.title} has no kernel for with {others[0]}"
    elif len(operation.inputs) > kernel.max_inputs:
        count = len(operation.inputs)
        yield f"which {target.title} takes up to {kernel.max_inputs} tensors in, not {count}"
    elif axes > kernel.max_axes:
        yield f"which {target.title} takes up to {kernel.max_axes} axes in, not {axes}"
