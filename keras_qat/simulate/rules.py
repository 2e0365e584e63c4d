"""What each kind of layer without a kernel computes in codes: a table."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.integer_kernels.inputs import axis_of
from keras_qat.integer_kernels.int16 import INT16_KERNELS, OPTIMIZED
from keras_qat.keras2.backend import keras
from keras_qat.keras2.graph import Call, takes_training
from keras_qat.kinds import ROUNDING, ceiling_of
from keras_qat.operations import argument, is_operation
from keras_qat.simulate import elementwise, pooling
from keras_qat.simulate.arithmetic import requantize
from keras_qat.simulate.codes import HIGH, LOW, Codes, Grid, round_away
from keras_qat.simulate.softmax import softmax

__all__ = ["INT16_RULES", "RULES", "Pending", "Rule", "limit_of"]


@dataclasses.dataclass(frozen=True, eq=False)
class Pending:
    """The result of a kernel whose output's grid is not known yet.

    Args:
        compute: codes of a grid, not yet clipped.
        low, high: real numbers that the kernel clips at: a ReLU that is merged into it.
    """

    compute: Callable[[Grid], np.ndarray]
    low: float = -np.inf
    high: float = np.inf

    def clipped(self, low: float, high: float) -> Pending:
        """With an activation merged into the kernel."""
        return Pending(self.compute, max(self.low, low), min(self.high, high))

    def on(self, grid: Grid) -> Codes:
        """The codes."""
        low, high = grid.code_of(self.low), min(grid.code_of(self.high), grid.highest)
        return Codes(np.clip(self.compute(grid), low, high).astype(grid.limits.dtype), grid)


def limit_of(activation: Any) -> float:
    """Where a ReLU in front of a quantizer clips: at 6 if it is a ReLU6, else nowhere.

    With another maximum it is an ordinary ReLU in the file, as its quantizer clips there too.
    """
    return 6.0 if ceiling_of(activation) == 6 else np.inf


Rule = Callable[[str, Call, Any, dict[str, Any]], Any]
"""From the family of kernels, a call, and its arguments with `Codes` to `Codes` or `Pending`."""


def _operands(args: Any, kwargs: dict[str, Any], grid: Grid | None = None) -> list[Codes]:
    """The tensors among a call's arguments; numbers as constants in codes, of `grid` if given."""
    return [
        each if isinstance(each, Codes) else _constant(np.asarray(each, np.float32), grid)
        for each in tf.nest.flatten((args, kwargs))
        if each is not None and not isinstance(each, (str, bool))
    ]


def _constant(values: np.ndarray, grid: Grid | None = None) -> Codes:
    """A constant as the converter quantizes it: 256 steps over its values and zero."""
    if grid is None:
        low, high = (float(f(values, initial=0.0)) for f in (np.min, np.max))
        scale = (high - low) / 255 or 1.0
        grid = Grid(np.float32(scale), LOW + int(np.rint(-low / scale)))
    codes = np.clip(round_away(values / grid.scale + np.float32(grid.zero_point)), LOW, HIGH)
    return Codes(codes.astype(np.int8), grid)


def _of_two(kernel: Callable[..., np.ndarray], **options: Any) -> Rule:
    """A kernel of two tensors."""

    def rule(kernels: str, call: Call, args: Any, kwargs: dict[str, Any]) -> Pending:
        a, b = _operands(args, kwargs)
        return Pending(lambda output: kernel(kernels, a, b, output, **options))

    return rule


def _of_one(kernel: Callable[..., np.ndarray], **options: Any) -> Rule:
    """A kernel of one tensor."""

    def rule(kernels: str, call: Call, args: Any, kwargs: dict[str, Any]) -> Pending:
        x = tf.nest.flatten((args, kwargs))[0]
        return Pending(lambda output: kernel(kernels, x, output, **options))

    return rule


def _clip(kernels: str, call: Call, args: Any, kwargs: dict[str, Any]) -> Pending:
    """A ReLU, in an operation of its own or merged into the pooling before it."""
    x = tf.nest.flatten((args, kwargs))[0]
    limit = limit_of(call.layer)
    if isinstance(x, Pending):
        return x.clipped(0.0, limit)
    return Pending(lambda output: elementwise.relu(kernels, x, output), 0.0, limit)


