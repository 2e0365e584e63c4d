"""Counts what a training step launches, moves and waits for, operation by operation.

    python -m benchmarks.operations                      MobileNetV2 in all forms
    python -m benchmarks.operations ResNet50 --forms float int8 --kinds 12
    python -m benchmarks.operations --gpu-graph    what keras_qat traces where there is a GPU

The graph of a step is taken after TensorFlow's graph optimization. No GPU is needed: an operation
counts as placed on a GPU where TensorFlow has a kernel for it there, as TensorFlow's placer does.
The columns:

operations   what the executor runs; without constants, reads of variables and copies by reference
launches     operations on the GPU that compute something there, at least one kernel each
MB           what these read and write
kept         MB on the GPU that were computed in front of the loss and are read behind it
host reads   tensors that the CPU waits for: arguments that GPU kernels take from host memory,
             inputs of operations on the CPU, and what `fit` reads around a step; in float too
             Keras asks how many steps to run at once
swaps        transpositions that TensorFlow's layout optimizer adds on a GPU, in no other column
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from benchmarks import markdown

PASSED_ON = {"Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient"}
"""Operations whose output is their input's memory."""
NOTHING = {"_Arg", "_Retval", "Const", "Placeholder", "VarHandleOp", "ReadVariableOp"}
NOTHING |= {"Identity", "IdentityN", "NoOp", "PlaceholderWithDefault"}
"""Operations that are not counted."""
NO_LAUNCH = {*NOTHING, *PASSED_ON, "AssignVariableOp"}
"""Operations that launch nothing on a GPU."""
LOSSES = {"SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits"}
"""Operations behind which gradients begin."""
COLUMNS = (
    ("form", 8),
    ("operations", 10),
    ("ratio", 6),
    ("launches", 8),
    ("ratio", 6),
    ("MB", 7),
    ("ratio", 6),
    ("kept", 7),
    ("ratio", 6),
    ("host reads", 10),
    ("swaps", 5),
)


@dataclasses.dataclass
class Counts:
    """Figures of one training step.

    Args:
        operations: number of operations by kind.
        launches: number of launches on the GPU by kind.
        bytes: what launched operations read and write.
        kept: bytes that are kept for gradients.
        host_reads: number of tensors that the host waits for, by the kind that needs them.
        swaps: transpositions that the layout optimizer adds on a GPU.
    """

    operations: collections.Counter[str]
    launches: collections.Counter[str]
    bytes: int
    kept: int
    host_reads: collections.Counter[str]
    swaps: int


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", nargs="?", default="MobileNetV2", help="MobileNetV2 by default")
    parser.add_argument("--forms", nargs="*", metavar="FORM", help="all by default")
    parser.add_argument("--kinds", type=int, default=0, help="kinds of operations to list")
    parser.add_argument("--gpu-graph", action="store_true", help="trace as where there is a GPU")
    arguments = parser.parse_args()
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # A GPU has none of its operations.
    from benchmarks.models import VARIANTS, batch, build, has_tfmot
    from keras_qat.arithmetic import plain_operations

    if arguments.gpu_graph:
        plain_operations.has_gpu = lambda: True
    print(markdown.head(*zip(*COLUMNS, strict=True)), flush=True)
    counts: dict[str, Counts] = {}
    for form in arguments.forms or VARIANTS:
        if form == "tfmot" and not has_tfmot():
            continue
        model = VARIANTS[form](build(arguments.name))
        counts[form] = counts_of(model, batch(model))
        print(line(form, counts[form], next(iter(counts.values()))), flush=True)
    for form, figures in counts.items() if arguments.kinds else ():
        for title in ("operations", "launches", "host_reads"):
            kinds = getattr(figures, title).most_common(arguments.kinds)
            print(f"\n{form}, {title}:", ", ".join(f"{kind} {number}" for kind, number in kinds))


def line(form: str, counts: Counts, base: Counts) -> str:
    """A row of the table, with ratios to the first form."""
    cells = [form]
    for name in ("operations", "launches"):
        number, of_base = getattr(counts, name).total(), getattr(base, name).total()
        cells += [str(number), f"{number / of_base:.2f}x" if of_base else "-"]
    for size, of_base in ((counts.bytes, base.bytes), (counts.kept, base.kept)):
        cells += [f"{size / 1e6:.0f}", f"{size / of_base:.2f}x" if of_base else "-"]
    cells += [str(counts.host_reads.total()), str(counts.swaps)]
    return markdown.row(cells, [width for _, width in COLUMNS])


