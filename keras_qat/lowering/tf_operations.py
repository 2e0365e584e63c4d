"""Lowers TensorFlow operations on symbolic tensors."""

from __future__ import annotations

from functools import partial

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Value, values_in
from keras_qat.graph.operations import kind_of
from keras_qat.graph.size_expressions import BATCH, computed_sizes
from keras_qat.graph.tf_operations import array, number, operands
from keras_qat.helper_layers.finite_functions import (
    Logarithm,
    Power,
    Quotient,
    Reciprocal,
    SquareRoot,
)
from keras_qat.helper_layers.operations import Roll
from keras_qat.keras2.backend import layers
from keras_qat.lowering.activations import split_swish
from keras_qat.lowering.attention import split_einsum
from keras_qat.lowering.builder import Lowering, LoweringContext, PartsBuilder, replace_by
from keras_qat.lowering.constant_products import (
    split_constant_einsum,
    split_constant_table,
    split_cumulative_sum,
    split_linear_resize,
    split_product,
    with_constant_weight,
)
from keras_qat.lowering.copies import COPIES, split_copies, split_eye, split_filled
from keras_qat.lowering.expand_call import expand
from keras_qat.lowering.expansions.gathering import GATHERING
from keras_qat.lowering.expansions.statistics import STATISTICS
from keras_qat.lowering.image_ops import (
    split_converted,
    split_old_resize,
    split_patches,
    split_resize,
)
from keras_qat.lowering.many_axes import split_many_axes, split_reversed_sizes
from keras_qat.lowering.merges import (
    LIMITS,
    convert_fixed_ranges,
    convert_second_factor,
    rounded_to_grid,
    split_limit,
    stack_lists,
)
from keras_qat.lowering.weighted_products import CONVOLUTIONS, split_convolution
from keras_qat.ops.slicing import GATHER_ARGUMENTS, items_for_axes


def _split_silu(call: Call, context: LoweringContext) -> list[Call]:
    (_, beta) = operands(call, "features", "beta")
    return split_swish(call, context) if beta in (None, 1.0) else []


