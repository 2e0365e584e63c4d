"""Tests that inference returns the same quantized values as the file's kernels."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.tflite.interpreter import FileInterpreter
from tests.helpers import assert_all_close, images, observe, scramble
from tests.networks.small import functional, layers


def model_with(layer, shape=(6, 6, 4)):
    return scramble(
        functional(shape, build=lambda x: layers.Conv2D(3, 1)(layer(layers.Conv2D(4, 3)(x))))
    )


LAYERS = {
    "leaky": lambda: layers.LeakyReLU(0.23),
    "prelu": lambda: layers.PReLU(shared_axes=[1, 2]),
    "resize": lambda: layers.UpSampling2D(interpolation="bilinear"),
    "hard_swish": lambda: lambda x: x * tf.nn.relu6(x + 3.0) / 6.0,
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_pass(kind):
    x = tf.constant(images(4, (6, 6, 4)))
    qat = observe(keras_qat.quantize_model(model_with(LAYERS[kind]())), x.numpy())
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(qat(x, training=False) ** 2)
    assert np.abs(tape.gradient(loss, x)).max() > 0


def network(x):
    """Applies most kinds of kernels one after the other."""
    x = layers.ReLU(6.0)(layers.BatchNormalization()(layers.Conv2D(8, 3, use_bias=False)(x)))
    y = layers.BatchNormalization()(layers.DepthwiseConv2D(3, padding="same")(x))
    x = layers.ReLU()(layers.Add()([x, y]))
    gate = layers.GlobalAveragePooling2D(keepdims=True)(x)
    gate = layers.Conv2D(8, 1, activation="sigmoid")(layers.Conv2D(4, 1, activation="swish")(gate))
    x = layers.MaxPooling2D()(layers.Multiply()([x, gate]))
    return layers.Dense(10, activation="softmax")(layers.Flatten()(x))


@pytest.fixture(scope="module")
def exact():
    x = images(64, (8, 8, 3))
    qat = observe(keras_qat.quantize_model(scramble(functional((8, 8, 3), build=network))), x)
    file = FileInterpreter(keras_qat.export_tflite(qat, output_dtype="float32"))
    (codes,) = file.run({qat.input_names[0]: x}).values()
    return qat, x, codes


@pytest.mark.legacy
def test_outputs_are_those_of_the_file_to_the_last_bit(exact):
    qat, x, expected = exact
    np.testing.assert_array_equal(qat.predict(x, verbose=0), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        lambda qat, x: qat(x, training=False),
        tf.function(lambda qat, x: qat(x, training=False)),
        tf.function(lambda qat, x: qat(x, training=tf.constant(False))),
        lambda qat, x: qat.predict_on_batch(x),
    ],
    ids=["eager", "function", "training unknown", "on batch"],
)
def test_however_the_model_is_called(exact, call):
    qat, x, expected = exact
    np.testing.assert_array_equal(call(qat, x), expected)


def test_gradients_at_inference_are_those_of_the_simulation():
    """Compares gradients by the input and by weights, which users may train."""
    model = functional((4,), build=lambda x: layers.Dense(3)(layers.Dense(5, "relu")(x)))
    qat = observe(keras_qat.quantize_model(model), images(8, (4,)))
    x = tf.constant(images(8, (4,)))

    def gradients():
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(qat(x, training=False)[:, 0])
        return tape.gradient(loss, [x, *qat.trainable_variables])

    assert_all_close(gradients(), tf.function(gradients)(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_gradients_in_a_graph_for_inference_alone(exact):
    qat, x, _ = exact
    x = tf.constant(x[:4])

    def norm(model):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(model(x, training=False)[:, 0])
        return tf.norm(tape.gradient(loss, x))

    class Model(type(qat)):
        def test_step(self, data):
            return {"norm": norm(self)}

    model = Model.from_config(qat.get_config())
    model.set_weights(qat.get_weights())
    model.compile()
    result = model.evaluate(x, verbose=0, return_dict=True)["norm"]
    assert result == pytest.approx(float(norm(qat)), rel=1e-4)
