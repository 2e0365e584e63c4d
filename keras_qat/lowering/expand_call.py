"""Expands calls: traces a TensorFlow function that computes the same from simpler operations."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Value, flatten_values, map_values
from keras_qat.graph.facts import describe_arguments
from keras_qat.graph.operations import bind_arguments, is_operation, name_in_tensorflow
from keras_qat.graph.precision import get_policy, is_half, use_policy
from keras_qat.keras2.backend import KerasTensor, keras
from keras_qat.keras2.layers_and_models import accepts_training, rename, take_nodes
from keras_qat.lowering.builder import LoweringContext, suffix_of

Known = TypeVar("Known")

Expansion = Callable[..., Any]
"""Computes what an operation computes, from the same arguments.

One of a Keras layer takes the layer, and then the arguments of its call. It raises `CannotExpand`
if it does not support the arguments; the call then stays unchanged.
"""


class CannotExpand(NotImplementedError):
    """An expansion does not support these arguments."""


def require(condition: Any) -> None:
    """Raise `CannotExpand` unless the condition holds."""
    if not condition:
        raise CannotExpand


def try_each(*expansions: Expansion) -> Expansion:
    """Return an expansion that tries several in order."""

    def expand(*args: Any, **kwargs: Any) -> Any:
        for expansion in expansions:
            with contextlib.suppress(CannotExpand):
                return expansion(*args, **kwargs)
        raise CannotExpand

    return expand


def known(result: Known | None) -> Known:
    """Return a result that is not None; raise `CannotExpand` for None."""
    if result is None:
        raise CannotExpand
    return result


def stand_in(value: Value, call: Call | None = None) -> Any:
    """Return a symbolic tensor that stands for a value of the graph while a function is traced.

    Args:
        value: the value.
        call: the call that is expanded, if it reads the value.
    """
    tensor = KerasTensor(tf.TensorSpec(value.shape, value.dtype))
    tensor.graph_value, tensor.expanded_call = value, call
    return tensor


def is_tensor(argument: Any) -> bool:
    """Tell whether an argument of an expansion is a tensor, not a constant."""
    return isinstance(argument, KerasTensor)


def value_of(argument: Any) -> Any:
    """Return the value of the graph that an argument stands for; a constant unchanged.

    Random inputs have none of the properties of that value, so the expansion is not checked.
    """
    if not hasattr(argument, "graph_value"):
        return argument
    argument.is_known = True
    return argument.graph_value


def call_of(tensor: Any) -> Call:
    """Return the call that is expanded, which reads this tensor. The expansion is not checked."""
    tensor.is_known = True
    call: Call = tensor.expanded_call
    return call


def copy_outputs(call: Call) -> Any:
    """Return new values like the outputs of a call, which remain those of that call."""
    return map_values(lambda value: Value(value.name, value.shape, value.dtype), call.outputs)


def expand_call(
    call: Call, function: Expansion, context: LoweringContext, inside: bool = False
) -> list[Call]:
    """Trace an expansion of a call, and compare it with the call on random inputs.

    The last sub-operation gets the name of the call, and the others are named after it. A function
    may name them itself, as in `tf.reduce_mean(x, name="mean")`.

    Args:
        call: the call of an operation or a layer.
        function: computes the same from the same arguments.
        context: keeps the layers, so that all calls of a shared layer share them.
        inside: whether to name calls `call/part`, like those inside a traced layer, and not
            `call_part`.

    Returns:
        The calls of the simpler operations; none if the function does not support the arguments,
        or computes something else.
    """
    stand_ins = {value: stand_in(value, call) for value in call.inputs}
    try:
        given = bind_arguments(call) if is_operation(call.layer) else (call.args, dict(call.kwargs))
        args, kwargs = map_values(stand_ins.__getitem__, given)
        with use_policy(get_policy(call.output.dtype)):
            outputs = tf.nest.flatten(function(*args, **kwargs))
    except Exception:  # What TensorFlow raises for arguments that fit nothing, too.
        return []
    nodes = take_nodes(outputs)
    if not _computes_the_same(call, nodes, outputs, stand_ins, context):
        return []
    return _calls_of(call, nodes, outputs, context, inside)


def _computes_the_same(
    call: Call,
    nodes: list[Any],
    outputs: list[Any],
    stand_ins: dict[Value, Any],
    context: LoweringContext,
) -> bool:
    """Tell whether an expansion computes on random inputs what the call computes.

    Equal calls are compared once. Results that are not finite may differ.
    """
    if not _can_compare(call, nodes, outputs, stand_ins):
        return True
    layer = name_in_tensorflow(call.layer) or id(call.layer)
    arguments = describe_arguments(call, lambda value: (value.shape, value.dtype))
    key = layer, arguments, tuple(_name_of(node.layer) for node in nodes)
    if key not in context.compared:
        tensors = {id(stand_ins[value]): x for value, x in _draw_inputs(stand_ins).items()}
        context.compared[key] = _compare(call, nodes, outputs, stand_ins, tensors)
    return context.compared[key]


def _can_compare(
    call: Call, nodes: list[Any], outputs: list[Any], stand_ins: dict[Value, Any]
) -> bool:
    """Tell whether the expansion follows from the arguments alone, and the layer has weights."""
    arguments = tf.nest.flatten([outputs, [(node.call_args, node.call_kwargs) for node in nodes]])
    read = [leaf for leaf in arguments if hasattr(leaf, "graph_value")]
    reads_others = any(leaf is not stand_ins.get(leaf.graph_value) for leaf in read)
    uses_facts = any(hasattr(tensor, "is_known") for tensor in stand_ins.values())
    is_ready = is_operation(call.layer) or call.layer.built
    are_half = any(is_half(value.dtype) for value in call.inputs)
    has_copies = any(node.layer.weights and node.layer is not call.layer for node in nodes)
    return is_ready and not (reads_others or uses_facts or are_half or has_copies)


def _draw_inputs(values: Iterable[Value]) -> dict[Value, Any]:
    """Return a random tensor for each value, with 2 examples and open sizes of 8."""
    draw, inputs = np.random.default_rng(0), {}
    for value in values:
        sizes = [size or (8 if axis else 2) for axis, size in enumerate(value.shape)]
        drawn = draw.normal(size=sizes) if value.is_float else draw.integers(0, 2, sizes)
        inputs[value] = tf.cast(drawn, value.dtype)
    return inputs


def _compare(
    call: Call,
    nodes: list[Any],
    outputs: list[Any],
    stand_ins: dict[Value, Any],
    tensors: dict[int, Any],
) -> bool:
    """Compute a call and its expansion, and tell whether the results are close.

    Args:
        call: the call.
        nodes: Keras' nodes of the expansion.
        outputs: its symbolic outputs.
        stand_ins: the symbolic tensor of each value that the call reads.
        tensors: id of such a symbolic tensor -> the tensor to compute with.
    """

    def find(leaf: Any) -> Any:
        return tensors.get(id(stand_ins[leaf] if isinstance(leaf, Value) else leaf), leaf)

    def compute(layer: Any, args: Any, kwargs: Any) -> list[Any]:
        args, kwargs = tf.nest.map_structure(find, (args, dict(kwargs)))
        if accepts_training(layer) and kwargs.get("training") is None:
            kwargs["training"] = False
        return tf.nest.flatten(layer(*args, **kwargs))

    try:
        expected = compute(call.layer, call.args, call.kwargs)
    except Exception:  # Sizes that do not fit: there is nothing to compare with.
        return True
    for node in nodes:
        results = compute(node.layer, node.call_args, node.call_kwargs)
        tensors.update(zip(map(id, tf.nest.flatten(node.outputs)), results, strict=True))
    return all(map(_is_close, expected, map(find, outputs)))


def _is_close(expected: Any, computed: Any) -> bool:
    """Tell whether two tensors are close where the first one is finite."""
    first, second = (np.asarray(tf.cast(x, tf.float32)) for x in (expected, computed))
    if first.shape != second.shape:
        return False
    is_finite = np.abs(first) < np.finfo(np.float32).max  # The logarithm of no value is -max.
    first, second = first[is_finite], second[is_finite]
    largest = np.max(np.abs(first), initial=0.0)
    return np.allclose(first, second, rtol=1e-4, atol=1e-5 * largest + 1e-12)


def _calls_of(
    call: Call, nodes: list[Any], outputs: list[Any], context: LoweringContext, inside: bool
) -> list[Call]:
    """Return traced nodes as calls that write the outputs of `call`."""
    names, calls = set[str](), list[Call]()
    pairs = list(zip(outputs, flatten_values(call.outputs), strict=True))
    values = {id(tensor): value for tensor, value in reversed(pairs)}
    traced = [node.layer for node in nodes]
    keeps_name = any(layer is call.layer or _is_copy(layer, call.layer) for layer in traced)
    suffix = suffix_of(call.output.name, call.name)

    def read(leaf: Any) -> Any:
        return getattr(leaf, "graph_value", values.get(id(leaf), leaf))

    def keep(layer: Any, part: str) -> tuple[Any, str]:
        """Return the layer of a part, which all calls share, and the name of its call."""
        settings = name_in_tensorflow(layer) or {**layer.get_config(), "name": ""}
        part = context.part_for(call.layer, part, settings)
        end = f"{'/' if inside else '_'}{part}" if part else ""
        rename(layer, f"{call.layer.name}{end}".rsplit("/", 1)[-1])
        return context.keep(call.layer, part, layer), call.name + end

    for node in nodes:
        args, kwargs = tf.nest.map_structure(read, (node.call_args, dict(node.call_kwargs)))
        results, layer, path = tf.nest.flatten(node.outputs), node.layer, call.name
        part = kwargs.get("name") if is_operation(layer) else None
        if part or not inside:
            kwargs.pop("name", None)
        if _is_copy(layer, call.layer):
            weights = context.weights_of(call.layer)
            layer = context.keep(call.layer, "copy", layer, weights)
        elif layer is not call.layer:
            is_last = any(result is outputs[0] for result in results) and not keeps_name
            part = "" if is_last else _unused(part or _name_of(layer), names)
            layer, path = keep(layer, part)
        for index, result in enumerate(results):
            name = f"{path}{suffix}:{index}" if len(results) > 1 else path + suffix
            name = name if name != call.output.name else f"{name}_before_activation"
            values.setdefault(id(result), Value(name, tuple(result.shape), result.dtype.name))
        written = tf.nest.map_structure(lambda result: values[id(result)], node.outputs)
        calls.append(Call(layer, args, kwargs, written, path))
    for tensor, value in pairs:
        if len(tensor.shape) == len(value.shape):
            sizes = zip(value.shape, tensor.shape, strict=True)
            value.shape = tuple(size or traced for size, traced in sizes)
        if (source := read(tensor)) is not value:  # Returned unchanged, or twice.
            require(isinstance(source, Value))
            identity = keras.layers.Activation("linear", dtype=get_policy(value.dtype))
            layer, path = keep(identity, _unused("identity", names) if nodes or pairs[1:] else "")
            calls.append(Call(layer, (source,), {}, value, path))
    return calls


def _is_copy(layer: Any, original: Any) -> bool:
    """Tell whether a layer is a clone of the expanded one, of which it gets the weights."""
    is_similar = type(layer) is type(original) and layer.name == original.name
    return is_similar and layer is not original and not is_operation(layer)


def _name_of(layer: Any) -> str:
    """Return the name of a layer without what Keras or TensorFlow add to tell it from others."""
    name = re.sub(r"_\d+$", "", layer.name)
    is_automatic = name.replace("_", "") == type(layer).__name__.lower() or is_operation(layer)
    return (name if is_automatic else str(layer.name)).rsplit(".", 1)[-1]


def _unused(name: str, used: set[str]) -> str:
    """Return a name with the first number that makes it unused, and note it."""
    numbered = (f"{name}_{count}" for count in itertools.count(1))
    name = next(each for each in itertools.chain([name], numbered) if each not in used)
    used.add(name)
    return name
