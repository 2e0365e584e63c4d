"""Forms in public models that once failed, from reading to the file."""

import numpy as np
import tensorflow as tf

from tests.helpers import images, keras, layers
from tests.networks.forms.form import Form


class Prior(keras.initializers.Initializer):
    """An initializer that is not registered with Keras."""

    def __call__(self, shape, dtype=None, **kwargs):
        return tf.fill(shape, tf.constant(-0.1, dtype))


def conv(x, filters=4):
    return layers.Conv2D(filters, 3, padding="same")(x)


def center_points(x):
    scores = layers.Conv2D(4, 1, activation="sigmoid")(x)
    return [scores, tf.cast(scores > 0.5, tf.float32) * scores]


def preprocessed(mode):
    def build(x):
        return conv(keras.applications.imagenet_utils.preprocess_input(x, mode=mode))

    return build


def patches_of(**options):
    return lambda x: tf.image.extract_patches(x, BLOCK, **options)


def old_resize(x):
    return tf.compat.v1.image.resize_images(x, (4, 6), align_corners=True)


def heads(x):
    """Tracing leaves a size unknown."""
    q = tf.reshape(tf.nn.relu(conv(x)), (tf.shape(x)[0], -1, 2, 2))
    q = tf.transpose(q, (0, 2, 1, 3)) * tf.constant([1.0, 0.5])
    return tf.einsum("bhnd,bhd->bhn", tf.nn.softmax(q, 2), tf.reduce_sum(layers.Dense(2)(q), 2))


BLOCK = [1, 2, 2, 1]


def copied(x):
    rows = np.linspace(-1.0, 1.0, 8, dtype=np.float32)[None, :, None, None]
    return layers.Concatenate()([x, tf.tile(rows, [tf.shape(x)[0], 1, 8, 1]) * 100.0])


def of_another_size(x):
    small = layers.AveragePooling2D(2)(conv(x))
    resize = tf.compat.v1.image.resize_bilinear
    return layers.Lambda(lambda t: resize(t[0], tf.shape(t[1])[1:3], align_corners=True))(
        [small, x]
    )


def scaled_by_size(x):
    return layers.Lambda(lambda t: t / tf.sqrt(tf.cast(tf.shape(t)[-1], tf.float32)))(conv(x))


