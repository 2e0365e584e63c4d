"""Tests calls without a kernel that resemble calls in `test_options`."""

import numpy as np
import pytest
import tensorflow as tf

from keras_qat.helper_layers.operations import Contract
from keras_qat.ops.registry import match
from tests.helpers import layers
from tests.ops.test_options import IMAGE, INDICES, ROW, STEPS, TRUTH, last_call, masked, on_list

REFUSED = [
    (layers.Softmax((1, 2)), [STEPS], "several axes"),
    (lambda x: tf.nn.softmax(x, 0), [STEPS], "along the batch axis"),
    (lambda x: tf.nn.softmax(x, -2), [ROW], "along the batch axis"),
    (lambda x: layers.Softmax()(masked(x)), [(6, 6)], "a mask"),
    (lambda x, mask: layers.Softmax()(x, mask), [ROW, ROW], "a mask"),
    (lambda x: tf.math.l2_normalize(x, 1), [STEPS], "not along the last axis"),
    (lambda x: tf.math.l2_normalize(x, [1, 2]), [STEPS], "not along the last axis"),
    (lambda x: tf.math.l2_normalize(x), [ROW], "not along the last axis"),
    (lambda x: tf.math.l2_normalize(x, -1), [()], "not along the last axis"),
    (lambda x: tf.math.l2_normalize(x, -1, 1.1e-5), [STEPS], "epsilon above 1e-05"),
    (lambda x: tf.math.l2_normalize(x, -1), [(1,) * 4], "more than 4 axes"),
    (lambda x: tf.pow(2.0, x), [ROW], "its exponent is not a constant"),
    (lambda x, y: x**y, [ROW, ROW], "its exponent is not a constant"),
    (lambda x, y: x + y, [(1,) * 6, (2,) * 6], "it broadcasts more than 6 axes"),
    (tf.multiply, [(1,) * 6, (2,) * 6], "it broadcasts more than 6 axes"),
    (lambda x: x * np.ones(2, np.float32), [(1,) * 6], "it broadcasts more than 6 axes"),
    (tf.maximum, [(1,) * 5, (2,) * 5], "it broadcasts more than 5 axes"),
    (tf.minimum, [ROW, (6,) * 5], "it broadcasts more than 5 axes"),
    (tf.divide, [(1,) * 5, (2,) * 5], "more than 5 axes"),
    (tf.divide, [(1,) * 5, (1,) * 5], "more than 5 axes"),
    (tf.less, [(1,) * 4, (2,) * 4], "it broadcasts more than 4 axes"),
    (tf.less, [(6,) * 4, ROW], "it broadcasts more than 4 axes"),
    (on_list(layers.Add()), [ROW, ROW, ROW], "it needs two input tensors"),
    (tf.add, [INDICES, INDICES], "int32"),
    (tf.greater, [INDICES, INDICES], "int32"),
    (tf.where, [TRUTH], "it needs a mask and two tensors"),
    (tf.where, [((1,) * 4, "bool"), (1,) * 4, (2,) * 4], "it broadcasts more than 4 axes"),
    (tf.where, [TRUTH, (6,) * 4, ROW], "it broadcasts more than 4 axes"),
    (lambda c, x: tf.where(c, x, x), [TRUTH, INDICES], "int32"),
    (lambda x: tf.cast(x, tf.int32), [ROW], "converts quantized values to integers"),
    (lambda x: tf.cast(x, tf.int64), [INDICES], "int64"),
    (lambda x, n: tf.one_hot(x, n[0, 0]), [INDICES, INDICES], "known only at run time"),
    (layers.Flatten("channels_first"), [IMAGE], "data_format='channels_first'"),
    (lambda x: tf.transpose(x, [0, 6, 5, 4, 3, 2, 1]), [(1,) * 6], "more than 6 axes"),
    (lambda x: tf.nn.depth_to_space(x, 2, "NCHW"), [(8, 2, 2)], "data_format='NCHW'"),
    (layers.MaxPooling2D(2, data_format="channels_first"), [IMAGE], "channels_first"),
    (lambda x: tf.nn.max_pool2d(x, 2, 2, "SAME", "NCHW"), [IMAGE], "channels_first"),
    (lambda x: tf.nn.max_pool(x, 2, 2, "SAME"), [(2, 2, 2, 3)], "not a sequence or an image"),
    (lambda x: tf.reduce_any(x, [1]), [((1,) * 4, "bool")], "more than 4 axes"),
    (layers.Conv2D(2, 3, data_format="channels_first"), [IMAGE], "its channels come first"),
    (layers.Conv1D(2, 1, data_format="channels_first"), [STEPS], "its channels come first"),
    (layers.Conv2DTranspose(2, 3, dilation_rate=2), [IMAGE], "it has a dilation"),
    (
        layers.Conv1DTranspose(2, 3, data_format="channels_first"),
        [STEPS],
        "its channels come first",
    ),
    (layers.BatchNormalization(axis=1), [STEPS], "not one factor per channel"),
    (layers.BatchNormalization(axis=[1, 2]), [STEPS], "not one factor per channel"),
    (layers.Rescaling(2.0), [()], "the number of channels is unknown"),
    (lambda x: tf.matmul(x, np.ones((6, 2), np.float32)), [STEPS], "it needs two input tensors"),
    (tf.matmul, [(1,) * 5, (1,) * 5], "more than 5 axes"),
    (layers.UpSampling2D(2, interpolation="bilinear"), [(None, 4, 6)], "known only at run time"),
    (layers.UpSampling2D(2, interpolation="bilinear"), [(4, None, 6)], "known only at run time"),
    (layers.UpSampling2D(2, "channels_first"), [IMAGE], "data_format='channels_first'"),
    (layers.Resizing(2, 2, "area"), [IMAGE], "interpolation='area'"),
    (lambda x: tf.slice(x, [0, 1], tf.shape(x)), [ROW], "known only at run time"),
    (lambda x: x[:, :, :, :, :, 1:], [(2,) * 5], "more than 5 axes"),
    (lambda x: tf.reverse(x, []), [ROW], "its list of axes is empty"),
    (lambda x: tf.pad(x, [[0, 0]] * 5 + [[0, 1]]), [(2,) * 5], "more than 5 axes"),
    (lambda x: tf.pad(x, [[0, 0], [0, 1]], constant_values=1e-9), [ROW], "values other than 0"),
    (lambda x: tf.repeat(x, 2), [ROW], "known only at run time"),
    (lambda x: tf.concat([x, [[1.0] * 6]], 0), [ROW], "with constants"),
    (layers.Masking(-1.0), [STEPS], "its mask_value is not 0"),
    (lambda x: tf.reduce_mean([x, x], axis=0), [IMAGE], "its input is not a single tensor"),
    (lambda x: tf.reduce_max([x, x], axis=0), [IMAGE], "its input is not a single tensor"),
    (lambda x: layers.GlobalAveragePooling1D()(masked(x)), [STEPS], "it has a mask"),
    (lambda x: x[:, : tf.shape(x)[1]], [IMAGE], "known only at run time"),
    (lambda x: tf.transpose(x, 0 * tf.shape(x)), [IMAGE], "known only at run time"),
    (
        lambda x: tf.nn.max_pool2d(x, 2, 2, [[0, 0], [1, 1], [1, 1], [0, 0]]),
        [IMAGE],
        "explicit paddings",
    ),
    (layers.Resizing(1, 9, crop_to_aspect_ratio=True), [(6, 4, 4)], "known only at run time"),
    (layers.Resizing(3, 5, "bicubic"), [IMAGE], "interpolation='bicubic'"),
    (lambda x: Contract("abcc,abcd->ad")([x, x]), [(6, 4, 4)], "not a matrix product"),
    (
        lambda x: Contract("...bc,...dc->...bd")([x, x[:, :1]]),
        [(6, 4, 4)],
        "broadcast to the other tensor",
    ),
    (lambda x: Contract("abcd,abce->abd")([x, x]), [(6, 4, 4)], "not a matrix product"),
    (lambda x: layers.Dot(-1, normalize=True)([x, x]), [IMAGE], "normalize=True"),
    (lambda x: tf.reduce_max(x, []), [IMAGE], "its list of axes is empty"),
    (layers.Normalization(axis=(1, 2)), [STEPS], "not one factor per channel"),
    (layers.EinsumDense("abc,cd->ad", (4,)), [STEPS], "is not a product with a matrix"),
    (layers.LayerNormalization(1), [STEPS], "not along the last axes"),
    (layers.LayerNormalization([2, 1]), [STEPS], "not along the last axes"),
    (layers.LayerNormalization([1, 3]), [IMAGE], "not along the last axes"),
    (layers.LayerNormalization(), [(None, 2, None, 6)], "more than one of five sizes is unknown"),
    (layers.LayerNormalization(), [(1,) * 5], "more than 5 axes"),
    (layers.GroupNormalization(3), [(None, 4, 6)], "a size is unknown"),
    (layers.EinsumDense("abc,bcd->abd", (5, 3)), [STEPS], "is not a product with a matrix"),
    (layers.EinsumDense("abc,cd->abd", (5, 3), bias_axes="bd"), [STEPS], "its bias has axes"),
]
"""Function, shapes of inputs, and the reason why there is no kernel."""


@pytest.mark.parametrize(("build", "shapes", "reason"), REFUSED)
def test_calls_next_to_what_has_a_kernel(build, shapes, reason):
    op, _, why = match(last_call(build, shapes))
    assert op is None
    assert reason in why
