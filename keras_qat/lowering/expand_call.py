"""Replaces a call by the calls of an expansion, such as `1.0 - tf.math.erf(x)` for `tf.math.erfc`.

An expansion is a TensorFlow function that computes an operation or a layer with operations that
have integer kernels. It runs on symbolic Keras tensors. The operations that Keras records become
calls of the graph.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from keras_qat.graph.calls import Call, Value, flatten_values, map_values
from keras_qat.graph.facts import describe_arguments
from keras_qat.graph.operations import bind_arguments, is_operation, name_in_tensorflow
from keras_qat.graph.precision import get_policy, is_half, use_policy
from keras_qat.keras2.backend import KerasTensor, keras
from keras_qat.keras2.layers_and_models import accepts_training, rename, take_nodes
from keras_qat.lowering.builder import LoweringContext, get_suffix
from keras_qat.tracing.check_trace import draw_like

Known = TypeVar("Known")

Expansion = Callable[..., Any]
"""A function that replaces an operation. It has the parameters of this operation.

An expansion of a Keras layer has the layer as its first parameter. It raises `CannotExpand` for
arguments that it does not support. The original call then stays in the graph.
"""


class CannotExpand(NotImplementedError):
    """Raised if an expansion does not support the arguments of a call."""


def require(condition: object) -> None:
    if not condition:
        raise CannotExpand


def try_each(*expansions: Expansion) -> Expansion:
    """Return an expansion that calls several expansions until one supports the arguments."""

    def expand(*args: Any, **kwargs: Any) -> Any:
        for expansion in expansions:
            with contextlib.suppress(CannotExpand):
                return expansion(*args, **kwargs)
        raise CannotExpand

    return expand


def unwrap(result: Known | None) -> Known:
    if result is None:
        raise CannotExpand
    return result


def make_symbol(value: Value, call: Call | None = None) -> tf.Tensor:
    """Return a symbolic Keras tensor for `value`. Expansions read `call` with `get_call`."""
    tensor = KerasTensor(tf.TensorSpec(value.shape, value.dtype))
    tensor.graph_value, tensor.expanded_call = value, call
    return tensor


def is_tensor(argument: object) -> bool:
    """Return True for a symbolic tensor, and False for a constant such as a NumPy array."""
    return isinstance(argument, KerasTensor)


def get_value(argument: Any) -> Any:
    """Return the value of the graph for a symbolic tensor. Return a constant unchanged.

    An expansion calls this function if it depends on how the tensor was computed. `expand_call`
    then does not test the expansion on random inputs.
    """
    if not hasattr(argument, "graph_value"):
        return argument
    argument.is_known = True
    return argument.graph_value


def get_call(tensor: tf.Tensor) -> Call:
    """Return the call that is being expanded. `tensor` is one of its symbolic inputs.

    An expansion that calls this function is not tested on random inputs.
    """
    tensor.is_known = True
    call: Call = tensor.expanded_call
    return call


def copy_outputs(call: Call) -> Any:
    return map_values(lambda value: Value(value.name, value.shape, value.dtype), call.outputs)


def expand_call(
    call: Call, function: Expansion, context: LoweringContext, inside: bool = False
) -> list[Call]:
    """Run an expansion on symbolic tensors, and return the recorded operations as calls.

    The last new call keeps the name of the original call, such as `norm`. The other new calls have
    longer names: `tf.reduce_mean(x, name="mean")` becomes `norm_mean`.

    Args:
        call: the call of an operation or a layer.
        function: the expansion.
        context: stores the new layers. All calls of a shared layer use the same new layers.
        inside: whether to join names with a slash, `norm/mean`, as in a traced layer.

    Returns:
        The new calls. The list is empty if the expansion does not support the arguments, or if it
        computes other results than `call` for random inputs.
    """
    stand_ins = {value: make_symbol(value, call) for value in call.inputs}
    given = bind_arguments(call) if is_operation(call.layer) else (call.args, dict(call.kwargs))
    args, kwargs = map_values(stand_ins.__getitem__, given)
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:  # The function does not support an argument.
        return []
    return _expand(call, partial(function, *args, **kwargs), context, stand_ins, inside)


def trace_in_place(call: Call, compute: Callable[[], Any], context: LoweringContext) -> list[Call]:
    """Return the operations that `compute` calls. They replace `call`.

    `compute` is a function without arguments. It gets its tensors from `make_symbol`.
    """
    return _expand(call, compute, context)


class _Traced(NamedTuple):
    """A call, and Keras' record of its expansion."""

    call: Call
    outputs: list[tf.Tensor]
    nodes: list[Any]
    """Keras' `Node`s of the recorded operations, in order."""
    stand_ins: dict[Value, tf.Tensor]


def _expand(
    call: Call,
    compute: Callable[[], Any],
    context: LoweringContext,
    stand_ins: dict[Value, tf.Tensor] | None = None,
    inside: bool = False,
) -> list[Call]:
    try:
        with use_policy(get_policy(call.output.dtype)):
            outputs = tf.nest.flatten(compute())
        require(all(map(is_tensor, outputs)))
    except Exception as error:
        is_refusal = isinstance(error, CannotExpand) or _is_from_library(error.__traceback__)
        if context.verifies and not is_refusal:
            raise
        return []
    traced = _Traced(call, outputs, take_nodes(outputs), stand_ins or {})
    return _make_calls(traced, context, inside) if _is_right(traced, context) else []


def _is_from_library(traceback: TracebackType | None) -> bool:
    """Return True if an error was raised by another package, such as TensorFlow or Keras."""
    while traceback and traceback.tb_next:
        traceback = traceback.tb_next
    module = traceback.tb_frame.f_globals.get("__name__", "") if traceback else ""
    return not module.startswith(("keras_qat.", "tests."))


