"""Operations that are computed by their expansions."""

import numpy as np
import tensorflow as tf

from tests.helpers import images, keras, layers
from tests.networks.forms.form import forms

SHAPE = (6, 8)
MATRIX = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
KERNEL = np.random.default_rng(1).normal(size=(6, 8, 2)).astype(np.float32)
KERNELS = MATRIX[:2, :2, None, None], MATRIX[None, None, :1]
VOLUME = np.random.default_rng(2).normal(size=(2, 3, 1, 2, 3)).astype(np.float32)
MASK = [True, False, True, True, False, True]
POWERS = np.linspace(0.5, 1.8, 8, dtype=np.float32)


def chosen(x):
    """Selects between two branches, as in selective kernels."""
    both = tf.stack([x, 1.0 - x])
    weights = tf.nn.softmax(both, axis=0)
    return x * weights[0] + tf.nn.relu(x) * weights[1]


class SumsAWeight(layers.Layer):
    def build(self, shape):
        self.w = self.add_weight("w", (3, shape[-1]))

    def call(self, x):
        return tf.einsum("btc,kc->bt", x, self.w)


def lower_triangle(x):
    """Keeps each product of two features once, as in DLRM."""
    products = tf.matmul(x, x, transpose_b=True)
    ones = tf.ones_like(products)
    mask = ones - tf.linalg.band_part(ones, 0, -1)
    rows = tf.boolean_mask(x, tf.cast(tf.ones_like(x[..., 0]), tf.bool))
    return tf.reshape(tf.boolean_mask(products, mask), [-1, 15]), tf.reshape(rows, [-1, 48])


