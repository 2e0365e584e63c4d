"""Attention with masks: in integers, exact, and close to float."""

import numpy as np
import tensorflow as tf

from tests.helpers import layers, rng
from tests.networks.forms.form import Form, forms

STEPS = 5
DISTANCES = np.arange(STEPS)[:, np.newaxis] - np.arange(STEPS)
SHAPES = {"padding": (STEPS,), "pairs": (STEPS, STEPS)}


def data_of(*masks):
    """Returns a sequence, and masks of some type and shape. Each step attends to some step."""
    numbers = rng(0)
    result = [numbers.normal(size=(16, STEPS, 8)).astype(np.float32)]
    for dtype, shape in masks:
        mask = numbers.random((16, *shape)) < 0.6
        mask[..., 0] = True
        result.append(mask.astype(dtype))
    return tuple(result)


def attention(mask, causal):
    def build(x, given=None):
        given = given[:, tf.newaxis, :] if mask == "padding" else given
        attend = layers.MultiHeadAttention(2, 4)
        return layers.Dense(3)(attend(x, x, attention_mask=given, use_causal_mask=causal))

    return build


MASKED = {
    f"{mask} {causal} {dtype}": (
        attention(mask, causal),
        data_of(*([(dtype, SHAPES[mask])] if mask else [])),
    )
    for mask, causal, dtype in (
        ("pairs", True, "bool"),
        ("padding", False, "int32"),
        ("pairs", False, "int64"),
        ("padding", True, "float32"),
        (None, True, ""),
    )
}


def by_hand(mask):
    """Returns attention as in tutorials, with a mask that is 1 for masked steps."""

    def build(x, hidden=None):
        queries, keys, values = (layers.Dense(6)(x) for _ in range(3))
        scores = tf.matmul(queries, keys, transpose_b=True) * 6**-0.5
        if mask == "causal":
            scores += (1.0 - np.tri(STEPS, dtype=np.float32)) * -1e9
        else:
            scores += hidden * -1e9 if mask == "padding" else (1.0 - hidden) * -10000.0
        return layers.Dense(3)(tf.matmul(tf.nn.softmax(scores, axis=-1), values))

    return build


BIAS = np.sin(np.arange(STEPS**2, dtype=np.float32)).reshape(1, STEPS, STEPS)
CHOICES = {
    "number": lambda mask, scores: tf.where(mask > 0.5, scores, -1e9),
    "exchanged": lambda mask, scores: tf.where(mask < 0.5, -1e4, scores),
    "ones_like": lambda mask, scores: tf.where(mask > 0.5, scores, -1e9 * tf.ones_like(scores)),
    "fill": lambda mask, scores: tf.where(
        tf.cast(mask, tf.bool), scores, tf.fill(tf.shape(scores), -1e4)
    ),
    "causal": lambda mask, scores: tf.where(np.tri(STEPS) > 0, scores, -np.inf),
    "window": lambda mask, scores: scores + np.where(abs(DISTANCES) < 2, 0.0, -100.0)[None],
    "with distances": lambda mask, scores: scores - np.where(DISTANCES < 0, 1e9, 0.5 * DISTANCES),
    "padding and later steps": lambda mask, scores: of_two(mask, scores),
    "padding beside copies": lambda mask, scores: of_copies(mask, scores),
    "beside a bias": lambda mask, scores: scores + (BIAS + (1.0 - mask) * -1e9),
    "beside zeros": lambda mask, scores: scores - (tf.zeros((1, 1, STEPS)) + (1.0 - mask) * 1e9),
    "beside a tensor": lambda mask, scores: (1.0 - mask) * -1e9 + tf.sin(scores) + scores,
    "cast": lambda mask, scores: scores + tf.cast(tf.where(mask > 0, 0.0, -1e9), scores.dtype),
    "moved": lambda mask, scores: scores + ((1.0 - mask[:, 0]) * -1e9)[:, tf.newaxis],
    "added": lambda mask, scores: (
        scores - tf.where(mask[:, 0] > 0.5, tf.zeros_like(mask[:, 0]), 1e9)[:, tf.newaxis]
    ),
}
"""How a mask (1 for visible steps) selects scores, or a constant mask."""


def of_two(mask, scores):
    """Masks twice, as in recommenders: the second mask has the size of the first result."""
    chosen = tf.where(mask > 0, scores, tf.ones_like(scores) * -1e9)
    seen = tf.linalg.band_part(tf.ones_like(chosen[0]), -1, 0)
    seen = tf.tile(seen[None], [tf.shape(chosen)[0], 1, 1])
    return tf.where(tf.equal(seen, 0.0), -1e9, chosen)