MATRIX = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
SHAPE = (8, 8, 4)
OF_IMAGES = {
    "a sum of stacked tensors": lambda x: tf.reduce_sum([x, x * 2.0], axis=0),
    "a mean of stacked tensors": lambda x: tf.reduce_mean([x, x * 3.0], axis=0),
    "the largest of a list": lambda x: tf.reduce_max([x, conv(x)], axis=[0]),
    "the smallest of a list": lambda x: tf.reduce_min([x, conv(x)], axis=0),
    "a cube, as in a GELU": lambda x: tf.pow(tf.tanh(conv(x)), 3),
    "a mean of all of them": lambda x: tf.reduce_mean([x, x * 3.0], axis=[0, 2]),
    "an initializer of one's own": lambda x: layers.Conv2D(4, 1, bias_initializer=Prior())(x),
    "divided by an array": lambda x: x / np.array([1.0, 2.0, 4.0, 5.0]),
    "divided by a list": lambda x: x / [1.0, 2.0, 4.0, 5.0],
    "a bias": lambda x: tf.nn.bias_add(conv(x), tf.constant([0.5, -0.5, 1.0, 0.0])),
    "outputs that others read": center_points,
    "patches": lambda x: tf.image.extract_patches(x, BLOCK, BLOCK, [1] * 4, "VALID"),
    "patches that overlap": patches_of(strides=[1, 1, 2, 1], rates=BLOCK, padding="SAME"),
    "patches of a part": patches_of(strides=[1, 3, 3, 1], rates=[1] * 4, padding="VALID"),
    "patches with holes": patches_of(strides=BLOCK, rates=BLOCK, padding="SAME"),
    "norms of columns": lambda x: tf.math.l2_normalize(conv(x), 1),
    "norms of columns, epsilon": lambda x: tf.nn.l2_normalize(conv(x), axis=[-2], epsilon=1e-6),
    "another resize": lambda x: tf.image.resize(conv(x), (5, 3), method="bicubic"),
    "a matrix on the right": lambda x: tf.matmul(x, MATRIX),
    "a matrix on the left": lambda x: tf.matmul(conv(x), MATRIX.T, transpose_b=True),
    "an equation with a matrix": lambda x: tf.einsum("vw,bhwc->bchv", np.eye(8, 8), x),
    "an equation with a vector": lambda x: tf.einsum(
        "c,bhwc->bhw", np.arange(4.0), tf.nn.softmax(x)
    ),
    "sums so far": lambda x: tf.cumsum(conv(x), axis=1),
    "sums to come": lambda x: tf.cumsum(x, -1, exclusive=True, reverse=True),
    "sorted": lambda x: tf.sort(conv(x)),
    "sorted down": lambda x: tf.sort(conv(x), direction="DESCENDING"),
    "the largest two": lambda x: tf.math.top_k(conv(x), 2).values,
    "what is missing, as 0": lambda x: tf.where(x < 0.5, tf.zeros_like(x), x),
    "ones and what they add": lambda x: tf.ones_like(x) - tf.nn.sigmoid(conv(x)),
    "divided by a sum": lambda x: x / (tf.reduce_sum(tf.abs(x), -1, keepdims=True) + 1.0),
    "deviations": lambda x: tf.math.reduce_std(conv(x), [1, 2], keepdims=True),
    "variances": lambda x: tf.math.reduce_variance(conv(x), -1),
    "lengths": lambda x: tf.norm(conv(x), axis=-1),
    "a sum of a sum": lambda x: tf.reduce_sum(tf.reduce_sum(x, [2, 3]), 1),
    "a map for each": copied,
    "where the largest is": lambda x: tf.one_hot(tf.argmax(conv(x), -1), 4),
    "a size of another": of_another_size,
    "divided by the root of a size": scaled_by_size,
    "a number over a tensor": lambda x: 2.0 / (1.0 + tf.abs(conv(x))),
    "copies by a size": lambda x: tf.tile(
        tf.reduce_max(conv(x), 1, keepdims=True), [1, tf.shape(x)[1], 2, 1]
    ),
    "heads of linear attention": heads,
    "a number for each": lambda x: tf.concat(
        [x, tf.broadcast_to([0.5], [*tf.unstack(tf.shape(x))[:3], 2])], -1
    ),
    "repeated by a size": lambda x: tf.repeat(
        tf.convert_to_tensor(conv(x)), tf.shape(x)[-1], axis=1
    ),
}
FUNCTIONS = {
    **{name: (function, SHAPE) for name, function in OF_IMAGES.items()},
    "open sizes": (lambda x: layers.Conv2D(4, 3)(layers.Conv2D(4, 3)(x)), (None, None, 4)),
    "steps before": (lambda x: layers.Conv1D(3, 3, padding="causal")(x), (None, 4)),
    "steps between": (lambda x: layers.Conv1DTranspose(3, 3, strides=2)(x), (None, 4)),
    "heads of steps": (
        layers.EinsumDense("abc,cde->abde", (None, 2, 3), bias_axes="de"),
        (None, 4),
    ),
    "scores of any length": (
        lambda x: tf.nn.softmax(
            layers.Rescaling(0.5, 1.0)(tf.matmul(x, x, transpose_b=True) / 4e3)
        ),
        (None, 4),
    ),
    "caffe": (preprocessed("caffe"), (8, 8, 3)),
    "torch": (preprocessed("torch"), (8, 8, 3)),
    "an old resize of a pixel": (old_resize, (1, 1, 4)),
    "an old resize": (old_resize, (2, 2, 4)),
    "a matrix from the left": (lambda x: tf.matmul(np.tile(MATRIX, 2).T, x), (8, 4, 4)),
}
IN_THE_WILD = {
    name: Form(
        build,
        (100 * np.abs(images(24, [size or 12 for size in shape])),),
        sqnr=6 if name == "a number over a tensor" else 17,
        shape=shape,
    )
    for name, (build, shape) in FUNCTIONS.items()
    if name != "a mean of all of them"
}
FORMS = {"in the wild": IN_THE_WILD}