FUNCTIONS = {
    "nn.log_softmax": (tf.nn.log_softmax, lambda x: tf.nn.log_softmax(x, axis=1)),
    "math.reduce_logsumexp": (
        lambda x: [tf.reduce_logsumexp(x, -1), tf.reduce_logsumexp(x, [1, 2], keepdims=True)],
    ),
    "math.log_sigmoid": (tf.math.log_sigmoid,),
    "math.erfc": (tf.math.erfc,),
    "math.scalar_mul": (
        lambda x: tf.math.scalar_mul(0.3, x),
        lambda x: tf.compat.v1.math.scalar_mul(-2.0, x),
    ),
    "linalg.matmul": (
        lambda x: (
            x * tf.one_hot(tf.matmul(tf.argmax(x, -1, "int32")[..., None], [[1]]), 8)[..., 0, :]
        ),
    ),
    "sequence_mask": (
        lambda x: x * tf.sequence_mask(tf.argmax(x[..., 0], -1), 6, tf.float32)[..., tf.newaxis],
    ),
    "math.atan2": (lambda x: tf.atan2(x[..., :4], x[..., 4:]), lambda x: tf.atan2(-0.5, x)),
    "repeat": (
        lambda x: tf.repeat(x, [1, 2, 0, 1, 1, 1], axis=1),
        lambda x: x + tf.repeat(x[0, :3, 0], [1, 3, 2])[None, :, None],
    ),
    "math.divide_no_nan": (
        lambda x: tf.math.divide_no_nan(x, tf.nn.relu(x - 1.0)),
        lambda x: tf.math.divide_no_nan(x, [0.0, 1.0, 2.0, 4.0] * 2),
    ),
    "math.reciprocal_no_nan": (lambda x: tf.math.reciprocal_no_nan(tf.nn.relu(x) + 0.5),),
    "realdiv": (lambda x: tf.realdiv(x, 3.0),),
    "math.squared_difference": (
        lambda x: tf.math.squared_difference(x, tf.sigmoid(x)),
        lambda x: tf.math.squared_difference(x, 0.5),
    ),
    "cast": (lambda x: tf.where(tf.cast(tf.nn.relu(x), tf.bool), x, 0.5),),
    "math.is_nan": (lambda x: tf.where(tf.math.is_nan(x), 0.0, x * 2.0),),
    "math.is_finite": (lambda x: tf.where(tf.math.is_finite(x), x * 2.0, 0.5),),
    "math.is_inf": (lambda x: tf.where(tf.math.is_inf(x), 0.5, x * 2.0),),
    "math.rint": (lambda x: tf.math.rint(x * 2.0),),
    "math.accumulate_n": (lambda x: tf.math.accumulate_n([x, tf.sigmoid(x)]),),
    "math.conj": (lambda x: tf.math.conj(x) + 1.0,),
    "math.real": (lambda x: tf.math.real(x) + 1.0,),
    "identity_n": (lambda x: tf.identity_n([x, x + 1.0]),),
    "clip_by_value": (lambda x: tf.clip_by_value(x, tf.sigmoid(x) - 1.0, [0.5] * 8),),
    "argsort": (
        lambda x: tf.argsort(x, direction="DESCENDING"),
        lambda x: tf.gather(x, tf.argsort(tf.reduce_mean(x, 2)), axis=1, batch_dims=1),
    ),
    "math.reduce_euclidean_norm": (lambda x: tf.math.reduce_euclidean_norm(x, axis=-1),),
    "math.pow": (
        lambda x: 2.0**x,
        lambda x: tf.abs(x) ** tf.sigmoid(x),
        lambda x: tf.pow(tf.abs(x), POWERS),
    ),
    "math.reduce_prod": (
        lambda x: tf.reduce_prod(tf.sigmoid(x), axis=1),
        lambda x: tf.reduce_prod(x[:, :, :2], -1, keepdims=True),
    ),
    "math.cumprod": (
        lambda x: tf.math.cumprod(tf.sigmoid(x), axis=-1),
        lambda x: tf.math.cumprod(1.0 - 0.3 * tf.sigmoid(tf.tile(x, [1, 3, 1])), 1, exclusive=True),
        lambda x: tf.math.cumprod(tf.sigmoid(x), 1, exclusive=True, reverse=True),
    ),
    "math.cumulative_logsumexp": (
        lambda x: tf.math.cumulative_logsumexp(x, axis=1),
        lambda x: tf.math.cumulative_logsumexp(3.0 * x, -1, reverse=True),
        lambda x: tf.math.cumulative_logsumexp(x, 2, exclusive=True)[..., 1:],
    ),
    "nn.local_response_normalization": (
        lambda x: tf.nn.local_response_normalization(x[:, None], 2, 2.0, 1e-2, 0.75),
    ),
    "math.l2_normalize": (lambda x: tf.math.l2_normalize(x, axis=[1, 2]),),
    "nn.silu": (lambda x: tf.nn.silu(x, 1.702),),
    "nn.crelu": (tf.nn.crelu,),
    "nn.softmax": (chosen,),
    "boolean_mask": (
        lower_triangle,
        lambda x: tf.boolean_mask(x, MASK, axis=1),
        lambda x: tf.boolean_mask(x, np.tri(6, 8, -1) > 0, axis=1),
    ),
    "linalg.band_part": (lambda x: tf.linalg.band_part(tf.matmul(x, x, transpose_b=True), -1, 0),),
    **{
        f"image.flip_{name}": (lambda x, f=function: f(x[..., None]),)
        for name, function in {
            "left_right": tf.image.flip_left_right,
            "up_down": tf.image.flip_up_down,
        }.items()
    },
    **{
        f"image.{function.__name__}": (lambda x, f=function: f(x[:, None, :, :3]),)
        for function in (
            *(tf.image.rgb_to_grayscale, tf.image.rgb_to_yiq, tf.image.rgb_to_yuv),
            *(tf.image.yiq_to_rgb, tf.image.yuv_to_rgb),
        )
    },
    "image.crop_to_bounding_box": (
        lambda x: tf.image.crop_to_bounding_box(tf.expand_dims(x, -1), 1, 2, 4, 5),
    ),
    "image.pad_to_bounding_box": (
        lambda x: tf.image.pad_to_bounding_box(x[..., None], 1, 0, 8, 11),
    ),
    "image.resize_with_crop_or_pad": (
        lambda x: tf.image.resize_with_crop_or_pad(x[..., None], 9, 5),
        lambda x: tf.image.resize_with_crop_or_pad(x[..., None], 3, 11),
    ),
    "image.central_crop": (lambda x: tf.image.central_crop(x[..., None], 0.7),),
    "image.rot90": tuple(
        lambda x, quarters=quarters: tf.image.rot90(x[..., None], quarters)
        for quarters in range(1, 5)
    ),
    "image.per_image_standardization": (
        lambda x: tf.image.per_image_standardization(x[..., None] * 2.0 + 1.0),
    ),
    "image.resize_with_pad": (
        lambda x: tf.image.resize_with_pad(x[..., None], 5, 12),
        lambda x: tf.image.resize_with_pad(x[..., None], 14, 9, "nearest"),
    ),
    "image.adjust_contrast": (lambda x: tf.image.adjust_contrast(x[..., None], 1.5),),
    "image.adjust_brightness": (lambda x: tf.image.adjust_brightness(x[..., None], 0.3),),
    "image.grayscale_to_rgb": (lambda x: tf.image.grayscale_to_rgb(x[..., None]),),
    "sort": (lambda x: tf.sort(x, axis=1, direction="DESCENDING"), lambda x: tf.sort(x, 1)),
    "where": (
        lambda x: tf.where(np.tri(6, 8) > 0, x, -1.0),
        lambda x: tf.where(tf.constant(MASK)[:, None], tf.sigmoid(x), x),
    ),
    "pad": (
        lambda x: tf.pad(x, [[0, 0], [1, 2], [0, 1]], constant_values=-1.0),
        lambda x: tf.pad(x, tf.constant([[0, 0], [1, 0], [0, 0]]), "constant", 0.5),
    ),
    "nn.max_pool3d": (
        lambda x: tf.nn.max_pool3d(tf.reshape(x, [-1, 3, 4, 4, 1]), 2, [1, 1, 2, 2, 1], "SAME"),
    ),
    "nn.avg_pool3d": (
        lambda x: keras.backend.pool3d(
            tf.reshape(x, [-1, 3, 4, 4, 1]), (2, 2, 1), (1, 2, 2), pool_mode="avg"
        ),
    ),
    "tensordot": (
        lambda x: tf.tensordot(x, MATRIX, 1),
        lambda x: tf.tensordot(x, MATRIX[:, 0], [[-1], [0]]),
        lambda x: (
            tf.tensordot(x, MATRIX[:6], [[1], [0]]) + tf.tensordot(x, MATRIX.T[:, :6], (-2, 1))
        ),
        lambda x: tf.tensordot(x, np.tile(MATRIX, (6, 1, 1)), 2),
        lambda x: tf.tensordot(x, np.tile(MATRIX, (2, 1, 1)), (2, 1)),
    ),
    "einsum": (
        lambda x: tf.einsum("btc->bc", x),
        lambda x: tf.einsum("btc->bct", x),
        lambda x: tf.einsum("...c,cd->...d", x, MATRIX),
        lambda x: tf.einsum("ct,btc->btc", np.tile(MATRIX, 2), x),
        lambda x: tf.einsum("btc,bsc,bsd->btd", x, tf.nn.relu(x), x),
        lambda x: tf.einsum("btc,tcd->bdt", x, KERNEL),
        lambda x: tf.einsum("tcd,btc->bd", KERNEL, x),
        lambda x: tf.einsum("btc,td->btdc", x, KERNEL[:, 0]),
        lambda x: tf.einsum("...ij,...kj->...i", x, x),
        lambda x: tf.einsum("btc,buv->btc", tf.nn.relu(x), x + 1.0),
        lambda x: tf.einsum("buc,btc->btc", x + 1.0, x),
        lambda x: tf.einsum("btc,cde->bd", x, KERNEL.transpose(1, 2, 0)),
        lambda x: SumsAWeight()(x),
        lambda x: layers.EinsumDense("abc,cd->ad", 5, bias_axes="d")(x),
        lambda x: layers.EinsumDense("...bc,cde->...de", (5, 4))(x),
        lambda x: tf.einsum("...tc,...uc->...tu", x, KERNEL[None, :, :, 0]),
    ),
    "keras.backend.batch_flatten": (keras.backend.batch_flatten,),
    "nn.separable_conv2d": (
        lambda x: keras.backend.separable_conv2d(x[..., None], KERNELS[0], KERNELS[1], (2, 2)),
        lambda x: tf.nn.separable_conv2d(x[..., None], *KERNELS, [1, 2, 2, 1], "SAME"),
        lambda x: tf.nn.separable_conv2d(x[..., None], *KERNELS, [1] * 4, "SAME", dilations=[2, 2]),
    ),
    "nn.conv3d": (
        lambda x: tf.nn.conv3d(tf.reshape(x, [-1, 3, 4, 2, 2]), VOLUME, [1] * 5, "VALID"),
        lambda x: tf.nn.conv3d(
            tf.reshape(x, [-1, 4, 3, 4, 1]), VOLUME[:, :, :, :1], [1, 2, 1, 2, 1], "SAME"
        ),
        lambda x: tf.nn.conv3d(
            tf.reshape(x, [-1, 4, 3, 2, 2]), VOLUME, [1] * 5, "SAME", dilations=[1, 2, 1, 1, 1]
        ),
    ),
    "signal.frame": (lambda x: tf.signal.frame(x, 4, 2, axis=1),),
    "signal.overlap_and_add": (
        lambda x: tf.signal.overlap_and_add(tf.transpose(x, [0, 2, 1]), 2),
        lambda x: tf.signal.overlap_and_add(x[:, None], 3),
    ),
    "math.floormod": (lambda x: x % 4.0, lambda x: tf.math.floormod(x, 2.0 + tf.nn.relu(x))),
    "floor_div": (lambda x: x // 1.5,),
    "math.xdivy": (lambda x: tf.math.xdivy(x, 2.0 + tf.nn.relu(x)),),
    "math.polyval": (lambda x: tf.math.polyval([x, 0.5 * x, 1.0], tf.tanh(x)),),
    "math.asin": (lambda x: tf.asin(tf.clip_by_value(x, -0.9, 0.9)),),
    "math.acos": (lambda x: tf.acos(tf.tanh(x)),),
    "math.acosh": (lambda x: tf.acosh(2.0 + tf.nn.relu(x)),),
    "math.atanh": (lambda x: tf.atanh(tf.clip_by_value(x, -0.9, 0.9)),),
    "signal.dct": (lambda x: tf.signal.dct(x, norm="ortho"), lambda x: tf.signal.dct(x, 3)),
    "signal.idct": (tf.signal.idct,),
    "signal.mfccs_from_log_mel_spectrograms": (
        lambda x: tf.signal.mfccs_from_log_mel_spectrograms(x)[..., :5],
    ),
    "keras.backend.cast_to_floatx": (lambda x: keras.backend.cast_to_floatx(x) + 1.0,),
    "image.transpose": (lambda x: tf.image.transpose(x[..., None]),),
}
CASES = {
    f"{name} {number}": function
    for name, functions in FUNCTIONS.items()
    for number, function in enumerate(functions)
}
EQUIVALENTS = forms(
    CASES,
    images(64, SHAPE),
    # Quotients by tiny values, and rows selected by the order of nearly equal values.
    sqnr={"": 16, "math.divide_no_nan 0": -1, "argsort 1": 13},
)
FORMS = {"equivalents": EQUIVALENTS}
