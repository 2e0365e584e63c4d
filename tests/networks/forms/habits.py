"""Things that custom layers do besides computing."""

import tensorflow as tf

from tests.helpers import images, layers
from tests.networks.forms.form import Form, forms


class Own(layers.Layer):
    """A layer with an inner layer."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(4)


class Beside(Own):
    """A layer that also returns its input, twice."""

    def call(self, x):
        y = tf.nn.relu(x)
        return [x, y, y]


class WithNone(Own):
    """Returns None for results that were not requested."""

    def call(self, x):
        return self.dense(x), None


class Checked(Own):
    """Asserts properties of its input."""

    def call(self, x):
        tf.debugging.assert_equal(tf.shape(x)[-1], 4)
        tf.debugging.assert_rank(x, 3)
        return tf.debugging.check_numerics(tf.debugging.assert_all_finite(self.dense(x), ""), "")


class Typed(Own):
    """Refuses inputs that are not tensors, and passes None on, like models of transformers."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.optional = Optional()

    def call(self, x):
        if not isinstance(x, (tf.Tensor, dict)) or not tf.is_tensor(x) or tf.is_tensor(4):
            raise TypeError(f"{x} is no tensor")
        return self.optional(inputs=self.dense(x), bias=None)[0]


class Optional(Own):
    """Adds a bias if there is one, and returns optional results, if any."""

    def call(self, inputs, bias=None):
        return self.dense(inputs if bias is None else inputs + bias), (bias,)


class WithNoneInside(Own):
    """Passes on results of an inner layer, including None."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.optional = Optional()

    def call(self, x):
        y, kept = self.optional(x)
        if kept[0] is not None:
            raise TypeError(f"{kept} is not None")
        return (tf.nn.relu(y), *kept)


class Heads(layers.Layer):
    """Attention with weights for each head, and a final product of three tensors."""

    def build(self, shape):
        self.query = self.add_weight("query", (4, 2, 3))
        self.result = self.add_weight("result", (2, 3, 4))

    def call(self, x):
        q = tf.einsum("btd,dhk->bthk", x, self.query)
        shares = tf.nn.softmax(tf.einsum("bthk,bshk->bhts", q, q))
        return tf.einsum("bhts,bshk,hkd->btd", shares, q, self.result)


class Sized(Own):
    """A layer that also returns Python integers, like SegFormer's layers."""

    def call(self, x):
        return self.dense(x), x.shape[1], tf.constant(0.5)


class OfSized(Own):
    """Reads these integers."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.sized = Sized()

    def call(self, x):
        y, steps, scale = self.sized(x)
        return tf.reshape(self.dense(y), (-1, steps * 4)) * scale


class Patches(layers.Layer):
    """Returns tokens, and their arrangement in the image as integers."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.conv = layers.Conv2D(4, 2, 2)

    def call(self, x):
        x = self.conv(x)
        height, width = tf.shape(x)[1], tf.shape(x)[2]
        return tf.reshape(x, (-1, height * width, 4)), height, width


class Reduced(layers.Layer):
    """Attends to an image of half the size, and adds results of two layers."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.conv, self.dense, self.add = layers.Conv2D(4, 2, 2), layers.Dense(4), layers.Add()

    def call(self, x, height, width):
        batch = tf.shape(x)[0]
        image = tf.reshape(x, (batch, height, width, 4))
        reduced = tf.reshape(self.conv(image), (batch, -1, 4))
        keys = self.dense(reduced)
        shares = tf.nn.softmax(tf.matmul(x, self.add([keys, reduced]), transpose_b=True) / 2.0)
        return tf.reshape(tf.matmul(shares, keys), (batch, height, width, 4))


class Doubled(Own):
    """Resizes to a computed size, and creates tensors of computed sizes."""

    def call(self, x):
        x = tf.image.resize(self.dense(x[..., None]), tf.shape(x)[1:3] * 2)
        return x * tf.cast(tf.reshape(tf.range(tf.shape(x)[1]), [1, -1, 1, 1]), tf.float32)


class Sparsemax(layers.Layer):
    """Sparsemax of TensorFlow Addons, as in TabNet, with NaN for undefined results."""

    def call(self, x):
        logits = tf.reshape(x, [-1, 4])
        count = tf.shape(logits)[0]
        z = logits - tf.reduce_mean(logits, axis=1)[:, tf.newaxis]
        largest, _ = tf.nn.top_k(z, k=4)
        sums = tf.cumsum(largest, axis=1)
        is_in_support = 1 + tf.range(1.0, 5.0) * largest > sums
        size = tf.reduce_sum(tf.cast(is_in_support, tf.int32), axis=1)
        places = tf.stack([tf.range(0, count), tf.maximum(size, 1) - 1], axis=1)
        threshold = (tf.gather_nd(sums, places) - 1) / tf.cast(size, tf.float32)
        shares = tf.maximum(0.0, z - threshold[:, tf.newaxis])
        is_lost = tf.equal(size, 0) | tf.math.is_nan(sums[:, -1])
        shares = tf.where(is_lost[:, None], tf.fill([count, 4], float("nan")), shares)
        return tf.reshape(shares, tf.shape(x))


X = images(16, (3, 4))
HABITS = {
    **forms(
        {
            kind.__name__: lambda x, kind=kind: kind()(x)
            for kind in (Beside, Checked, Typed, Doubled, Heads, OfSized, Sparsemax)
        },
        X,
        sqnr={"": 34, "Heads": 24},
    ),
    **forms({k.__name__: lambda x, k=k: k()(x)[0] for k in (WithNone, WithNoneInside)}, X, sqnr=39),
    "Reduced": Form(lambda x: Reduced()(*Patches()(x)), (images(8, (8, 8, 3)),)),
}
FORMS = {"habits": HABITS}
