"""Tests the table of TFLite Micro's operators against its interpreter."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat import recipes
from keras_qat.export.target_rewrites import rewrite_for
from keras_qat.ops.registry import op_named
from keras_qat.targets import TFLM, problems
from keras_qat.tflite.micro_interpreter import MicroInterpreter
from keras_qat.tflite.reader import FileGraph
from tests.helpers import build_model, images, keras, layers, observe
from tests.networks.small import functional
from tests.ops.examples.example import BATCH
from tests.ops.harness import file_of, in_integers, in_the_interpreter, node_of, random_inputs
from tests.ops.test_contracts import MATCHING

CASES = [
    pytest.param(op, bits, id=f"{op.name}-{bits}")
    for op in MATCHING
    for bits in (8, 16)
    if op.has_kernel_for(bits)
]


def runs(op, bits, seed):
    """Returns whether the interpreter runs an example, and whether the table expects it."""
    node, numbers = node_of(op, bits, seed)
    contents = file_of(node, BATCH)
    try:
        in_the_interpreter(contents, random_inputs(node, numbers), "tflm")
    except ValueError:
        return False, not problems(contents, TFLM)
    return True, not problems(contents, TFLM)


@pytest.mark.sample(6)
@pytest.mark.parametrize(("op", "bits"), CASES)
def test_the_table_says_what_runs(op, bits):
    pytest.importorskip("tflite_micro")
    there, here = runs(op, bits, 0)
    assert there == here


@pytest.mark.slow
@pytest.mark.parametrize(("op", "bits"), CASES)
def test_of_many_more(op, bits, seeds):
    pytest.importorskip("tflite_micro")
    for seed in range(1, min(seeds, 40)):
        there, here = runs(op, bits, seed)
        assert there == here, seed


def test_a_model_is_asked_before_it_is_trained():
    inputs = keras.Input((8, 8, 2))
    x = layers.Conv2D(4, 3, activation="gelu", name="conv")(inputs)
    x = tf.nn.depth_to_space(x, 2)
    qat = keras_qat.quantize_model(keras.Model(inputs, layers.Dense(3)(layers.Flatten()(x))))
    (problem,) = problems(qat, TFLM)
    assert str(problem).startswith("conv_activation: GELU: no kernel;")


MISSING = {
    "of 16 bits": (layers.UpSampling2D(interpolation="bilinear"), (4, 4, 2), "no kernel for int16"),
    "axes": (layers.Permute((2, 1, 3, 5, 4)), (2, 3, 4, 2, 2), "at most 5 axes, not 6"),
    "argmax": (lambda x: tf.argmax(x, -1), (4,), "for int32; pass output_type=tf.int32"),
}


@pytest.mark.parametrize("name", MISSING)
def test_what_is_missing_is_told(name):
    layer, shape, reason = MISSING[name]
    inputs = keras.Input(shape)
    recipe = "int16x8" if "16" in name else "int8"
    qat = keras_qat.quantize_model(keras.Model(inputs, layer(inputs)), recipe)
    (problem,) = problems(qat, TFLM)
    assert reason in str(problem)


def exported(layer, recipe="int16x8", shape=(5, 4)):
    inputs = keras.Input(shape, name="steps")
    qat = keras_qat.quantize_model(keras.Model(inputs, layer(inputs)), recipe, kernels="tflm")
    x = np.random.default_rng(1).normal(size=(4, *(size or 3 for size in shape)))
    keras_qat.calibrate(qat, x.astype(np.float32))
    return qat, keras_qat.export_tflite(qat, batch_size=1)


def refusal(contents):
    """Returns the interpreter's error for a file; None if it runs."""
    pytest.importorskip("tflite_micro")
    try:
        file = MicroInterpreter(contents)
        file.run({name: np.zeros(array.shape) for name, array in file.inputs.items()})
    except ValueError as error:
        return str(error)
    return None


def test_files_of_many_megabytes_are_run():
    """The arena for a file of 34 MB exceeded 2 GiB, which crashed."""
    _, contents = exported(layers.Dense(2))
    assert refusal(contents + bytes(34 << 20)) is None


@pytest.mark.slow
def test_loops_are_looked_into():
    """Keras splits off an empty tensor in each step, which TFLite Micro refuses."""
    _, contents = exported(layers.GRU(3))
    assert (problems(contents, TFLM), refusal(contents)) == ((), None)
    _, contents = exported(layers.GRU(3, reset_after=False, name="gru"))
    (problem,) = problems(contents, TFLM)
    assert problem.operator == "SPLIT_V"
    assert problem.reason == "no empty tensors"
    assert FileGraph(contents).operations[problem.index].kernel == "WHILE"
    assert "SPLIT_V" in refusal(contents)


