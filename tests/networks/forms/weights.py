"""Weights that layers compute, borrow, share and hold."""

import numpy as np
import tensorflow as tf

import keras_qat
from tests.helpers import images, keras, layers, rng
from tests.networks.computed_kernels import COMPUTED
from tests.networks.forms.form import Form, forms

MATRIX = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
FUNCTIONS = {
    "of what is not": lambda x, w: x * tf.cast(w != 0.5, tf.float32),
    "an equation": lambda x, w: tf.matmul(x, tf.einsum("ij,jk->ik", w, w)),
    "an equation of one": lambda x, w: tf.matmul(x, tf.einsum("ij->ji", w)),
    "an equation with a constant": lambda x, w: tf.matmul(x, tf.einsum("ij,kj->ik", w, MATRIX)),
    "a constant on the left": lambda x, w: tf.matmul(x, MATRIX + w),
    "the last of all axes": lambda x, w: x * w[..., 0],
    "complex numbers": lambda x, w: x * tf.math.real(tf.exp(tf.cast(w, tf.complex64) * 1j)),
    "a list": lambda x, w: x * tf.reduce_sum([w, MATRIX], axis=(0, 1)),
}


class Computing(layers.Layer):
    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def build(self, input_shape):
        self.w = self.add_weight("w", (4, 4), initializer="random_normal")

    def call(self, inputs):
        return self.function(inputs, self.w)


COMPUTED_WEIGHTS = {
    name: Form(lambda x, f=function: Computing(f)(x), (images(16, (4, 4)),), sqnr=35)
    for name, function in FUNCTIONS.items()
}

COMPUTED_KERNELS = {
    f"{name}, {recipe}": Form(
        lambda x, f=function: f(x),
        (images(16, (8, 8, 4)),),
        sqnr=sqnr,
        recipe=keras_qat.recipes.int8(per_channel=False) if recipe == "per tensor" else recipe,
        is_random=name == "a standardized kernel",
        trains=name != "a standardized kernel",  # Its bias precedes a normalization.
    )
    for recipe, sqnr in (("per tensor", 20), ("int4_weights", 8), ("int16x8", 30))
    for name, function in COMPUTED.items()
}


class Reading(layers.Layer):
    """Computes with another layer."""

    def __init__(self, function, other, **kwargs):
        super().__init__(**kwargs)
        self.function, self.other = function, other

    def call(self, x):
        return self.function(x, self.other)


PRODUCTS = {
    "weights": lambda x, table: tf.matmul(x, table.weights[0], transpose_b=True),
    "list of weights": lambda x, table: tf.matmul(x, table.weights, transpose_b=True),
    "variables": lambda x, table: tf.linalg.matmul(x, table.variables[0], transpose_b=True),
    "those that train": lambda x, table: x @ tf.transpose(table.trainable_weights[0]),
    "value": lambda x, table: tf.einsum("btd,vd->btv", x, table.embeddings.value()),
    "read_value": lambda x, table: tf.tensordot(x, table.embeddings.read_value(), [[2], [1]]),
    "dot": lambda x, table: keras.backend.dot(x, tf.transpose(table.trainable_variables[0])),
}


def language_model(product):
    def build(tokens):
        table = layers.Embedding(20, 8)
        return Reading(product, table)(layers.Dense(8, "relu")(table(tokens)))

    return build


LENT_WEIGHTS = forms(
    {name: language_model(product) for name, product in PRODUCTS.items()},
    rng().integers(0, 20, (16, 6)).astype("int32"),
    target="ethos_u55",
)
CONSTANTS = np.random.default_rng(0).normal(size=(2, 4, 4)).astype(np.float32)


class Product(layers.Layer):
    """Multiplies by an argument."""

    def call(self, x, kernel):
        return tf.matmul(x, kernel)


class Shared(layers.Layer):
    """Calls one layer twice."""

    def __init__(self, inner, shapes=(), **kwargs):
        super().__init__(**kwargs)
        self.inner, self.shapes = inner, shapes

    def build(self, _):
        self.pairs = [
            [self.add_weight(f"{name}{index}", shape, initializer="random_normal") for name in "ab"]
            for index, shape in enumerate(self.shapes)
        ]

    def call(self, x):
        first, second = zip(*self.pairs, strict=True) if self.pairs else ((), ())
        return self.inner([self.inner([x, *first]), *second])

    def get_config(self):
        return {**super().get_config(), "inner": self.inner, "shapes": self.shapes}


class Products(Shared):
    """Calls one layer twice, with arguments."""

    def call(self, x):
        ((first, second),) = self.pairs
        return self.inner(self.inner(x, first), second)


class OfConstants(Shared):
    """Calls one layer with two constants."""

    def call(self, x):
        return self.inner(self.inner(x, CONSTANTS[0]), CONSTANTS[1])


class OfSizes(Shared):
    """Calls one layer with two sizes."""

    def call(self, x):
        return self.inner(x) + self.inner(x[:, :2])