def counts_of(model: Any, data: tuple[Any, Any]) -> Counts:
    """The figures of a model's training step on a batch."""
    from benchmarks.step_time import functions

    step, _ = functions(model, data, jit_compile=False)
    counts = count(optimized_graph(step))
    counts.host_reads["numpy() around the step"] = round(in_a_step_of_fit(numpy_calls, model, data))
    return counts


def in_a_step_of_fit(
    count_in: Callable[[Callable[[], Any]], float], model: Any, data: tuple[Any, Any]
) -> float:
    """What a step of `fit` counts: that of many steps less that of few, with a compiled model."""
    import tensorflow as tf

    few, many = 2, 10
    batches = tf.data.Dataset.from_tensors(data).repeat()
    fit = functools.partial(model.fit, batches, verbose=0)
    fit(steps_per_epoch=few)  # It traces.
    counted = [count_in(functools.partial(fit, steps_per_epoch=steps)) for steps in (few, many)]
    return (counted[1] - counted[0]) / (many - few)


def numpy_calls(call: Callable[[], Any]) -> int:
    """How often a call asks for the numbers of a tensor outside of graphs."""
    from unittest import mock

    from tensorflow.python.framework import ops

    tensor_class: Any = ops._EagerTensorBase
    # Which `numpy()`, `int()` and `bool()` call.
    with mock.patch.object(tensor_class, "_numpy", autospec=True, side_effect=tensor_class._numpy):
        call()
        return tensor_class._numpy.call_count


def optimized_graph(step: Callable[[], Any]) -> Any:
    """The graph that a step runs, after optimization: the largest of its first call."""
    from tensorflow.python.eager import context

    context.context().enable_graph_collection()
    step()
    graphs = context.context().export_run_metadata().function_graphs
    context.context().disable_graph_collection()
    return max((run.post_optimization_graph for run in graphs), key=lambda graph: len(graph.node))


def count(graph: Any) -> Counts:
    """Counts the operations of a graph as if there were a GPU."""
    import tensorflow as tf

    from benchmarks.gpu_layout import swaps

    known = _with_known_shapes(graph)
    with tf.Graph().as_default() as imported:
        tf.graph_util.import_graph_def(known, name="")
    operations = imported.get_operations()
    on_gpu = {op.name: op.type == "Placeholder" or gpu_kernel(op) is not None for op in operations}
    number = collections.Counter
    counts = Counts(number(), number(), 0, _kept(operations), number(), swaps(known, on_gpu))
    fetched: set[str] = set()
    for op in operations:
        if op.type not in NOTHING:
            counts.operations[op.type] += 1
        kernel = gpu_kernel(op)
        inputs = [_behind_references(tensor) for tensor in op.inputs]
        needed = _on_host(inputs, op.op_def.input_arg, op, kernel)
        for tensor in needed if op.type not in NOTHING else ():
            if _is_on_gpu(tensor) and tensor.name not in fetched:
                fetched.add(tensor.name)
                counts.host_reads[op.type] += 1
        computed = [tensor for tensor in op.outputs if _is_on_gpu(tensor)]
        is_update = not op.outputs and kernel is not None
        if op.type not in NO_LAUNCH and (computed or is_update):
            counts.launches[op.type] += 1
            there = {tensor.name: tensor for tensor in inputs if tensor not in needed}
            counts.bytes += sum(map(_size, [*there.values(), *computed]))
    return counts


def _kept(operations: Iterable[Any]) -> int:
    """Bytes of tensors on the GPU from in front of the loss that operations behind it read."""
    behind: set[Any] = set()
    kept = {}
    for op in operations:  # None comes before those that it reads.
        inputs = [_behind_references(tensor) for tensor in op.inputs]
        before = [tensor.op for tensor in inputs] + op.control_inputs
        if op.type in LOSSES or not behind.isdisjoint(before):
            behind.add(op)
            for tensor in inputs:
                if tensor.op not in behind and tensor.op.type not in NOTHING:
                    kept[tensor.name] = tensor
    return sum(_size(tensor) for tensor in kept.values() if _is_on_gpu(tensor))