def of_copies(mask, scores):
    """Copies a causal mask for each example, and reads sizes, as in BART."""
    later = (1.0 - np.tri(STEPS, dtype=np.float32))[np.newaxis] * -1e8
    later = tf.tile(later, [tf.shape(scores)[0], 1, 1])
    scores += tf.cast(later + (1.0 - mask) * -1e8, scores.dtype)
    return tf.reshape(scores, [tf.shape(scores)[0], STEPS, -1]) + 1e-9


def choosing(choose):
    def build(x, mask=None):
        queries, keys, values = (layers.Dense(6)(x) for _ in range(3))
        scores = tf.matmul(queries, keys, transpose_b=True) * 6**-0.5
        weights = tf.nn.softmax(choose(mask, scores), axis=-1)
        return layers.Dense(3)(tf.matmul(weights, values))

    return build


COPIED = {
    "broadcast_to": lambda scores: tf.broadcast_to(-np.inf, tf.shape(scores)),
    "tile": lambda scores: tf.tile(tf.constant([[[-np.inf]]]), [tf.shape(scores)[0], STEPS, STEPS]),
}


def hidden_by_copies(copy):
    def build(x, mask):
        scores = tf.matmul(x, x, transpose_b=True)
        hidden = tf.cast(copy(scores), "float32")
        return tf.matmul(tf.nn.softmax(tf.where(mask > 0.5, scores, hidden)), x)

    return build


def maximum_of_sums(x, mask):
    hidden = layers.Dense(6)(x) + (1.0 - tf.transpose(mask, (0, 2, 1))) * -1e9
    return layers.Dense(3)(tf.reduce_max(hidden, 1))


def maximum_of_choices(x, mask):
    hidden = tf.where(tf.transpose(mask, (0, 2, 1)) > 0.5, layers.Dense(6)(x), -1e9)
    return layers.Dense(3)(layers.GlobalMaxPooling1D()(hidden))


IGNORES = {
    "scaled": lambda scores: tf.nn.softmax(scores / 2.0),
    "scaled twice": lambda scores: tf.nn.softmax(0.5 * (scores * 3.0)),
    "sigmoid": tf.sigmoid,
    "exponential": tf.exp,
    "largest": lambda scores: tf.math.top_k(scores, 2)[0],
    "which": lambda scores: tf.one_hot(tf.argmax(scores, -1), STEPS),
}


def ignoring(reader):
    return lambda x, mask: reader(layers.Dense(STEPS)(x) + (1.0 - mask) * -1e9)


class Biased(layers.Layer):
    """Adds a weight for each distance, and a causal mask in the same tensor, as in T5's decoder."""

    def build(self, shape):
        self.bias = self.add_weight("bias", (1, STEPS, STEPS), initializer="random_normal")

    def call(self, scores):
        return tf.nn.softmax(scores + (self.bias + np.where(DISTANCES < 0, -1e9, 0.0)))


SEEN = rng(2).random((64, STEPS)) < 0.7
SEEN[:, :2] = True
ROWS = rng(1).normal(size=(64, STEPS)).astype(np.float32)
VISIBLE = data_of(("float32", (1, STEPS)))
HIDDEN = VISIBLE[0], 1.0 - VISIBLE[1]
WITHOUT_MASK = ("causal", "window", "with distances")
CHOOSING = {
    name: Form(
        choosing(choose),
        VISIBLE[:1] if name in WITHOUT_MASK else VISIBLE,
        sqnr=30,
        lacks=() if name == "padding and later steps" else ("FILL", "ZEROS_LIKE"),
    )
    for name, choose in CHOICES.items()
}
FORMS = {
    "masked attention": {
        f"{name} {recipe}".strip(): Form(build, data, sqnr=20, recipe=recipe)
        for recipe in ("int8", "int16x8")
        for name, (build, data) in MASKED.items()
    },
    "masks by hand": {
        "causal": Form(by_hand("causal"), VISIBLE[:1], sqnr=33),
        "padding": Form(by_hand("padding"), HIDDEN, sqnr=33),
        "visible": Form(by_hand("visible"), VISIBLE, sqnr=33),
    },
    "masks that choose": {
        **CHOOSING,
        **forms(
            {f"copied by {name}": hidden_by_copies(f) for name, f in COPIED.items()},
            *VISIBLE,
            lacks=("BROADCAST_TO", "TILE"),
        ),
    },
    "what ignores masked scores": {
        **forms({f.__name__: f for f in (maximum_of_sums, maximum_of_choices)}, *VISIBLE),
        **forms(
            {name: ignoring(f) for name, f in IGNORES.items()},
            ROWS,
            SEEN.astype(np.float32),
            sqnr=20,
        ),
        "biased": Form(
            lambda x: Biased()(x),
            (rng(1).normal(size=(32, STEPS, STEPS)).astype(np.float32),),
            sqnr=20,
        ),
    },
}
