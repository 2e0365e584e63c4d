"""Vectorizes `tf.map_fn`: calls each operation of its function once for the entire batch.

"Mapped" tensors differ between examples. "Shared" tensors, such as weights, do not.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Value, flatten_values, map_values
from keras_qat.graph.operations import get_kind, is_operation
from keras_qat.graph.read_model import read_model
from keras_qat.keras2.backend import (
    KerasTensor,
    allow_any_batch_sizes,
    is_symbolic,
    keras,
    make_input,
)

_CONVOLUTIONS = ("conv2d", "depthwise_conv2d")


class NotKnown(Exception):
    """Raised if the length of a loop is unknown, or a function cannot be vectorized."""


class _ExampleModel(keras.Model):
    """A model without step counters. Keras cannot create their variables inside a `Lambda`."""

    def _init_batch_counters(self) -> None:
        pass


def map_examples(fn: Callable[[Any], Any], elems: Any) -> Any:
    """Applies `fn`, a function of one example, to batches of symbolic tensors.

    `fn` is traced with one example. Each traced operation is then called with the entire batch.

    Raises:
        NotKnown: if a size other than the batch size is unknown, or an operation is unsupported.
            Also if `fn` reads a tensor of the entire batch.
    """
    batches = tf.nest.flatten(elems)
    for x in batches:
        if not is_symbolic(x) or x.shape[0] is not None or None in x.shape[1:]:
            raise NotKnown
    ones = [make_input(x.shape[1:], x.dtype) for x in batches]
    results = fn(tf.nest.pack_sequence_as(elems, ones))
    outputs = tf.nest.flatten(results)
    if not all(map(is_symbolic, outputs)):
        raise NotKnown
    shared = _find_shared(ones, outputs)
    try:
        with allow_any_batch_sizes():
            graph = read_model(_ExampleModel([*ones, *shared], outputs))
    except ValueError as error:
        raise NotKnown from error
    inputs = flatten_values(graph.inputs)
    known: dict[Value, Any] = dict(zip(inputs, [*batches, *shared], strict=True))
    mapped = set(inputs[: len(ones)])
    for call in graph.calls:
        known.update(
            zip(flatten_values(call.outputs), _apply_to_all(call, known, mapped), strict=True)
        )
        if not mapped.isdisjoint(call.inputs):
            mapped.update(
                value for value in flatten_values(call.outputs) if is_symbolic(known[value])
            )
    if not mapped.issuperset(flatten_values(graph.outputs)):
        raise NotKnown
    results_of_all = [known[value] for value in flatten_values(graph.outputs)]
    return tf.nest.pack_sequence_as(results, results_of_all)


def _find_shared(ones: list[KerasTensor], outputs: list[KerasTensor]) -> list[KerasTensor]:
    """Return the shared tensors that operations read, such as weights.

    Raises `NotKnown` if a tensor depends on the entire batch, or an output depends on no example.
    """
    shared: dict[int, KerasTensor] = {}
    follows = dict.fromkeys(map(id, ones), True)

    def visit(x: KerasTensor) -> bool:
        if id(x) not in follows:
            layer, index, _ = x._keras_history
            read = layer.inbound_nodes[index].keras_inputs
            if not read and None in x.shape:
                raise NotKnown
            of_examples = [visit(y) for y in read]
            follows[id(x)] = any(of_examples)
            if follows[id(x)]:
                shared.update((id(y), y) for y in read if not visit(y))
        return follows[id(x)]

    if not all(map(visit, outputs)):
        raise NotKnown
    return list(shared.values())


def _apply_to_all(call: Call, known: Mapping[Value, Any], mapped: set[Value]) -> list[Any]:
    """Apply `call`, which was traced with one example, to all examples. Return the outputs.

    `known` maps the inputs of `call` to tensors. If an input is in `mapped`, it maps to a batch.
    """
    if not is_operation(call.layer) or any(None in x.shape for x in flatten_values(call.outputs)):
        raise NotKnown
    kind = get_kind(call)
    if kind == "shape":
        return [np.array(call.inputs[0].shape, call.output.dtype)]
    args, kwargs = map_values(known.__getitem__, (call.args, dict(call.kwargs)))
    function = call.layer.function
    if mapped.isdisjoint(call.inputs):
        results = tf.nest.flatten(function(*args, **kwargs))
        return [x if is_symbolic(x) else np.asarray(x) for x in results]
    name = kind.rpartition(".")[2]  # "compat.v1.add" becomes "add".
    if name in _ALIGNED:
        rank = len(call.output.shape)
        aligned = {v: _align(known[v], rank) if v in mapped else known[v] for v in call.inputs}
        args, kwargs = map_values(aligned.__getitem__, (call.args, dict(call.kwargs)))
        return [function(*args, **kwargs)]
    are_shared = [v for v in call.inputs if is_symbolic(known[v]) and v not in mapped]
    if are_shared and (name not in _CONVOLUTIONS or call.inputs[0] in are_shared):
        raise NotKnown
    x = next(known[value] for value in call.inputs if value in mapped)
    if name in _RESHAPES:
        return [tf.reshape(x, [-1, *call.output.shape])]
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    if name in _HANDLERS:
        return [_HANDLERS[name](call, x, given)]
    if name not in _DEFAULT_AXES or not mapped.issuperset(call.inputs):
        raise NotKnown
    axis, default = given.get("axis"), _DEFAULT_AXES[name]
    if axis is None:
        axis = [*range(len(x.shape) - 1)] if default is None else default
    given["axis"] = _shift_axes(axis) if isinstance(axis, (list, tuple)) else _shift_axes([axis])[0]
    return tf.nest.flatten(function(**given))


def _slice(call: Call, x: KerasTensor, given: Mapping[str, Any]) -> KerasTensor:
    if len(call.inputs) != 1:
        raise NotKnown
    key = given["slice_spec"]
    items = list(map(_as_slice, key if isinstance(key, tuple) else (key,)))
    backwards = [item for item in items if isinstance(item, slice) and (item.step or 1) < 0]
    shape = tf.TensorShape(call.output.shape)
    if shape.num_elements() == x.shape[1:].num_elements() and not backwards:
        return tf.reshape(x, [-1, *shape])
    return x[(slice(None), *items)]


def _gather(call: Call, x: KerasTensor, given: Mapping[str, Any]) -> KerasTensor:
    if not is_symbolic(given["params"]):
        raise NotKnown
    axis, rows = given.get("axis"), given.get("batch_dims") or 0
    (axis,) = _shift_axes([rows if axis is None else axis])
    rows += is_symbolic(given["indices"])
    return tf.gather(given["params"], given["indices"], axis=axis, batch_dims=rows)


def _transpose(call: Call, x: KerasTensor, given: Mapping[str, Any]) -> KerasTensor:
    perm = given.get("perm")
    axes = range(len(call.output.shape))[::-1] if perm is None else perm
    return tf.transpose(x, [0, *_shift_axes(axes)])


def _convolve(call: Call, x: KerasTensor, given: Mapping[str, Any]) -> KerasTensor:
    """Convolve each example, which is a list of images. Each example may have its own kernel."""
    options = dict(given)
    x = options.pop("input")
    if len(x.shape) != 5 or str(options.get("data_format") or "NHWC") != "NHWC":
        raise NotKnown
    (_, count, *sizes), flat = x.shape, tf.reshape(x, [-1, *x.shape[2:]])
    kernels = options["filters" if "filters" in options else "filter"]
    if not is_symbolic(kernels) or len(kernels.shape) == 4:  # One kernel for all examples.
        y = call.layer.function(flat, **options)
        return tf.reshape(y, [-1, count, *y.shape[1:]])
    (height, width, channels, last), padding = kernels.shape[1:], options.get("padding", "VALID")
    if count != 1 or channels != sizes[-1] or not isinstance(padding, str):
        raise NotKnown
    steps, rates = (_expand_option(options.get(option) or 1) for option in ("strides", "dilations"))
    patches = tf.image.extract_patches(flat, [1, height, width, 1], steps, rates, padding.upper())
    _, *counts, values = patches.shape
    if get_kind(call) == "conv2d":
        patches = tf.reshape(patches, [-1, math.prod(counts), values])
        y = tf.matmul(patches, tf.reshape(kernels, [-1, values, last]))
    else:
        patches = tf.reshape(patches, [-1, math.prod(counts), height * width, channels])
        kernels = tf.reshape(kernels, [-1, height * width, channels, last])
        y = tf.einsum("bpkc,bkcm->bpcm", patches, kernels)
        last = channels * last
    return tf.reshape(y, [-1, 1, *counts, last])


def _expand_option(option: object) -> list[int]:
    """Convert strides or dilations to the four integers that `tf.image.extract_patches` needs."""
    sizes = tf.nest.flatten(option)
    return sizes if len(sizes) == 4 else [1, *(sizes * 2)[:2], 1]


def _shift_axes(axes: Iterable[int]) -> list[int]:
    return [int(axis) + (axis >= 0) for axis in axes]


def _align(x: KerasTensor, rank: int) -> KerasTensor:
    """Insert axes of size 1 after the batch axis, until `x` has `rank + 1` axes."""
    missing = rank + 1 - len(x.shape)
    return tf.reshape(x, [-1, *([1] * missing), *x.shape[1:]]) if missing else x


def _as_slice(item: Any) -> Any:
    """Convert a dictionary, which Keras stores for a slice, back to a slice."""
    return slice(item["start"], item["stop"], item["step"]) if isinstance(item, dict) else item


_HANDLERS: dict[str, Callable[[Call, KerasTensor, Mapping[str, Any]], KerasTensor]] = {
    "getitem": _slice,
    "gather": _gather,
    "transpose": _transpose,
    **dict.fromkeys(_CONVOLUTIONS, _convolve),
}
"""Maps an operation to a function `(call, x, arguments) -> output`. `x` is a batch."""

_ALIGNED = {
    *("matmul", "abs", "add", "subtract", "multiply", "divide", "divide_no_nan", "negative"),
    *("square", "squared_difference", "sqrt", "rsqrt", "exp", "expm1", "log", "log1p", "sin"),
    *("cos", "tanh", "sigmoid", "pow", "softplus", "relu", "relu6", "leaky_relu", "elu", "selu"),
    *("gelu", "silu", "floor", "ceil", "round", "sign", "minimum", "maximum", "cast"),
    *("clip_by_value", "floor_div", "floormod", "equal", "not_equal", "greater"),
    *("greater_equal", "less", "less_equal", "logical_and", "logical_or", "logical_not"),
    *("where", "zeros_like", "ones_like", "identity", "stop_gradient", "reciprocal"),
}
"""Operations that broadcast. `_align` first inserts axes, because the batch must stay first."""


_RESHAPES = {"reshape", "expand_dims", "squeeze"}

_DEFAULT_AXES: dict[str, int | None] = {
    **dict.fromkeys(("reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "reduce_prod")),
    **dict.fromkeys(("reduce_std", "reduce_variance", "reduce_any", "reduce_all", "norm")),
    **dict.fromkeys(("l2_normalize", "reverse")),
    **dict.fromkeys(("stack", "concat", "unstack", "split", "cumsum", "argmax", "argmin"), 0),
    **dict.fromkeys(("softmax", "log_softmax", "sort"), -1),
}
"""Maps operations to the default of their argument `axis`. None means all axes."""
