"""The list of all operators. The first operator that accepts a call computes it."""

from __future__ import annotations

from keras_qat.ops import (
    division,
    elementwise,
    matmul,
    movement,
    pooling,
    relu,
    reshaping,
    resize,
    selection,
    slicing,
    tiling,
)
from keras_qat.ops.activations import ACTIVATIONS
from keras_qat.ops.conv import AFFINE, CONV, DEPTHWISE_CONV, TRANSPOSE_CONV
from keras_qat.ops.dense import DENSE, EINSUM_DENSE, EINSUM_DENSE_HEADS, EINSUM_DENSE_PER_TENSOR
from keras_qat.ops.functions import LOOKUPS, MATH_FUNCTIONS
from keras_qat.ops.mean import MEAN
from keras_qat.ops.normalization import GROUP_NORM, LAYER_NORM
from keras_qat.ops.op import Op
from keras_qat.ops.recurrent.lstm import LSTM
from keras_qat.ops.recurrent.unrolled import (
    CONV_LSTM,
    GRU,
    MASKED_LSTM,
    SIMPLE_RNN,
    SIMPLE_RNN_RELU,
)
from keras_qat.ops.softmax import SOFTMAX, SOFTMAX_OF_MANY, UNIT_NORM
from keras_qat.ops.stored_weights import EMBEDDING, INDICES_OF_REALS, ON_GRID, WEIGHT_TENSOR

ROWS: list[Op] = [
    *(CONV, DEPTHWISE_CONV, TRANSPOSE_CONV, DENSE),
    *(EINSUM_DENSE, EINSUM_DENSE_HEADS, EINSUM_DENSE_PER_TENSOR, EMBEDDING, AFFINE),
    *(LSTM, MASKED_LSTM, GRU, SIMPLE_RNN, SIMPLE_RNN_RELU, CONV_LSTM),
    WEIGHT_TENSOR,
    *(INDICES_OF_REALS, ON_GRID),
    *(elementwise.ADD, elementwise.SUBTRACT, elementwise.MULTIPLY),
    *(elementwise.MAXIMUM, elementwise.MINIMUM),
    *(relu.RELU, relu.LEAKY_RELU, relu.PRELU, *ACTIVATIONS, *LOOKUPS),
    *(SOFTMAX, SOFTMAX_OF_MANY, UNIT_NORM),
    *(*MATH_FUNCTIONS, division.DIVIDE),
    *(*selection.COMPARISONS, selection.SELECT, selection.FROM_INTEGERS, selection.ONE_HOT),
    pooling.TOP_K,
    *(LAYER_NORM, GROUP_NORM, selection.MASK_SCORES),
    *(matmul.MATMUL, matmul.CONTRACT, pooling.MAX_POOLING, pooling.AVERAGE_POOLING),
    *(pooling.REDUCE_MAX, pooling.REDUCE_MIN, pooling.REDUCE_ANY, pooling.REDUCE_ALL),
    *(reshaping.MEAN_OF_ONE, MEAN),
    *(resize.RESIZE_NEAREST, resize.RESIZE_BILINEAR, slicing.CONCATENATE, slicing.STACK),
    *(reshaping.RESHAPE, reshaping.TRANSPOSE, reshaping.DEPTH_TO_SPACE, reshaping.SPACE_TO_DEPTH),
    *(reshaping.PAD, reshaping.MIRROR_PAD),
    *(slicing.SLICE, slicing.SPLIT, slicing.UNSTACK, slicing.GATHER),
    *(tiling.TILE, tiling.BROADCAST, tiling.REPEAT, tiling.REVERSE, tiling.ROLL),
    *(
        reshaping.SHAPE,
        reshaping.SIZE,
        pooling.ARGMAX,
        pooling.ARGMIN,
        movement.IDENTITY,
        movement.MOVE,
    ),
]
