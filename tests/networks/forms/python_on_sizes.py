"""Custom layers with Python code that reads sizes, and TensorFlow's loops of known length."""

import tensorflow as tf

from tests.helpers import images, keras, layers
from tests.networks.forms.form import forms

K = keras.backend
HABITS = {}


def habit(function):
    HABITS[function.__name__] = function
    return function


def step(layer, x):
    return tf.tanh(tf.matmul(x, layer.weight))


@habit
def length(layer, x):
    share = tf.reshape(
        step(layer, x[:, 0]), (tf.shape(x)[0],) + (1,) * (len(tf.shape(x)) - 2) + (2,)
    )
    return x * share + x / len(x[0])


@habit
def steps_of_a_range(layer, x):
    y = x[:, 0]
    for index in range(tf.shape(x)[1]):
        y = y + step(layer, x[:, index])
    return y


@habit
def steps_of_tensors(layer, x):
    y = x[:, 0]
    for index in tf.range(tf.shape(x)[1]):
        y = y + step(layer, x[:, index])
    return y


@habit
def branch_of_sizes(layer, x):
    if tf.rank(x) == 3 and tf.shape(x)[1] > 2 and not tf.size(x[0]) < 3:
        x = step(layer, x)
    return x


@habit
def negative_numbers(layer, x):
    steps = tf.range(tf.shape(x)[1])
    return step(layer, x) * tf.cast(steps - 5 > -4, tf.float32)[:, None]


@habit
def heads_beside_examples(layer, x):
    """Merges examples and heads to one axis, and infers the steps, as in BART."""
    count, steps = tf.shape(x)[0], tf.shape(x)[1]
    heads = tf.transpose(tf.reshape(step(layer, x), (count, steps, 2, 1)), (0, 2, 1, 3))
    heads = tf.reshape(heads, (count * 2, -1, 1))
    shares = tf.nn.softmax(4.0 * tf.matmul(heads, heads, transpose_b=True))
    heads = tf.reshape(tf.matmul(shares, heads), (count, 2, steps, 1))
    return tf.reshape(tf.transpose(heads, (0, 2, 1, 3)), (count, steps, 2))


@habit
def table_of_all_heads(layer, x):
    """Copies positions for each example along one axis with the heads, as in DeBERTa."""
    heads = tf.reshape(tf.transpose(step(layer, x), (0, 2, 1)), (-1, 3, 1))
    table = tf.reshape(layer.weight, (2, 1, 2))
    table = tf.tile(table, [tf.shape(heads)[0] // 2, 1, 1])
    return tf.reshape(tf.matmul(heads, table), (-1, 2, 6))


@habit
def flat_grid(layer, x):
    """Flattens all coordinates along one axis for each example, as in spatial transformers."""
    count = tf.shape(x)[0]
    grid = tf.tile(tf.linspace(-1.0, 1.0, 10), tf.stack([count]))
    return tf.matmul(step(layer, x), tf.reshape(grid, tf.stack([count, 2, -1])))


class Measuring(layers.Layer):
    """A layer that also returns sizes, like the embeddings of vision transformers."""

    def call(self, x):
        return 2.0 * x, (x.shape[1], tf.shape(x)[2] // 2, x.shape[1] > 2)


class Comparing(layers.Layer):
    """Computes differently for different sizes, which it receives as arguments."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(2)

    def call(self, x, sizes):
        steps = tf.reduce_min(sizes[:2])
        width = steps if steps <= 2 else sizes[0]
        rest = (2 - sizes[0] % 2) % 2
        x = tf.pad(x, [[0, 0], [0, rest], [0, 0]])
        x = tf.reshape(x, [-1, (sizes[0] + rest) // 2, 2 * width, 2 // width])
        x = tf.reshape(x, (tf.shape(x)[0], -1, 2))
        return self.dense(x) if sizes[2] else x


@habit
def sizes_that_layers_return(layer, x):
    measure, compare = layer.inside
    x, sizes = measure(step(layer, x))
    x = x + 0.1 if sizes[0] > 3 or not sizes[2] else -x
    return compare(x, sizes)


@habit
def cond(layer, x):
    return tf.cond(tf.shape(x)[1] > 2, lambda: step(layer, x), lambda: x)


@habit
def switch(layer, x):
    return K.switch(tf.shape(x)[1] < 2, lambda: x, lambda: step(layer, x))


@habit
def while_loop(layer, x):
    body = lambda i, y: (i + 1, y + step(layer, x[:, i]))  # noqa: E731
    return tf.while_loop(lambda i, y: i < tf.shape(x)[1], body, (0, x[:, 0]))[1]


@habit
def while_loop_of_few_steps(layer, x):
    body = lambda y: (step(layer, y),)  # noqa: E731
    return tf.while_loop(lambda y: True, body, (x,), maximum_iterations=2)[0]


@habit
def array(layer, x):
    states = tf.TensorArray(tf.float32, size=tf.shape(x)[1])
    for index in tf.range(tf.shape(x)[1]):
        states = states.write(index, step(layer, x[:, index]))
    return tf.transpose(states.stack(), (1, 0, 2)) + states.read(0)[:, None]


@habit
def array_of_rows(layer, x):
    states = tf.TensorArray(tf.float32, size=3).unstack(tf.transpose(x, (1, 0, 2)))
    rows = tf.TensorArray(tf.float32, size=0, dynamic_size=True)
    _, rows = tf.while_loop(
        lambda i, rows: i < states.size(),
        lambda i, rows: (i + 1, rows.write(i, step(layer, states.read(i)))),
        (0, rows),
    )
    return tf.concat([rows.concat(), rows.gather([1])[0]], 0)


@habit
def maps(layer, x):
    rows, function = tf.transpose(x, (1, 0, 2)), lambda row: step(layer, row)
    return tf.map_fn(function, rows) + tf.vectorized_map(function, rows) + K.map_fn(function, rows)


@habit
def backend_rnn(layer, x):
    def one(inputs, states):
        state = step(layer, inputs) + 0.5 * states[0]
        return state, [state]

    last, outputs, _ = K.rnn(one, x, [tf.zeros_like(x[:, 0])])
    return outputs + last[:, None]


class Own(layers.Layer):
    def __init__(self, habit, **kwargs):
        super().__init__(**kwargs)
        self.habit = habit
        if habit == "sizes_that_layers_return":
            self.inside = Measuring(), Comparing()

    def build(self, shape):
        self.weight = self.add_weight("weight", (2, 2))

    def call(self, x):
        return HABITS[self.habit](self, x)

    def get_config(self):
        return {**super().get_config(), "habit": self.habit}


PYTHON_ON_SIZES = forms(
    {name: lambda x, name=name: layers.Activation("relu")(Own(name)(x)) for name in HABITS},
    images(32, (3, 2)),
    sqnr={"": 31, "while_loop_of_few_steps": 27},
)
FORMS = {"python on sizes": PYTHON_ON_SIZES}