def _move(kernels: str, call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
    """A layer that only moves or selects values: it does so with the steps.

    Padding adds zeros, which are steps like any other.
    """
    leaves = [each for each in tf.nest.flatten((args, kwargs)) if isinstance(each, Codes)]
    grid = leaves[0].grid
    moved = _compute(call, args, kwargs, lambda x: x.steps)
    return tf.nest.map_structure(
        lambda steps: Codes((np.rint(steps) + grid.zero_point).astype(grid.limits.dtype), grid),
        moved,
    )


def _extremum(kernels: str, call: Call, args: Any, kwargs: dict[str, Any]) -> Codes:
    """The larger or smaller one of two tensors, or of a tensor and a constant, on one grid."""
    leaves = [each for each in tf.nest.flatten((args, kwargs)) if isinstance(each, Codes)]
    grid = leaves[0].grid
    operands = _operands(args, kwargs, grid)
    smaller = type(call.layer) is keras.layers.Minimum or "minimum" in _symbol(call)
    choose = np.minimum if smaller else np.maximum
    return Codes(functools.reduce(choose, [each.codes for each in operands]), grid)


def _symbol(call: Call) -> str:
    return str(getattr(call.layer, "symbol", ""))


def _index(kernels: str, call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
    """Integers that follow from a tensor: where its largest code is, or its shape."""
    return _compute(call, args, kwargs, lambda x: x.codes)


def _average(kernels: str, call: Call, args: Any, kwargs: dict[str, Any]) -> Codes:
    grid = tf.nest.flatten((args, kwargs))[0].grid
    averages = _compute(call, args, kwargs, lambda x: x.codes)
    return Codes(pooling.average(averages).astype(np.int8), grid)


def _matrix_product(kernels: str, call: Call, args: Any, kwargs: dict[str, Any]) -> Pending:
    """Sums of products of two tensors."""
    a, b = (each for each in tf.nest.flatten((args, kwargs)) if isinstance(each, Codes))
    sums = np.rint(_compute(call, args, kwargs, lambda x: x.steps)).astype(np.int64)

    def compute(output: Grid) -> np.ndarray:
        scale = np.float32 if kernels == "xnnpack" else np.float64
        ratio = scale(a.scale * b.scale) / scale(output.scale)
        return requantize(kernels, sums, ratio) + output.zero_point

    return Pending(compute)


def _mean(kernels: str, call: Call, args: Any, kwargs: dict[str, Any]) -> Pending:
    x = tf.nest.flatten((args, kwargs))[0]
    means = _compute(call, args, kwargs, lambda x: x.codes)
    return Pending(lambda output: pooling.mean(kernels, x, means, output))


def _compute(
    call: Call, args: Any, kwargs: dict[str, Any], numbers: Callable[[Codes], np.ndarray]
) -> Any:
    """The layer itself on whole numbers, in float64: exact, or nearly so if it divides."""
    args, kwargs = tf.nest.map_structure(
        lambda leaf: tf.constant(numbers(leaf), tf.float64) if isinstance(leaf, Codes) else leaf,
        (args, kwargs),
    )
    if takes_training(call.layer):
        kwargs = {**kwargs, "training": False}
    return tf.nest.map_structure(np.asarray, call.layer.call(*args, **kwargs))


def _leaky_relu(kernels: str, call: Call, args: Any, kwargs: dict[str, Any]) -> Pending:
    x = tf.nest.flatten((args, kwargs))[0]
    layer = call.layer
    if is_operation(layer):
        slope = argument(call, "alpha", 1, 0.2)
    elif hasattr(layer, "negative_slope"):
        slope = layer.negative_slope
    else:
        slope = layer.alpha if hasattr(layer, "alpha") else 0.2  # tf.nn.leaky_relu's own.
    slope = float(slope)
    return Pending(lambda output: elementwise.leaky_relu(kernels, x, output, slope))


def _prelu(kernels: str, call: Call, args: Any, kwargs: dict[str, Any]) -> Pending:
    x = args[0]
    values = call.layer.alpha.numpy()
    scale = np.abs(values).max().astype(np.float64) / HIGH or 1.0
    alpha = Codes(round_away(values / scale).astype(np.int8), Grid(np.float32(scale), 0))
    return Pending(lambda output: elementwise.prelu(kernels, x, alpha, output))


def _gelu(kernels: str, call: Call, args: Any, kwargs: dict[str, Any]) -> Pending:
    approximate = argument(call, "approximate", 1, False)
    function = elementwise.gelu_approximate if approximate else elementwise.gelu
    return _of_one(elementwise.table, function=function)("reference", call, args, kwargs)


def _unit_norm(kernels: str, call: Call, args: Any, kwargs: dict[str, Any]) -> Pending:
    x = tf.nest.flatten((args, kwargs))[0]
    return Pending(lambda output: elementwise.unit_norm(x))


def _softmax(kernels: str, call: Call, args: Any, kwargs: dict[str, Any]) -> Pending:
    x = tf.nest.flatten((args, kwargs))[0]
    axis = axis_of(call)
    last = Codes(np.moveaxis(x.codes, axis, -1), x.grid)
    return Pending(lambda output: np.moveaxis(softmax(kernels, last, output), -1, axis))


def _resize(kernels: str, call: Call, args: Any, kwargs: dict[str, Any]) -> Codes:
    x = args[0]
    if isinstance(call.layer, keras.layers.Resizing):
        sizes = call.layer.height, call.layer.width
    else:
        sizes = tuple(s * f for s, f in zip(x.codes.shape[1:3], call.layer.size, strict=True))
    return Codes(pooling.resize(kernels, x, *sizes).astype(np.int8), x.grid)


def _in_int16(kind: str) -> Rule:
    """An int16 kernel; XNNPACK has none, so that TFLite's optimized ones stand in for its."""

    def rule(kernels: str, call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
        leaves = [each for each in tf.nest.flatten((args, kwargs)) if isinstance(each, Codes)]
        codes = [tf.constant(each.codes, tf.int64) for each in leaves]
        steps = [tf.constant(each.scale, tf.float64) for each in leaves]

        def compute(output: Grid) -> np.ndarray:
            step = tf.constant(output.scale, tf.float64)
            result = np.asarray(INT16_KERNELS[kind](call, codes, steps, step))
            if kernels != "xnnpack" or kind not in OPTIMIZED or _is_broadcast(call):
                return result
            fast = np.asarray(OPTIMIZED[kind](call, codes, steps, step))
            blocks = np.arange(result.size).reshape(result.shape) < result.size // 16 * 16
            return np.where(blocks, fast, result)

        result = Pending(compute)
        return result.on(leaves[0].grid) if kind in ROUNDING else result

    return rule


def _is_broadcast(call: Call) -> bool:
    """Whether the tensors that a call computes with differ in their shapes."""
    return len(call.inputs) < 2 or len({value.shape for value in call.inputs}) > 1


INT16_RULES: dict[str, Rule] = {kind: _in_int16(kind) for kind in INT16_KERNELS}
"""The same as `RULES` for int16 tensors, where that is something else."""

RULES: dict[str, Rule] = {
    "move": _move,
    "linear": _move,
    "index": _index,
    "maximum": _extremum,
    "concatenate": _move,
    "average_pooling": _average,
    "product": _matrix_product,
    "mean": _mean,
    "resize": _resize,
    "add": _of_two(elementwise.add),
    "subtract": _of_two(elementwise.add, sign=-1),
    "multiply": _of_two(elementwise.product),
    "relu": _clip,
    "relu6": _clip,
    "relu_n": _clip,
    "leaky_relu": _leaky_relu,
    "prelu": _prelu,
    "hard_swish": _of_one(elementwise.hard_swish),
    "sigmoid": _of_one(elementwise.table, function=elementwise.sigmoid),
    "tanh": _of_one(elementwise.table, function=elementwise.tanh),
    "gelu": _gelu,
    "elu": _of_one(elementwise.table, function=elementwise.elu),
    "unit_norm": _unit_norm,
    "softmax": _softmax,
}
"""Kind of a call, as in `kinds.kind_of` -> what computes it. Tensors to concatenate are brought
to one grid first, by `walk`."""