def _with_known_shapes(graph: Any) -> Any:
    """The graph with placeholders for its arguments, and for what is read of variables."""
    import tensorflow as tf

    handles = {node.name: node.attr for node in graph.node if node.op == "_Arg"}
    known = tf.compat.v1.GraphDef(library=graph.library, versions=graph.versions)
    for node in graph.node:
        if node.op == "_Retval":
            continue
        copy = known.node.add()
        copy.CopyFrom(node)
        copy.device = ""
        copy.op = copy.op.replace("_MklNative", "").replace("_Mkl", "")
        source = handles.get(node.input[0]) if node.input else None
        is_read = node.op == "ReadVariableOp" and source and source["_handle_shapes"].list.shape
        if node.op == "_Arg" or is_read:
            shape = source["_handle_shapes"].list.shape[0] if source and is_read else None
            dtype = node.attr["T" if node.op == "_Arg" else "dtype"].type
            copy.Clear()
            copy.name, copy.op, copy.attr["dtype"].type = node.name, "Placeholder", dtype
            if shape is not None:
                copy.attr["shape"].shape.CopyFrom(shape)
    return known


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A GPU kernel, with the names of the arguments that it has in host memory."""

    host_memory: frozenset[str]


def gpu_kernel(op: Any) -> Kernel | None:
    """The kernel that an operation has on GPUs, or None: then it runs on the CPU."""
    for kernel in _registered(op.type):
        accepts = (
            op.get_attr(limit.name).as_datatype_enum in limit.allowed_values.list.type
            for limit in kernel.constraint
            if limit.allowed_values.list.type
        )
        if all(accepts):
            return Kernel(frozenset(kernel.host_memory_arg))
    return None


@functools.cache
def _registered(kind: str) -> list[Any]:
    from tensorflow.python.framework import kernels

    if kind == "Placeholder":
        return []
    registered = kernels.get_registered_kernels_for_op(kind).kernel
    return sorted(
        (kernel for kernel in registered if kernel.device_type in ("GPU", "DEFAULT")),
        key=lambda kernel: (-kernel.priority, kernel.device_type != "GPU"),
    )


def _behind_references(tensor: Any) -> Any:
    """The tensor that operations passed on by reference."""
    while tensor.op.type in PASSED_ON:
        tensor = tensor.op.inputs[0]
    return tensor


def _is_on_gpu(tensor: Any) -> bool:
    """Whether a tensor is in the memory of the GPU; small integers and shapes often are not."""
    op, kernel = tensor.op, gpu_kernel(tensor.op)
    if op.type == "Placeholder":  # What was read of a variable; batches come from the host.
        return tensor.dtype.is_floating or tensor.dtype.name == "int64"
    if kernel is None:
        return False
    return tensor not in _on_host(op.outputs, op.op_def.output_arg, op, kernel)


def _on_host(
    tensors: Sequence[Any], definitions: Iterable[Any], op: Any, kernel: Kernel | None
) -> list[Any]:
    """Those of an operation's inputs or outputs that are in host memory, handles left out."""
    names = _names(definitions, op)
    return [
        tensor
        for tensor, name in zip(tensors, names, strict=False)
        if tensor.dtype.name not in ("resource", "variant")
        and (kernel is None or name in kernel.host_memory)
    ]


def _names(definitions: Iterable[Any], op: Any) -> Iterator[str]:
    """The argument's name of each input or output: some arguments are lists of tensors."""
    for argument in definitions:
        number = 1
        if argument.number_attr:
            number = op.get_attr(argument.number_attr)
        elif argument.type_list_attr:
            number = len(op.get_attr(argument.type_list_attr))
        yield from [argument.name] * number


def _size(tensor: Any) -> int:
    """Bytes of a tensor; handles and unknown shapes have none."""
    elements = tensor.shape.num_elements()
    is_known = elements is not None and tensor.dtype.name not in ("resource", "variant")
    return elements * tensor.dtype.size if is_known else 0


if __name__ == "__main__":
    main()