def _is_right(traced: _Traced, context: LoweringContext) -> bool:
    """Return True if a call and its expansion return almost equal results for random inputs.

    Some calls cannot be compared, such as a layer that is not built. Return True for them.
    """
    call, outputs, nodes, stand_ins = traced
    arguments = tf.nest.flatten([outputs, [(node.call_args, node.call_kwargs) for node in nodes]])
    read = [leaf for leaf in arguments if hasattr(leaf, "graph_value")]
    reads_others = any(leaf is not stand_ins.get(leaf.graph_value) for leaf in read)
    uses_facts = any(hasattr(tensor, "is_known") for tensor in stand_ins.values())
    is_ready = is_operation(call.layer) or call.layer.built
    are_half = any(is_half(value.dtype) for value in call.inputs)
    has_copies = any(node.layer.weights and node.layer is not call.layer for node in nodes)
    if not is_ready or reads_others or uses_facts or are_half or has_copies:
        return True
    layer = name_in_tensorflow(call.layer) or id(call.layer)
    described = describe_arguments(call, lambda value: (value.shape, value.dtype))
    key = layer, described, tuple(_shorten_name(node.layer) for node in nodes)
    if key not in context.compared:
        context.compared[key] = _compare(traced)
    return context.compared[key]


def _compare(traced: _Traced) -> bool:
    """Compare a call with its expansion on 2 random examples. Unknown sizes are set to 8."""
    call, stand_ins = traced.call, traced.stand_ins
    drawn = draw_like(stand_ins.values())
    tensors = dict(zip(map(id, stand_ins.values()), drawn, strict=True))

    def find(leaf: Any) -> Any:
        return tensors.get(id(stand_ins[leaf] if isinstance(leaf, Value) else leaf), leaf)

    def compute(layer: keras.layers.Layer, args: Any, kwargs: Any) -> list[tf.Tensor]:
        args, kwargs = tf.nest.map_structure(find, (args, dict(kwargs)))
        if accepts_training(layer) and kwargs.get("training") is None:
            kwargs["training"] = False
        return tf.nest.flatten(layer(*args, **kwargs))

    try:
        expected = compute(call.layer, call.args, call.kwargs)
    except Exception:  # The call does not support these sizes, so it cannot be compared.
        return True
    for node in traced.nodes:
        try:
            results = compute(node.layer, node.call_args, node.call_kwargs)
        except tf.errors.InvalidArgumentError:  # The expansion cannot broadcast.
            return False
        tensors.update(zip(map(id, tf.nest.flatten(node.outputs)), results, strict=True))
    return all(map(_is_close, expected, map(find, traced.outputs)))


def _is_close(expected: tf.Tensor, computed: tf.Tensor) -> bool:
    """Return True if all elements are close where `expected` is finite."""
    first, second = (np.asarray(tf.cast(x, tf.float32)) for x in (expected, computed))
    if first.shape != second.shape:
        return False
    # +-max counts as infinite.
    is_finite: NDArray[np.bool_] = np.abs(first) < np.finfo(np.float32).max
    first, second = first[is_finite], second[is_finite]
    largest = np.max(np.abs(first), initial=0.0)
    return np.allclose(first, second, rtol=1e-4, atol=1e-5 * largest + 1e-12)


def _make_calls(traced: _Traced, context: LoweringContext, inside: bool) -> list[Call]:
    """Convert the recorded operations to calls that compute the outputs of the expanded call."""
    call, outputs, nodes, _ = traced
    names, calls = set[str](), list[Call]()
    pairs = list(zip(outputs, flatten_values(call.outputs), strict=True))
    values = {id(tensor): value for tensor, value in reversed(pairs)}
    inner = [node.layer for node in nodes]
    keeps_name = any(layer is call.layer or _is_copy(layer, call.layer) for layer in inner)
    suffix = get_suffix(call.output.name, call.name)

    def read(leaf: Any) -> Any:
        return getattr(leaf, "graph_value", values.get(id(leaf), leaf))

    def keep(layer: keras.layers.Layer, part: str) -> tuple[keras.layers.Layer, str]:
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
            weights = context.get_weights(call.layer)
            layer = context.keep(call.layer, "copy", layer, weights)
        elif layer is not call.layer:
            is_last = any(result is outputs[0] for result in results) and not keeps_name
            part = "" if is_last else _find_unused(part or _shorten_name(layer), names)
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
            value.shape = tuple(size or known_size for size, known_size in sizes)
        if (source := read(tensor)) is not value:  # The output is also an input or another output.
            identity = keras.layers.Activation("linear", dtype=get_policy(value.dtype))
            layer, path = keep(
                identity, _find_unused("identity", names) if nodes or pairs[1:] else ""
            )
            calls.append(Call(layer, (source,), {}, value, path))
    return calls


def _is_copy(layer: keras.layers.Layer, original: keras.layers.Layer) -> bool:
    """Return True if the expansion made `layer` as a clone of the expanded layer, `original`."""
    is_similar = type(layer) is type(original) and layer.name == original.name
    return is_similar and layer is not original and not is_operation(layer)


def _shorten_name(layer: keras.layers.Layer) -> str:
    """Return a layer's name without a number or module: `add` for `tf.math.add_1`."""
    name = re.sub(r"_\d+$", "", layer.name)
    is_automatic = name.replace("_", "") == type(layer).__name__.lower() or is_operation(layer)
    return (name if is_automatic else str(layer.name)).rsplit(".", 1)[-1]


def _find_unused(name: str, used: set[str]) -> str:
    """Return `name`, or `name_1` and so on if `name` is used. Add the result to `used`."""
    numbered = (f"{name}_{count}" for count in itertools.count(1))
    name = next(each for each in itertools.chain([name], numbered) if each not in used)
    used.add(name)
    return name
