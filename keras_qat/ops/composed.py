"""Operators that are composed of other operators, such as a division by a lookup and a product.

A `Description` is a function that runs other operators on a `Machine`. A machine prepares, computes
or emits operators. One description therefore defines `prepare`, `compute` and `emit` of an `Op`.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.plain_operations import gather, product, quotient
from keras_qat.arithmetic.quant_params import QuantParams, single
from keras_qat.ops.emission import Emission, Shape
from keras_qat.ops.node import Node, Tensor
from keras_qat.ops.op import Arguments, Attributes, Op, get_held_dtype
from keras_qat.ops.requantize import REQUANTIZE
from keras_qat.ops.weighted_sums import RECENT
from keras_qat.ops.weights import Weights

Quantized = tuple[Any, QuantParams]
"""A pair (values, quantization parameters). The values are integers minus the zero point. For
`Emitting`, the index of a tensor in the file replaces the values.
"""

WIDE = QuantParams(None, None, 16)
"""16-bit parameters for `Computing`, which needs no scale. Its multipliers are prepared."""

NO_WIDE = None if RECENT else "this TensorFlow has no QUANTIZE from int8 to int16"
"""Why files cannot contain a QUANTIZE from int8 to int16. None if they can."""

MOST = float(WIDE.highest)


def wide_params(scale: tf.Tensor) -> QuantParams:
    """Returns 16-bit quantization parameters with this scale and the zero point 0, as tensors."""
    return QuantParams(single(scale), tf.zeros([], tf.float64), 16)


def integer_params(bits: int) -> QuantParams:
    """Returns quantization parameters with the scale 1, for plain integers of 16 or 32 bits."""
    return QuantParams(np.float32(1), 0, bits)


INTEGERS = integer_params(32)


def _make_integer_row(code: str, function: Callable[[Any, Any], Any]) -> Op:
    return Op(code.lower(), lambda a: function(*a.q), lambda e: e.add(code))


# Kernels for 32-bit integers neither rescale nor round. They are as fast as float kernels in all
# runtimes, unlike 16-bit kernels.
SUM = _make_integer_row("ADD", lambda x, y: x + y)
PRODUCT = _make_integer_row("MUL", product)
LARGER = _make_integer_row("MAXIMUM", tf.maximum)
SMALLER = _make_integer_row("MINIMUM", tf.minimum)


def compute_wide_scale(output: QuantParams) -> tf.Tensor:
    """Returns the smallest 16-bit scale that represents the range of an 8-bit output."""
    ends = [tf.abs(end - output.zero_point) for end in (output.lowest, output.highest)]
    return quotient(tf.maximum(*ends) * output.scale, MOST)


@dataclasses.dataclass(frozen=True)
class _Step:
    op: Op
    inputs: list[Quantized]
    params: QuantParams
    attributes: Attributes
    weights: Weights | None
    maximum: float | None
    shape: Shape | None

    def make_arguments(self, a: Arguments, **fields: Any) -> Arguments:
        fields = {"params": [params for _, params in self.inputs], "output": self.params, **fields}
        return dataclasses.replace(
            a,
            q=[q for q, _ in self.inputs],
            attributes=self.attributes,
            merges_relu=self.maximum is not None,
            **fields,
        )


class Machine(abc.ABC):
    """Runs operators on `Quantized` values. Subclasses prepare, compute or emit the operators."""

    def run(
        self,
        op: Op,
        inputs: list[Quantized],
        params: QuantParams,
        *,
        attributes: Attributes | None = None,
        weights: Weights | None = None,
        maximum: float | None = None,
        shape: Shape | None = None,
    ) -> Quantized:
        """Runs an operator, and returns its output.

        Args:
            op: the operator.
            inputs: the operator's inputs.
            params: the quantization parameters of the output.
            attributes: the operator's attributes. The default is `op.defaults`.
            weights: the weights, if the operator has any, like a convolution.
            maximum: the maximum of a fused ReLU.
            shape: the output's shape. By default, the shape of the last input.
        """
        chosen = op.defaults if attributes is None else attributes
        return self._run(_Step(op, inputs, params, chosen, weights, maximum, shape))

    @abc.abstractmethod
    def _run(self, step: _Step) -> Quantized: ...

    @abc.abstractmethod
    def constant(self, name: str, q: Any, params: QuantParams) -> Quantized: ...

    @abc.abstractmethod
    def split(self, x: Quantized, count: int) -> list[Quantized]:
        """Splits the channels of `x` into `count` equal blocks."""

    @abc.abstractmethod
    def widen(self, x: Quantized) -> Quantized:
        """Converts int8 values with the zero point 0 to int16 values with the same scale."""

    @abc.abstractmethod
    def reinterpret(self, x: Quantized, params: QuantParams) -> Quantized:
        """Casts the stored integers, such as -128 to 127, to plain integers of 16 or 32 bits."""

    @abc.abstractmethod
    def reshape(self, x: Quantized, shape: Shape) -> Quantized:
        """Reshapes values. Only the first size of `shape` may be None."""

    @abc.abstractmethod
    def look_up(self, table: Any, params: QuantParams, x: Quantized) -> Quantized:
        """Returns `table[x]`. The results have the zero point 0.

        If `x` has 8 bits, the first entry of the table is for the lowest value, such as -128.
        Otherwise, the first entry is for 0.
        """


class Preparing(Machine):
    """Computes constants of operators, such as multipliers. Inputs are `tf.TensorSpec`s.

    Args:
        a: the arguments of the composed operator.
        prepared: a list. The machine appends one entry for each operator.
    """

    def __init__(self, a: Arguments, prepared: list[Any]) -> None:
        self.a, self.prepared = a, prepared

    def _run(self, step: _Step) -> Quantized:
        inputs, output = [x.as_tensors() for _, x in step.inputs], step.params.as_tensors()
        arguments = step.make_arguments(self.a, params=inputs, output=output, weights=step.weights)
        dtype, ends = get_held_dtype(step.params), None
        if step.params.bits < 32:  # Results of 32 bits are not clipped.
            low, high = (end - output.zero_point for end in (output.lowest, output.highest))
            low = low if step.maximum is None else tf.maximum(low, 0.0)
            ends = tf.cast(low, dtype), tf.cast(high, dtype)
        self.prepared.append((step.op.prepare_arguments(arguments).prepared, ends))
        shape = step.inputs[-1][0].shape if step.shape is None else step.shape
        if step.weights is not None:
            shape = [*shape[:-1], step.weights.q.shape[-1]]
        return tf.TensorSpec(shape, dtype), step.params

    def constant(self, name: str, q: Any, params: QuantParams) -> Quantized:
        dtype, zero_point = get_held_dtype(params), params.as_tensors().zero_point
        self.prepared.append(tf.cast(tf.cast(q, tf.float64) - zero_point, dtype))
        return tf.TensorSpec(self.prepared[-1].shape, dtype), params

    def split(self, x: Quantized, count: int) -> list[Quantized]:
        spec, params = x
        shape = [*spec.shape[:-1], spec.shape[-1] // count]
        return [(tf.TensorSpec(shape, spec.dtype), params)] * count

    def widen(self, x: Quantized) -> Quantized:
        params = dataclasses.replace(x[1], bits=16)
        return tf.TensorSpec(x[0].shape, get_held_dtype(params)), params

    def reinterpret(self, x: Quantized, params: QuantParams) -> Quantized:
        dtype, zero_point = get_held_dtype(params), x[1].as_tensors().zero_point
        self.prepared.append(None if x[1].bits > 8 else tf.cast(zero_point, dtype))
        return tf.TensorSpec(x[0].shape, dtype), params

    def reshape(self, x: Quantized, shape: Shape) -> Quantized:
        return tf.TensorSpec(shape, x[0].dtype), x[1]

    def look_up(self, table: Any, params: QuantParams, x: Quantized) -> Quantized:
        first = None
        if x[1].bits <= 8:
            known = x[1].as_tensors()
            first = tf.cast(known.zero_point - known.lowest, get_held_dtype(x[1]))
        self.prepared.append((table, first))
        return tf.TensorSpec(x[0].shape, table.dtype), params


class Computing(Machine):
    """Computes operators with the rounding of a kernel family.

    Args:
        a: the arguments of the composed operator.
        prepared: the entries that `Preparing` appended for the same operators.
    """

    def __init__(self, a: Arguments, prepared: Iterable[Any]) -> None:
        self.a, self.prepared = a, iter(prepared)

    def _run(self, step: _Step) -> Quantized:
        prepared, ends = next(self.prepared)
        result = step.op.compute(step.make_arguments(self.a, prepared=prepared))
        q = tf.cast(result, get_held_dtype(step.params))
        if ends is not None:
            low, high = ends
            q = tf.minimum(tf.maximum(q, low), high)
        return q, step.params

    def constant(self, name: str, q: Any, params: QuantParams) -> Quantized:
        return next(self.prepared), params

    def split(self, x: Quantized, count: int) -> list[Quantized]:
        return [(q, x[1]) for q in tf.split(x[0], count, -1)]

    def widen(self, x: Quantized) -> Quantized:
        params = dataclasses.replace(x[1], bits=16)
        return tf.cast(x[0], get_held_dtype(params)), params

    def reinterpret(self, x: Quantized, params: QuantParams) -> Quantized:
        q, zero_point = tf.cast(x[0], get_held_dtype(params)), next(self.prepared)
        return q if zero_point is None else q + zero_point, params

    def reshape(self, x: Quantized, shape: Shape) -> Quantized:
        return tf.reshape(x[0], [-1, *shape[1:]]), x[1]

    def look_up(self, table: Any, params: QuantParams, x: Quantized) -> Quantized:
        table, first = next(self.prepared)
        q = x[0] if first is None else x[0] + first
        return gather(table, tf.cast(q, tf.int32)), params


class Emitting(Machine):
    """Adds operators to a file.

    Args:
        e: the `Emission` of the composed operator.
        image: height and width of convolution outputs. By default, those of the input.
    """

    def __init__(self, e: Emission, image: Shape = ()) -> None:
        self.e, self.image = e, image
        self.counter = itertools.count(1)

    def _run(self, step: _Step) -> Quantized:
        e, count, params = self.e, next(self.counter), _as_numbers(step.params)
        name, shape = f"{e.node.name}/{count}", step.shape or e.shape(step.inputs[-1][0])
        if step.weights is not None:
            shape = shape[0], *(self.image or shape[1:-1]), step.weights.q.shape[-1]
        target = self._add_temporary(str(count), shape, params)

        def make_tensor(label: str, index: int, params: QuantParams) -> Tensor:
            return Tensor(f"{name}/{label}", e.shape(index), "float32", params)

        sources = tuple(make_tensor(str(index), *x) for index, x in enumerate(step.inputs))
        outputs, call = (make_tensor("output", target, params),), e.node.call
        more = step.weights, step.maximum
        node = Node(name, step.op, step.attributes, call, sources, outputs, *more)
        step.op.emit(Emission(e.builder, node, [index for index, _ in step.inputs], [target]))
        return target, params

    def constant(self, name: str, q: Any, params: QuantParams) -> Quantized:
        params = _as_numbers(params)
        in_file = None if params == INTEGERS else params
        return self.e.constant(name, np.asarray(q).astype(params.dtype), in_file), params

    def split(self, x: Quantized, count: int) -> list[Quantized]:
        (index, params), e, number = x, self.e, next(self.counter)
        *sizes, channels = e.shape(index)
        assert channels is not None
        shape = (*sizes, channels // count)
        targets = [e.temporary(f"{number}/{block}", shape, index) for block in range(count)]
        e.add("SPLIT", [e.constant("axis", len(sizes)), index], targets, numSplits=count)
        return [(target, params) for target in targets]

    def widen(self, x: Quantized) -> Quantized:
        return self._cast(x, "wide", dataclasses.replace(x[1], bits=16))

    def reinterpret(self, x: Quantized, params: QuantParams) -> Quantized:
        return self._cast(x, "codes", _as_numbers(params))

    def _cast(self, x: Quantized, name: str, params: QuantParams) -> Quantized:
        name = f"{next(self.counter)}/{name}"
        target = self._add_temporary(name, self.e.shape(x[0]), params)
        self.e.cast(x[0], target)
        return target, params

    def reshape(self, x: Quantized, shape: Shape) -> Quantized:
        return self.e.make_reshaped(x[0], shape, f"{next(self.counter)}/reshaped"), x[1]

    def _add_temporary(self, name: str, shape: Shape, params: QuantParams) -> int:
        return self.e.temporary(name, shape, "int32" if params == INTEGERS else params)

    def look_up(self, table: Any, params: QuantParams, x: Quantized) -> Quantized:
        e, number, params = self.e, next(self.counter), _as_numbers(params)
        indices, _ = x if x[1].bits == 32 else self.reinterpret(x, INTEGERS)
        target = e.temporary(str(number), e.shape(x[0]), params)
        if x[1].bits <= 8:  # Indices of a table begin at 0.
            half, quantized = e.constant("half", -x[1].lowest), indices
            indices = e.temporary(f"{number}/positions", e.shape(x[0]), "int32")
            e.add("ADD", [quantized, half], [indices])
        values = e.constant("table", np.asarray(table).astype(params.dtype), params)
        e.add("GATHER", [values, indices], [target], axis=0)
        return target, params


def _as_numbers(params: QuantParams) -> QuantParams:
    if not tf.is_tensor(params.scale):
        return params
    return QuantParams(np.float32(params.scale), int(params.zero_point), params.bits)


Description = Callable[[Machine, list[Quantized], QuantParams, Attributes, Shape], Quantized]
"""A function that runs the operators of a composed operator on a machine, and returns the result.