@pytest.mark.parametrize(
    ("layer", "recipe", "kernel"),
    [
        (lambda x: tf.cast(x > 0.5, tf.float32), "int16x8", "CAST"),
        (
            lambda x: tf.cast(tf.concat([x > 0.5, x > 0.2], -1), tf.float32),
            "int16x8",
            "CONCATENATION",
        ),
        (layers.LayerNormalization(), "int8", "SQUARED_DIFFERENCE"),
    ],
)
def test_kernels_that_were_said_to_be_missing(layer, recipe, kernel):
    _, contents = exported(layer, recipe)
    assert kernel in FileGraph(contents).kernels
    assert (problems(contents, TFLM), refusal(contents)) == ((), None)


def test_slices_at_computed_positions():
    x, index = keras.Input((6, 3)), keras.Input((1,), dtype="int32")
    qat = keras_qat.quantize_model(keras.Model([x, index], x[:, index[0, 0]]))
    observe(qat, images(8, (6, 3)), np.ones((8, 1), np.int32))
    contents = keras_qat.export_tflite(qat, batch_size=1)
    assert any(problem.reason.startswith("begin, end") for problem in problems(contents, TFLM))


def test_open_sizes_are_told():
    qat, contents = exported(layers.Conv1D(3, 2, name="conv"), "int8", (None, 4))
    for variant in (qat, contents):
        (problem,) = problems(variant, TFLM)
        assert str(problem).endswith(
            "fixed sizes only; quantize keras.Model(x, model(x)), where x is a keras.Input with "
            "fixed sizes"
        )
    assert "needs fixed sizes" in refusal(contents)
    model = functional((None, 4), build=lambda x: layers.LSTM(3)(layers.Conv1D(3, 2)(x)))
    _, contents = exported(model, "int8", (6, 4))
    assert (problems(contents, TFLM), refusal(contents)) == ((), None)


def test_a_model_that_runs_has_none():
    inputs = keras.Input((6, 6, 2))
    x = layers.BatchNormalization()(layers.Conv2D(4, 3, use_bias=False)(inputs))
    x = layers.Add()([layers.ReLU(6.0)(x), layers.Conv2D(4, 1)(layers.ReLU(6.0)(x))])
    model = keras.Model(inputs, layers.Softmax()(layers.Dense(3)(layers.Flatten()(x))))
    assert problems(keras_qat.quantize_model(model), TFLM) == ()
    assert np.size(problems(keras_qat.quantize_model(model, "int16x8"), TFLM)) == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "float32"])
def test_ends_of_each_type_run(dtype):
    pytest.importorskip("tflite_micro")
    qat = keras_qat.quantize_model(build_model((5,), layers.Dense(3)), kernels="tflm")
    x = np.random.default_rng(1).normal(size=(8, 5)).astype(np.float32)
    keras_qat.calibrate(qat, x)
    contents = keras_qat.export_tflite(qat, batch_size=1, input_dtype=dtype, output_dtype=dtype)
    assert problems(contents, TFLM) == ()
    assert keras_qat.verify(qat, contents, x, kernels="tflm").identical == 1


def arena_of(model, recipe):
    qat = observe(keras_qat.quantize_model(model, recipe, target="tflm"), images(8, (40,)))
    return MicroInterpreter(keras_qat.export_tflite(qat)).arena_size()


def test_a_plan_tells_what_the_scales_of_dense_layers_keep():
    pytest.importorskip("tflite_micro")
    model = functional((40,), build=lambda x: layers.Dense(32)(layers.Dense(128, "relu")(x)))
    one_scale = recipes.int8(per_channel=False)
    plan = keras_qat.plan(model, target="tflm")
    assert plan.channel_bytes == arena_of(model, "int8") - arena_of(model, one_scale) == 1280
    assert "dense layers keep 1280 bytes in memory" in str(plan)
    assert "dense layers" not in str(keras_qat.plan(model, one_scale, target="tflm"))


@pytest.mark.parametrize("name", ["softsign", "softplus"])
def test_tables_of_16_bits_are_looked_up_in_bytes(name):
    """The largest values, 32640 to 32767, once became the smallest."""
    pytest.importorskip("tflite_micro")
    node, numbers = node_of(op_named(name), 16, 0)
    contents = file_of(node, BATCH, rewrite_for(TFLM))
    inputs = random_inputs(node, numbers)
    (expected,) = in_integers(node, inputs, "tflm")
    assert expected.max() > 32640
    (result,) = in_the_interpreter(contents, inputs, "tflm")
    np.testing.assert_array_equal(result, expected)
