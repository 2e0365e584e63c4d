"""Makes layers that do not train of constants that tensors are multiplied by, or chosen from."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Value
from keras_qat.graph.operations import get_operands, read_array
from keras_qat.helper_layers.operations import WeightTensor
from keras_qat.keras2.backend import layers
from keras_qat.lowering.builder import LoweringContext, PartsBuilder, replace_by
from keras_qat.ops.slicing import GATHER_ARGUMENTS

_FLAGS = ("transpose_a", "transpose_b", "adjoint_a", "adjoint_b")


def split_product(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers tf.matmul of a tensor and a constant matrix to Dense."""
    x, constant, *flags = get_operands(call, "a", "b", *_FLAGS)
    turns_x, turns_matrix = flags[0] or flags[2], flags[1] or flags[3]
    matrix = read_array(constant)
    if not isinstance(x, Value) or matrix is None or matrix.ndim != 2 or turns_x:
        return []
    matrix = (matrix.T if turns_matrix else matrix).astype(np.float32)
    if len(x.shape) < 2 or x.shape[-1] != len(matrix):
        return []
    weights = [tf.Variable(matrix, trainable=False)]
    options = {"use_bias": False, "trainable": False, "weights": weights}
    return replace_by(call, context, layers.Dense, matrix.shape[1], inputs=x, **options)


def with_constant_weight(call: Call, context: LoweringContext) -> list[Call]:
    """Makes a tensor of weights that do not train of a constant with several matrices.

    A product of a tensor and such a constant, one matrix for each entry of other axes, is then one
    of two tensors.
    """
    arguments = [*call.args, *call.kwargs.values()]
    constants = [leaf for leaf in arguments if getattr(read_array(leaf), "ndim", 0) > 2]
    if len(call.inputs) != 1 or not call.inputs[0].is_float or len(constants) != 1:
        return []
    matrices = np.asarray(constants[0], np.float32)
    parts, weights = PartsBuilder(call, context), [tf.Variable(matrices, trainable=False)]
    options = {"frozen": [0], "trainable": False, "weights": weights}
    layer = parts.new("constant", WeightTensor, [matrices.shape], **options)
    tensor = parts.add(layer, call.inputs[0], shape=matrices.shape)
    args = [tensor if leaf is constants[0] else leaf for leaf in call.args]
    kwargs = {n: tensor if leaf is constants[0] else leaf for n, leaf in call.kwargs.items()}
    return parts.end(call.layer, *args, kwargs=kwargs)


def split_constant_table(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers tf.gather of a constant's rows, by a tensor of their numbers, to an Embedding."""
    table, indices, *options = get_operands(call, *GATHER_ARGUMENTS)
    table, shape = read_array(table), call.output.shape[1:]
    if table is None or not table.ndim or any(options) or not call.output.is_float:
        return []
    if not isinstance(indices, Value) or not indices.shape or None in shape:
        return []
    rows = table.reshape(len(table), -1).astype(np.float32)
    weights = [tf.Variable(rows, trainable=False)]
    parts = PartsBuilder(call, context)
    name = "" if table.ndim == 2 else "rows"
    embedding = parts.new(
        name, layers.Embedding, *rows.shape, trainable=False, weights=weights, dtype="float32"
    )
    if table.ndim == 2:
        return parts.end(embedding, indices)
    entries = parts.add(embedding, indices, shape=(*indices.shape, rows.shape[1]))
    return parts.end(parts.new("", type(call.layer), tf.reshape), entries, [-1, *shape])