The arguments are the machine, the inputs, the output's parameters, the attributes and the output's
shape. `Computing` reads prepared constants, so the shape is () and the output's scale may be None.
`compose` converts the result to the output's parameters.
"""


def get_inputs(a: Arguments) -> list[Quantized]:
    return list(zip(a.q, a.params, strict=True))


def requantize_each(
    m: Machine, inputs: Sequence[Quantized], params: QuantParams
) -> list[tf.Tensor | int]:
    """Converts each input to the scale and zero point of `params`, and returns the new values."""
    return [m.run(REQUANTIZE, [x], params)[0] for x in inputs]


def prepare_each(a: Arguments, inputs: Sequence[Quantized], params: QuantParams) -> list[tf.Tensor]:
    """Returns the constants that a `Computing` needs for `requantize_each`."""
    prepared: list[Any] = []
    requantize_each(Preparing(a, prepared), inputs, params)
    return prepared


def compose(describe: Description) -> dict[str, Any]:
    """Returns the arguments `prepare`, `compute` and `emit` for an `Op` that runs a description."""

    def prepare(a: Arguments) -> list[Any]:
        prepared: list[Any] = []
        shape = tuple(functools.reduce(tf.broadcast_static_shape, (q.shape for q in a.q)))
        m = Preparing(a, prepared)
        result = describe(m, get_inputs(a), a.output, a.attributes, shape)
        m.run(REQUANTIZE, [result], a.output)
        return prepared

    def compute(a: Arguments) -> tf.Tensor:
        m = Computing(a, a.prepared)
        result = describe(m, get_inputs(a), a.output, a.attributes, ())
        return m.run(REQUANTIZE, [result], a.output)[0]

    def emit(e: Emission) -> None:
        inputs = list(zip(e.inputs, e.all_params, strict=True))
        shape = e.shape(e.outputs[0])
        result, _ = describe(Emitting(e), inputs, e.params, e.attributes, shape)
        e.add("QUANTIZE", [result])

    return {"prepare": prepare, "compute": compute, "emit": emit}