def _split_division(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers x / y to Quotient, 1 / y to Reciprocal, x / number to Rescaling.

    A quotient x / array becomes x * (1 / array).
    """
    x, divisor = operands(call, "x", "y")
    if isinstance(x, Value) and isinstance(divisor, Value):
        return replace_by(call, context, Quotient, inputs=[x, divisor])
    if isinstance(divisor, Value) and (numerator := number(x)) is not None:
        return replace_by(call, context, Reciprocal, numerator)
    divisor = array(divisor)
    if not isinstance(x, Value) or divisor is None or not np.all(divisor):
        return []
    factor = (1.0 / divisor).astype(np.float32)
    if not factor.ndim:
        return replace_by(call, context, layers.Rescaling, float(1.0 / divisor))
    parts = PartsBuilder(call, context)
    return parts.end(parts.new("", type(call.layer), tf.math.multiply), x, factor)


def _swap_constant(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers constant + x to x + constant: Keras saves the former so that it cannot be loaded."""
    x, y = operands(call, "x", "y")
    if isinstance(x, Value) or not isinstance(y, Value):
        return []
    parts = PartsBuilder(call, context)
    return parts.end(parts.new("", type(call.layer), tf.math.add), y, x)


def _split_bias(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers tf.nn.bias_add along the last axis to a sum."""
    x, bias, layout = operands(call, "value", "bias", "data_format")
    if not isinstance(bias, Value):
        bias = array(bias)
        bias = None if bias is None else bias.astype(np.float32)
    if bias is None or (layout or "").startswith("NC"):
        return []
    parts = PartsBuilder(call, context)
    return parts.end(parts.new("", type(call.layer), tf.math.add), x, bias)


def _split_negative(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers -x to Rescaling; to a product for one number an example, which has no channels."""
    (x,) = call.inputs
    if len(x.shape) > 1:
        return replace_by(call, context, layers.Rescaling, -1.0)
    parts = PartsBuilder(call, context)
    return parts.end(parts.new("", type(call.layer), tf.math.multiply), x, -1.0)


def _split_square(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers the square of a tensor to Multiply."""
    x = call.inputs[0]
    return replace_by(call, context, layers.Multiply, inputs=[x, x])


def _split_power(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers x ** 2 and x ** 3 to Multiply, and others that are not defined everywhere to Power."""
    x, exponent = operands(call, "x", "y")
    exponent = number(exponent)
    if not isinstance(x, Value) or exponent is None:
        return []
    if exponent < 0 or exponent != int(exponent):
        return replace_by(call, context, Power, exponent)
    if exponent not in (2, 3):
        return []
    if exponent == 2:
        return _split_square(call, context)
    parts = PartsBuilder(call, context)
    square = parts.add(parts.new("square", layers.Multiply), [x, x], shape=x.shape)
    return parts.end(parts.new("", layers.Multiply), [square, x])


def _split_getitem(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers x[..., a] to x[:, :, a], as no configuration holds an Ellipsis."""
    if len(call.args) != 2:  # A loaded model: it has no Ellipsis.
        return []
    x, key = call.args
    if sum(item is Ellipsis for item in tf.nest.flatten(key)) != 1:
        return []
    items = items_for_axes(key, len(x.shape))
    return PartsBuilder(call, context).end(call.layer, x, tuple(items))


def _split_strided_slice(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers tf.strided_slice of all examples, without gaps, to tf.slice."""
    names = "input_", "begin", "end", "strides", "begin_mask", "end_mask"
    masks = "ellipsis_mask", "new_axis_mask", "shrink_axis_mask"
    x, begin, end, steps, *given = operands(call, *names, *masks)
    if any(isinstance(ends, Value) for ends in (begin, end, steps)):
        return []
    known = (*begin, *end[1:], *(steps or ()))
    if not all(isinstance(leaf, int) for leaf in known) or any(given) or begin[0]:
        return []
    if computed_sizes([end[0]]) != [BATCH] or {*(steps or ())} > {1}:
        return []
    if None in x.shape[1 : len(begin)]:
        return []
    entries = [
        range(size)[low:high]
        for size, low, high in zip(x.shape[1:], begin[1:], end[1:], strict=False)
    ]
    left = [0] * (len(x.shape) - len(begin))
    begins = [0, *(part.start for part in entries), *left]
    sizes = [-1, *map(len, entries), *(-1 for _ in left)]
    parts = PartsBuilder(call, context)
    return parts.end(parts.new("", type(call.layer), tf.slice), x, begins, sizes)


def _split_add_n(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers tf.add_n to Add."""
    (tensors,) = operands(call, "inputs")
    if len(call.inputs) != len(tensors):
        return []
    return replace_by(call, context, layers.Add, inputs=list(tensors))


def _split_cast(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers a tf.cast that changes nothing to a linear activation.

    A cast between float32 and half precision changes nothing at inference, which is in float32.
    """
    x, y = call.inputs[0], call.output
    is_nothing = x.dtype == y.dtype or (x.is_float and y.is_float)
    return replace_by(call, context, layers.Activation, "linear") if is_nothing else []


def _split_clip(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers tf.clip_by_value with numbers to ReLU, or to a minimum and a maximum."""
    x, *limits = operands(call, "t", "clip_value_min", "clip_value_max")
    low, high = map(number, limits)
    if low is None or high is None:
        return []
    if low == 0 < high:
        return replace_by(call, context, layers.ReLU, high)
    parts = PartsBuilder(call, context)
    minimum = parts.new("minimum", type(call.layer), tf.math.minimum)
    maximum = parts.new("maximum", type(call.layer), tf.math.maximum)
    return parts.end(maximum, parts.add(minimum, x, high, shape=call.output.shape), low)


def _split_roll(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers tf.roll to Roll, as TFLite has no operator for it."""
    _, shift, axis = operands(call, "input", "shift", "axis")
    shifts, axes = tf.nest.flatten(shift), tf.nest.flatten(axis)
    if not all(isinstance(number, int) for number in [*shifts, *axes]):
        return []
    return replace_by(call, context, Roll, shifts, axes)


def _split_reshape(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers tf.reshape to sizes read with `tf.shape` to a reshape to known numbers."""
    x, shape = operands(call, "tensor", "shape")
    if not values_in(shape):
        return []
    sizes = call.output.shape[1:]
    if None in sizes:
        return []
    return PartsBuilder(call, context).end(call.layer, x, [-1, *sizes])


def _split_normalization(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers tf.math.l2_normalize along an inner axis to one along the last, with transposes."""
    x, axis, epsilon = operands(call, "x", "axis", "epsilon")
    rank, axes = len(x.shape), tf.nest.flatten([axis])
    if len(axes) != 1 or not isinstance(axes[0], int) or axes[0] % rank in (0, rank - 1):
        return []
    order = list(range(rank))
    order[axes[0]], order[-1] = rank - 1, axes[0] % rank
    shape, operation = [x.shape[axis] for axis in order], type(call.layer)
    parts = PartsBuilder(call, context)
    turned = parts.add(parts.new("turned", operation, tf.transpose), x, order, shape=shape)
    options = {"axis": -1} if epsilon is None else {"axis": -1, "epsilon": epsilon}
    normalize = parts.new("normalized", operation, tf.math.l2_normalize)
    normalized = parts.add(normalize, turned, kwargs=options, shape=shape)
    return parts.end(parts.new("", operation, tf.transpose), normalized, order)


def _split_sort(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers tf.sort along the last axis to tf.math.top_k of all values."""
    x, axis, direction = operands(call, "values", "axis", "direction")
    rank, size = len(x.shape), x.shape[-1]
    if axis not in (None, -1, rank - 1) or size is None or rank < 2 or not x.is_float:
        return []
    parts, operation = PartsBuilder(call, context), type(call.layer)
    largest = parts.new("largest", operation, tf.math.top_k)
    output = call.output if direction == "DESCENDING" else parts.between(largest, x.shape)
    where = Value(f"{output.name}_indices", output.shape, "int32")
    parts.add(largest, x, size, output=type(tf.math.top_k([0.0]))(output, where))
    if output is not call.output:
        parts.add(parts.new("", operation, tf.reverse), output, [rank - 1], output=call.output)
    return parts.calls


def _either(*lowerings: Lowering) -> Lowering:
    """Returns a lowering that tries several in order."""

    def lower(call: Call, context: LoweringContext) -> list[Call]:
        return next((parts for lowering in lowerings if (parts := lowering(call, context))), [])

    return lower


def _split_constant(call: Call, context: LoweringContext, number: float) -> list[Call]:
    """Lowers tf.zeros_like and tf.ones_like to a Rescaling."""
    x = call.inputs[0]
    if not x.is_float or not call.output.is_float or len(x.shape) < 2:
        return []
    return replace_by(call, context, layers.Rescaling, 0.0, number)


def _split_product_without_nan(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers tf.math.multiply_no_nan to a product, as quantized values have no NaN."""
    parts = PartsBuilder(call, context)
    return parts.end(parts.new("", type(call.layer), tf.multiply), *operands(call, "x", "y"))


def _split_equality(call: Call, context: LoweringContext) -> list[Call]:
    """Rounds a number that real numbers are compared with for equality to their grid.

    Else none would ever equal it, as with -1.0 where the nearest step is -1.003.
    """
    x, y = operands(call, "x", "y")
    x, y = (x, y) if isinstance(x, Value) else (y, x)
    wanted = number(y)
    if wanted is None or not isinstance(x, Value) or not x.is_float:
        return []
    parts = PartsBuilder(call, context)
    on_grid = rounded_to_grid(parts, x, wanted)
    compare = tf.not_equal if kind_of(call) == "not_equal" else tf.equal
    return parts.end(parts.new("", type(call.layer), compare), x, on_grid)


def _of_floats(lowering: Lowering, call: Call, context: LoweringContext) -> list[Call]:
    """Lowers a call that reads real numbers; integers, complex numbers and truth values stay."""
    is_arithmetic = all(value.is_float for value in [*call.inputs, *values_in(call.outputs)])
    return lowering(call, context) if is_arithmetic else []


ARITHMETIC: dict[str, Lowering] = {
    **{kind: expand(function) for kind, function in STATISTICS.items()},
    "silu": _split_silu,
    "negative": _split_negative,
    "divide": _split_division,
    "bias_add": _split_bias,
    "multiply_no_nan": _split_product_without_nan,
    "add_n": _split_add_n,
    "square": _split_square,
    "log": partial(replace_by, make=Logarithm),
    "log1p": partial(replace_by, make=Logarithm, plus_one=True),
    "reciprocal": partial(replace_by, make=Reciprocal),
    "sqrt": partial(replace_by, make=SquareRoot),
    "rsqrt": partial(replace_by, make=SquareRoot, inverse=True),
    "pow": _split_power,
    # LeakyReLU with the slope -1: every runtime has an operator for it.
    "abs": partial(replace_by, make=layers.LeakyReLU, alpha=-1.0),
    "clip_by_value": _split_clip,
    "l2_normalize": _split_normalization,
    "einsum": _either(split_einsum, split_constant_einsum, with_constant_weight),
    "matmul": _either(stack_lists, split_product, with_constant_weight, convert_second_factor),
    **dict.fromkeys(CONVOLUTIONS, split_convolution),
    "cumsum": split_cumulative_sum,
}
"""Kind of an operation that computes -> its lowering, for real numbers alone."""

OPERATIONS: dict[str, Lowering] = {
    **{kind: partial(_of_floats, lowering) for kind, lowering in ARITHMETIC.items()},
    "add": _swap_constant,
    "getitem": _either(_split_getitem, split_many_axes, split_reversed_sizes),
    "equal": _split_equality,
    "not_equal": _split_equality,
    "strided_slice": _split_strided_slice,
    "conv1d_transpose": split_convolution,  # Reads a shape, too.
    "conv2d_transpose": split_convolution,
    "cast": _split_cast,
    "roll": _split_roll,
    "reshape": _split_reshape,
    "resize": _either(split_resize, split_linear_resize),
    "v1_resize_images": _either(split_old_resize, split_linear_resize),
    **dict.fromkeys(
        (f"v1_resize_{kind}" for kind in ("bilinear", "nearest_neighbor", "bicubic")),
        split_linear_resize,
    ),
    **dict.fromkeys(GATHER_ARGUMENTS, split_constant_table),
    **{kind: expand(function) for kind, function in GATHERING.items()},
    "sort": _split_sort,
    "zeros_like": partial(_split_constant, number=0.0),
    "ones_like": partial(_split_constant, number=1.0),
    **dict.fromkeys(("zeros", "ones", "fill"), split_filled),
    "eye": split_eye,
    "convert_image_dtype": split_converted,
    "extract_patches": split_patches,
    **dict.fromkeys(COPIES, split_copies),
    **dict.fromkeys(("concat", "stack"), convert_fixed_ranges),
    **dict.fromkeys(LIMITS, _either(split_limit, convert_fixed_ranges)),
}
"""Kind of an operation -> its lowering."""
