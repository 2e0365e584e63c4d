"""Numbers that a model computes from its tensors' sizes are constants of the file."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.graph.calls import flatten_values
from keras_qat.graph.read_model import read_model
from keras_qat.graph.sizes import set_static_shapes
from keras_qat.ops.weighted_sums import RECENT
from tests.end_to_end.exact import assert_exact_everywhere, assert_trains_and_is_kept
from tests.helpers import images, keras, layers, observe, quantize_on

pytestmark = pytest.mark.legacy

SHAPE = (8, 6)


def halved(x):
    """Divides a size by an integer, which gives float64."""
    return tf.reshape(x, [-1, tf.cast(tf.shape(x)[1] / 2, tf.int32), 2 * x.shape[2]])


def with_positions(x):
    count = tf.shape(x)[1]
    positions = tf.cast(tf.range(count), tf.float32) / tf.cast(count, tf.float32)
    return x + positions[tf.newaxis, :, tf.newaxis]


def flattened(x):
    """Reads all sizes but the last two, as code does that takes any number of axes."""
    y = tf.stack([x, x], axis=-1)
    return tf.reshape(y, tf.concat([tf.shape(y)[:-2], [12]], axis=0))


def multiplied(x):
    """As `K.batch_flatten`."""
    y = tf.reshape(x, [tf.shape(x)[0], tf.reduce_prod(tf.shape(x)[1:])])
    return tf.reshape(y, [-1, *SHAPE])


def on_a_grid(x):
    """As anchors of detectors, with copies for each example."""
    count, rows, columns = tf.unstack(tf.shape(x))
    parts = tf.meshgrid(tf.range(0.0, columns), tf.range(0.0, rows))
    return x + tf.tile(tf.expand_dims(parts[0] * 0.1 - parts[1] * 0.2, 0), [count, 1, 1])


def clipped(x):
    """As boxes are clipped to the size of an image."""
    _, rows, columns = tf.unstack(tf.cast(tf.shape(x), tf.float32))
    return tf.clip_by_value(x * 5.0, 0.0, columns - 1.0) / rows


def of_earlier_steps(x):
    """As the masks of temporal fusion transformers."""
    earlier = tf.cumsum(tf.eye(tf.shape(x)[1], batch_shape=tf.shape(x)[:1]), 1)
    return tf.matmul(earlier, x)


def largest(x):
    """As sparsemax sorts."""
    return x - tf.math.top_k(x, k=tf.shape(x)[-1]).values


def by_rank(x):
    """Axes that are counted from the number of axes, as code does that takes any."""
    last = tf.rank(x) - 1
    swapped = tf.transpose(x, tf.concat([tf.range(last - 1), [last], [last - 1]], 0))
    y = tf.concat([x, tf.roll(x, tf.shape(x)[1] // 2, 1)], axis=last)
    y += tf.expand_dims(tf.reduce_mean(swapped, axis=last - 1), last)
    return y - tf.expand_dims(tf.reduce_max(x, axis=last), last)


def one_hot(x):
    return x + 0.1 * tf.one_hot(tf.argmax(x, axis=tf.rank(x) - 1), depth=tf.shape(x)[-1])


def cut(x):
    """As relative positions are shifted in Conformers: no size is a number in the code."""
    rows, columns = tf.shape(x)[1], tf.shape(x)[2]
    y = tf.reshape(tf.pad(x, [[0, 0], [0, 0], [1, 0]]), [-1, columns + 1, rows])
    y = tf.reshape(y[:, 1:], [-1, rows, columns])
    return y[:, : rows // 2 + 1, :columns] + tf.slice(x, [0, 0, 0], [-1, rows // 2 + 1, columns])


class OfTable(layers.Layer):
    """As rotations by position: the first rows of a table, that another layer reads."""

    def __init__(self):
        super().__init__()
        self.table = tf.constant(np.cos(np.arange(96.0)).reshape(16, 6), tf.float32)
        self.inner = Product()

    def call(self, x):
        return self.inner(x, self.table[: tf.shape(x)[1]][None])


class Product(layers.Layer):
    def call(self, x, table):
        return x * table


def model_of(function, shape=SHAPE):
    keras.utils.set_random_seed(1)
    x = keras.Input(shape)
    y = function(layers.Dense(6, activation="relu")(x))
    return keras.Model(x, layers.Dense(3)(y))


@pytest.mark.sample(1)
@pytest.mark.parametrize("opened", [False, True], ids=["operations", "Lambda"])
@pytest.mark.parametrize(
    "function",
    [
        *(halved, with_positions, flattened, multiplied, on_a_grid, clipped, of_earlier_steps, cut),
        *(largest, by_rank, one_hot),
    ],
)
def test_what_sizes_give_is_constant(function, opened, tmp_path):
    model, x = model_of(layers.Lambda(function) if opened else function), images(32, SHAPE)
    qat = quantize_on(model, x, strict=True)
    expected = model.predict(x, verbose=0)
    error = qat.predict(x, verbose=0) - expected
    assert np.square(error).mean() < 1e-3 * np.square(expected).mean()
    assert_exact_everywhere(qat, x, "xnnpack")
    if not opened:  # Python's own lambdas need `safe_mode`.
        assert_trains_and_is_kept(keras_qat.quantize_model(model), x, tmp_path)


@pytest.mark.sample(1)
@pytest.mark.parametrize("function", [by_rank, one_hot, cut, lambda x: OfTable()(x)])
def test_options_that_are_computed_sizes(function):
    model, x = model_of(function), images(8, SHAPE)
    qat = observe(keras_qat.quantize_model(model, strict=True), x)
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), x).identical == 1


class RootMeanSquare(layers.Layer):
    def call(self, x):
        return x * tf.math.rsqrt(tf.reduce_mean(x**2, axis=-1, keepdims=True) + 1e-3)


class FirstRows(layers.Layer):
    """As rotations by position in LLaMA: rows of a constant table, by the steps."""

    def call(self, x):
        table = tf.constant(np.cos(np.arange(48.0)).reshape(16, 1, 3), tf.float32)
        first, second = tf.unstack(x, axis=-2)
        return (first + second) * table[0 : 0 + tf.shape(first)[-3]]


def test_models_of_any_length_that_are_called_with_a_known_one():
    steps = keras.Input((None, 6))
    halves = layers.Reshape((-1, 1, 2, 3))(RootMeanSquare()(layers.Dense(6)(steps)))
    inner = keras.Model(steps, FirstRows()(halves))
    inputs = keras.Input(SHAPE)
    model = keras.Model(inputs, layers.Dense(3)(layers.Reshape((8, 3))(inner(inputs))))
    assert not keras_qat.plan(model, target="ethos_u55").float_layers


class Heads(layers.Layer):
    """As ports of vision transformers: sizes of each head are left open."""

    def __init__(self):
        super().__init__()
        self.both, self.end = layers.Dense(12), layers.Dense(6)

    def call(self, x):
        count, steps = tf.unstack(tf.shape(x)[:2])
        y = tf.transpose(tf.reshape(self.both(x), (count, steps, 2, 3, -1)), (2, 0, 3, 1, 4))
        scores = tf.nn.softmax(tf.matmul(y[0], y[1], transpose_b=True))
        y = tf.transpose(tf.matmul(scores, y[1]), (0, 2, 1, 3))
        return self.end(tf.reshape(y, (count, steps, -1)))


class Frames(layers.Layer):
    def call(self, x):
        return tf.signal.frame(x, 8, 4)


class Normalize(layers.Layer):
    def call(self, x):
        x = x - tf.reduce_mean(x, -1, keepdims=True)
        return x / tf.sqrt(tf.reduce_mean(tf.square(x), -1, keepdims=True) + 1e-3)


class Around(layers.Layer):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x):
        return self.inner(x)


@pytest.mark.sample(1)
@pytest.mark.skipif(not RECENT, reason="norms are in float there")
@pytest.mark.parametrize("around", [lambda inner: inner, Around])
def test_sizes_that_opened_layers_give_to_those_behind_them(around):
    inputs, sound = keras.Input((32,)), keras.Input((None,))
    frames = layers.Dense(8)(Normalize()(Frames()(sound)))
    outputs = layers.Lambda(lambda x: tf.signal.overlap_and_add(x, 4))(frames)
    model = keras.Model(inputs, around(keras.Model(sound, outputs))(inputs))
    assert not keras_qat.plan(model, target="ethos_u55").float_layers


@pytest.mark.skipif(not RECENT, reason="this TensorFlow's runtime rounds products otherwise")
def test_sizes_that_follow_behind_an_open_axis():
    heads = Heads()
    heads(np.zeros((1, *SHAPE), np.float32))  # Makes the weights, which open sizes could not.
    model, x = model_of(heads), images(8, SHAPE)
    qat = observe(keras_qat.quantize_model(model, strict=True), x)
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), x).identical == 1


def test_what_is_the_same_for_many_examples_alone_is_no_constant():
    model = model_of(lambda x: x * tf.cast(tf.minimum(tf.shape(x)[0], 5), tf.float32))
    qat = keras_qat.quantize_model(model)
    keras_qat.set_quantization(qat, False)
    x = images(3, SHAPE)
    np.testing.assert_allclose(qat(x), model(x), rtol=1e-5)


def dropped(x):
    return x + tf.nn.dropout(tf.cast(tf.range(tf.shape(x)[1]), tf.float32), 0.5)[:, tf.newaxis]


@pytest.mark.parametrize(
    "function", [lambda x: x + tf.random.uniform([tf.shape(x)[1], 1]), dropped]
)
def test_random_numbers_of_a_known_shape_stay_random(function):
    model = model_of(function)
    qat = observe(keras_qat.quantize_model(model), images(32, SHAPE))
    first, *others = (qat(images(1, SHAPE)) for _ in range(6))
    assert any(np.any(first != other) for other in others)


def test_sizes_that_are_unknown_and_divided_say_what_to_do():
    with pytest.raises(ValueError, match=r"divides integers.*Use //, or inputs of known sizes"):
        keras_qat.plan(model_of(halved, (None, 6)))


class Positions(layers.Layer):
    """Looks up a vector for each position, which is a constant without its table."""

    def build(self, input_shape):
        self.table = layers.Embedding(input_shape[1], input_shape[2])
        super().build(input_shape)

    def call(self, x):
        steps = tf.range(tf.shape(x)[1])
        return x + self.table(steps) + self.table(tf.cast(steps, tf.float32))[tf.newaxis]


def test_tables_of_constant_positions_train():
    qat = keras_qat.quantize_model(model_of(Positions()))
    (table,) = [weight for weight in qat.trainable_weights if "table" in weight.name]
    before = table.numpy()
    qat.compile("sgd", "mse")
    qat.fit(images(8, SHAPE), np.ones((8, 8, 3)), verbose=0)
    assert np.any(table.numpy() != before)


def test_weights_in_float64_are_not_taken_for_a_quotient():
    x = keras.Input((4,), dtype="int32")
    with pytest.raises(ValueError, match=r"computes, or holds its weights, in float64"):
        keras_qat.plan(keras.Model(x, layers.Embedding(5, 3, dtype="float64")(x)))


def test_rows_of_each_example():
    """What is behind them has sizes that follow from how many rows there are."""
    inputs = keras.Input((6, 4))
    count = tf.shape(inputs)[0]
    rows = tf.reshape(inputs, (-1, 4))
    first, second = tf.split(tf.concat([inputs, inputs], 0), 2)
    outputs = [
        tf.reshape(y, (count, -1, 2))
        for y in (
            tf.tile(rows, [3, 1]),
            tf.repeat(rows, 2, axis=0),
            rows[::2],
            tf.gather(rows, 3 * tf.range(count)),
            tf.concat([rows, rows], 0),
            tf.concat([rows, rows], 0)[: 6 * count],
            first + second,
        )
    ]
    graph = read_model(keras.Model(inputs, outputs))
    set_static_shapes(graph)
    steps = [value.shape[1] for value in flatten_values(graph.outputs)]
    assert steps == [36, 24, 6, 2, 24, 12, 12]
