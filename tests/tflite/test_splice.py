"""Tests inserting the graphs of other files into a file."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from keras_qat.keras2.backend import keras
from keras_qat.tflite.builder import Builder
from keras_qat.tflite.interpreter import FileInterpreter
from keras_qat.tflite.schema import unpack
from keras_qat.tflite.splice import splice_model


def converted(function, *specs) -> bytes:
    traced = tf.function(function).get_concrete_function(*specs)
    return tf.lite.TFLiteConverter.from_concrete_functions([traced]).convert()


def spliced(contents: bytes, repeats: int = 1, shape=(None, 4), dtype="float32") -> FileInterpreter:
    """Returns a file that computes another file's graph repeatedly."""
    builder = Builder()
    first = here = builder.tensor("x", shape, dtype)
    for place in range(repeats):
        there = builder.tensor(f"y{place}", shape, dtype)
        splice_model(builder, unpack(contents), [here], [there], prefix=f"part{place}/")
        here = there
    return FileInterpreter(builder.finish({"x": first}, {"y": here}))


X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
SPEC = tf.TensorSpec((None, 4), tf.float32)


def test_a_convolution():
    keras.utils.set_random_seed(0)
    shape = (None, 5, 6, 2)
    layer = keras.layers.Conv2D(2, 3, padding="same", activation="relu")
    layer.build(shape)
    file = spliced(converted(layer, tf.TensorSpec(shape, tf.float32)), 2, shape)
    x = np.random.default_rng(0).normal(size=(3, 5, 6, 2)).astype(np.float32)
    np.testing.assert_allclose(file.run_once({"x": x})["y"], layer(layer(x)), rtol=1e-5, atol=1e-5)


def test_equal_constants_are_held_once():
    weights = tf.constant(np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32))
    contents = converted(lambda x: tf.matmul(x, weights) @ weights, SPEC)
    builder = Builder()
    tensors = [builder.tensor(name, (None, 4), "float32") for name in "xyz"]
    for source, target in itertools.pairwise(tensors):
        splice_model(builder, unpack(contents), [source], [target])
    sizes = [buffer.data.size for buffer in builder.model.buffers if buffer.data is not None]
    assert sizes.count(64) == 1
    assert len(builder.model.operatorCodes) == 1


def test_loops_and_branches():
    def function(x):
        below = lambda i, x: i < 3  # noqa: E731
        step = lambda i, x: (i + 1, tf.cond(i > 1, lambda: x + 1.0, lambda: x * 2.0))  # noqa: E731
        return tf.while_loop(below, step, (0, x))[1]

    file = spliced(converted(function, SPEC), 2)
    np.testing.assert_allclose(file.run_once({"x": X})["y"], function(function(X)), rtol=1e-6)


def test_an_input_that_is_an_output_and_a_constant_one():
    contents = converted(lambda x: x, SPEC)
    np.testing.assert_array_equal(spliced(contents).run_once({"x": X})["y"], X)
    contents = converted(lambda x: tf.constant(X[:1]), tf.TensorSpec((1, 4), tf.float32))
    outputs = spliced(contents, shape=(1, 4)).run_once({"x": X[1:2]})["y"]
    np.testing.assert_array_equal(outputs, X[:1])


def test_custom_operators_keep_their_options():
    tf_function = tf.function(lambda x: tf.raw_ops.Betainc(a=x, b=x, x=x))
    converter = tf.lite.TFLiteConverter.from_concrete_functions(
        [tf_function.get_concrete_function(SPEC)]
    )
    converter.allow_custom_ops = True
    builder = Builder()
    ends = [builder.tensor(name, (None, 4), "float32") for name in "xy"]
    splice_model(builder, unpack(converter.convert()), ends[:1], ends[1:])
    (operator,), (code,) = builder.graph.operators, builder.model.operatorCodes
    assert code.customCode == b"Betainc"
    assert operator.customOptions is not None


def test_quantized_values_keep_their_parameters():
    from keras_qat.arithmetic.quant_params import QuantParams

    contents = converted(lambda x: tf.transpose(x)[::-1], tf.TensorSpec((2, 4), tf.int8))
    builder, params = Builder(), QuantParams(np.float32(0.5), 3)
    ends = [builder.tensor(*item, "int8", params) for item in (("x", (2, 4)), ("y", (4, 2)))]
    splice_model(builder, unpack(contents), ends[:1], ends[1:], params)
    held = [t for t in builder.graph.tensors if t.type == builder.graph.tensors[0].type]
    assert len(held) == 3
    assert all(reference.quantization.zeroPoint[0] == 3 for reference in held)
    x = np.arange(8, dtype=np.int8).reshape(2, 4)
    outputs = FileInterpreter(builder.finish({"x": ends[0]}, {"y": ends[1]})).run_once({"x": x})[
        "y"
    ]
    np.testing.assert_array_equal(outputs, x.T[::-1])


def test_other_types_are_refused():
    builder = Builder()
    ends = [builder.tensor(name, (None, 4), "int32") for name in "xy"]
    with pytest.raises(ValueError, match="float32, not int32"):
        splice_model(builder, unpack(converted(tf.tanh, SPEC)), ends[:1], ends[1:])
    with pytest.raises(ValueError, match="Expected 2 tensors to connect, got 1"):
        splice_model(builder, unpack(converted(tf.tanh, SPEC)), ends[:1], [])