def biased(x):
    return tf.nn.bias_add(tf.matmul(x[0], x[1]), x[2])


def resized(x):
    return tf.reduce_sum(tf.image.resize(x[..., None], [x.shape[1] * 2, 4]), [1, 2])


def shapes(*rank):
    return [(4,) * axes for axes in rank]


CALLED_TWICE = {
    "tensordot": lambda: Shared(layers.Lambda(lambda x: tf.tensordot(*x, axes=[-1, 0])), shapes(2)),
    "bias": lambda: Shared(layers.Lambda(biased), shapes(2, 1)),
    "conv": lambda: Shared(layers.Lambda(lambda x: tf.nn.conv1d(x[0], x[1], 1, "SAME")), shapes(3)),
    "layer": lambda: Products(Product(), shapes(2)),
    "constants": lambda: OfConstants(Product()),
    "sizes": lambda: OfSizes(layers.Lambda(resized)),
}
SHARED_CALLS = forms(
    {name: lambda x, make=make: make()(x) for name, make in CALLED_TWICE.items()},
    images(16, (4, 4)),
    sqnr=34,
)
ROWS = rng().normal(size=(16, 4)).astype(np.float32)


class Plain:
    """A product with a bias, in an object that Keras does not know."""

    def __init__(self, rows, columns, name):
        super().__init__()
        self.kernel = tf.Variable(rng().normal(size=(rows, columns)).astype(np.float32), name=name)
        self.rest = {"biases": (tf.Variable(tf.zeros(columns), name=f"{name}_bias"),)}

    def __call__(self, x):
        return tf.matmul(x, self.kernel) + self.rest["biases"][0]


class Module(Plain, tf.Module):
    """A `Plain` object that Keras trains."""


class Held(layers.Layer):
    """Calls an object, and other objects in a list of an object."""

    def __init__(self, kind=Module, **kwargs):
        super().__init__(**kwargs)
        self.first = kind(4, 8, "first")
        self.first.again = self
        self.first.inside = [kind(8, 3, "second")]

    def call(self, x):
        return self.first.inside[0](tf.nn.relu(self.first(x)))

    def get_config(self):
        return super().get_config()


class Reader(layers.Layer):
    """Reads a kernel in an object of another layer."""

    def __init__(self, held, **kwargs):
        super().__init__(**kwargs)
        self.held = held

    def call(self, x):
        return tf.matmul(x, self.held.first.kernel, transpose_b=True)


class OfTable(layers.Layer):
    """Adds a float64 table from NumPy that does not train."""

    def build(self, shape):
        self.table = tf.Variable(np.sin(np.arange(32.0)).reshape(8, 4), trainable=False)

    def call(self, x):
        return x + tf.cast(self.table, x.dtype)


NUMBERS = {
    "rows of a table": (np.arange(5, dtype=np.int32), lambda x, held, table: x + table(held)),
    "in bytes": (np.arange(5, dtype=np.uint8), lambda x, held, table: x + table(held)),
    "steps": (np.array([3, 1, 0], np.int64), lambda x, held, _: tf.gather(x, held, axis=1)),
    "compared": (
        np.array([3, 1, 0, 2, 1], np.int32),
        lambda x, held, _: tf.where((held > 1)[:, None], x, -x),
    ),
    "a mask": (
        np.array([[1], [0], [1], [1], [0]], bool),
        lambda x, held, _: tf.where(held, x, 0.0),
    ),
    "real numbers": (np.arange(5, dtype=np.float32), lambda x, held, table: x + table(held)),
}


class HoldsNumbers(layers.Layer):
    """Holds constants that are not signals in a variable that does not train."""

    def __init__(self, form, **kwargs):
        super().__init__(**kwargs)
        numbers, self.function = NUMBERS[form]
        self.held = tf.Variable(numbers, trainable=False)
        self.table = layers.Embedding(5, 4)

    def call(self, x):
        return self.function(x, self.held, self.table)


def read_by_another(x):
    held = Held(Module, name="held")
    return Reader(held, name="reader")(layers.Dense(8, name="wide")(held(x)))


X = rng().normal(size=(16, 5, 4)).astype(np.float32)
HELD_WEIGHTS = {
    **forms({k.__name__: lambda x, k=k: Held(k)(x) for k in (Module, Plain)}, ROWS),
    "objects of other layers": Form(read_by_another, (ROWS,)),
    "constants of numpy": Form(
        lambda x: OfTable()(x), (rng().normal(size=(16, 8, 4)).astype("f"),)
    ),
    **forms(
        {
            f"numbers: {name}": lambda x, name=name: layers.Dense(3)(HoldsNumbers(name)(x))
            for name in NUMBERS
            if name != "real numbers"
        },
        X,
    ),
}
FORMS = {
    "computed weights": COMPUTED_WEIGHTS,
    "computed kernels": COMPUTED_KERNELS,
    "lent weights": LENT_WEIGHTS,
    "shared calls": SHARED_CALLS,
    "held weights": HELD_WEIGHTS,
}
