"""Tests faults of CMSIS-NN: files avoid them and compute the same, or `plan` lists them."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from benchmarks import kernel_faults
from keras_qat import recipes
from keras_qat.export.target_rewrites import rewrite_for
from keras_qat.ops.registry import op_named
from keras_qat.targets import CMSIS_NN, TFLM, Site, problems
from keras_qat.tflite.reader import FileGraph
from tests.helpers import images, keras, layers, quantize_on
from tests.ops.examples.example import BATCH
from tests.ops.harness import file_of, in_the_interpreter, node_of, random_inputs
from tests.ops.test_contracts import MATCHING

pytestmark = pytest.mark.filterwarnings("ignore:pack_int4=True. kernels sum:UserWarning")

SOLE = recipes.int8(per_channel=False)
FIVE_BITS = recipes.int8(activation_bits=5)
INT4 = recipes.int4_weights()


def transposed(size, **options):
    return layers.Conv2DTranspose(3, size, 2, **options)


def grouped():
    return layers.Conv2D(24, 3, padding="same", groups=12)


EXAMPLES = {
    "uneven padding": ((5, 4, 2), transposed(4, padding="same"), "int8"),
    "uneven padding, ReLU": ((5, 4, 2), transposed(5, padding="same", activation="relu"), "int8"),
    "small kernel": ((5, 4, 2), transposed(1), "int8"),
    "small kernel, 1D": ((5, 20), layers.Conv1DTranspose(3, 2, 3, padding="same"), "int8"),
    "cropped": ((5, 4, 2), transposed(3, padding="same", output_padding=0), "int8"),
    "output padding": ((5, 4, 2), transposed(2, output_padding=1), "int8"),
    "output padding, 1D": ((5, 2), layers.Conv1DTranspose(3, 2, 3, output_padding=2), "int8"),
    "ReLU of int16": ((5, 4, 2), transposed(3, activation="relu"), "int16x8"),
    "row with strides": ((11, 4), layers.Conv1D(3, 4, 2, padding="same"), "int8"),
    "row of an image": ((1, 10, 4), layers.Conv2D(3, (1, 3), (1, 3), activation="relu"), "int8"),
    "groups of int16": ((5, 5, 24), grouped(), "int16x8"),
    "groups of int16, one scale": ((5, 5, 24), grouped(), recipes.int16x8(per_channel=False)),
    "groups of int4": ((5, 5, 24), grouped(), INT4),
    "one scale": ((3, 8), layers.Dense(5, "relu"), SOLE),
    "dense on five axes": ((2, 2, 3, 5), layers.Dense(5), "int8"),
    "maximum on five axes": ((2, 3, 2, 3), lambda x: tf.maximum(x, tf.tanh(x)), "int8"),
    "clip on five axes": ((2, 3, 2, 3), layers.ReLU(), FIVE_BITS),
    "transpose of five axes": ((2, 3, 2, 3), layers.Permute((2, 1, 4, 3)), "int8"),
    "matrices on five axes": ((2, 2, 3, 3), lambda x: tf.matmul(x, x), "int8"),
    "maximum of int16": ((2, 3, 2, 3), lambda x: tf.maximum(x, tf.tanh(x)), "int16x8"),
    "clip on six axes": ((2, 2, 3, 2, 3), layers.ReLU(), FIVE_BITS),
    "broadcast on five axes": (
        (2, 3, 2, 3),
        lambda x: tf.maximum(x, tf.reduce_max(x, 1, True)),
        "int8",
    ),
    "states": ((3, 4), lambda x: layers.LSTM(4, stateful=True)(x), "int8"),
    "ReLU by itself": ((5, 40), layers.ReLU(), "int16x8"),
    "leaky ReLU": ((5, 40), layers.LeakyReLU(0.3), "int16x8"),
    "ReLU of five axes": ((2, 3, 2, 3), layers.ReLU(), "int16x8"),
    "leaky ReLU of five axes": ((2, 3, 2, 3), layers.LeakyReLU(0.3), "int16x8"),
    "difference of int16": ((5, 4), lambda x: x - tf.tanh(x), "int16x8"),
    "one class": ((3, 1), layers.Softmax(), "int16x8"),
}
"""Shape of the input without batch, layer and recipe."""

SHAPES = {name: shape for name, (shape, _, _) in EXAMPLES.items()}


@functools.cache
def calibrated(name):
    shape, layer, recipe = EXAMPLES[name]
    inputs = keras.Input(shape, 1)
    qat = keras_qat.quantize_model(keras.Model(inputs, layer(inputs)), recipe, target="tflm")
    keras_qat.calibrate(qat, images(4, shape), batch_size=1)
    return qat, keras_qat.export_tflite(qat, pack_int4=recipe is INT4)


def faults_of(contents):
    graph = FileGraph(contents)
    met = (CMSIS_NN.fault(Site(graph, operation)) for operation in graph.operations)
    return [fault for fault in met if fault is not None]


def codes(contents, x):
    return keras_qat.TFLiteModel(contents, kernels="tflm").predict(x)


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_fault_is_avoided_or_named(name):
    pytest.importorskip("tflite_micro")
    qat, plain = calibrated(name)
    met = faults_of(plain)
    assert [problem.reason for problem in problems(plain, CMSIS_NN)] == [
        problem.reason for problem in met
    ]
    assert met
    if any(fault.form is None for fault in met):
        assert problems(qat, "cmsis_nn")
        with pytest.warns(UserWarning, match=met[0].reason):
            keras_qat.export_tflite(qat, target="cmsis_nn")
        return
    packs = "int4" in name
    contents = keras_qat.export_tflite(qat, pack_int4=packs, target="cmsis_nn")
    assert problems(contents, CMSIS_NN) == problems(qat, CMSIS_NN) == ()
    x = images(8, SHAPES[name])
    assert np.array_equal(codes(contents, x), codes(plain, x))


@pytest.mark.slow
def test_each_fault_has_an_example():
    met = [fault for name in EXAMPLES for fault in faults_of(calibrated(name)[1])]
    assert set(CMSIS_NN.faults) - set(TFLM.faults) == set(met)


@pytest.mark.slow
def test_loops_keep_their_constants_beside_other_forms():
    """Unused constants are dropped, but a loop's constants are in separate graphs."""
    inputs = keras.Input((4, 3), 1)
    x = layers.GRU(2)(layers.Dense(3, "relu")(inputs))
    recipe = SOLE.override("GRU", quantize=False)
    qat = quantize_on(keras.Model(inputs, x), images(4, (4, 3)), recipe)
    plain, contents = (keras_qat.export_tflite(qat, target=name) for name in (None, "cmsis_nn"))
    files = [keras_qat.TFLiteModel(file) for file in (plain, contents)]
    assert np.array_equal(*(file.predict(images(4, (4, 3))) for file in files))


CASES = [
    pytest.param(op, bits, id=f"{op.name}-{bits}")
    for op in MATCHING
    for bits in (8, 5, 16)
    if op.has_kernel_for(bits)
]


def check_forms(op, bits, seed, **options):
    """Asserts that rewrites of an operator compute the same in TFLite Micro."""
    node, numbers = node_of(op, bits, seed, **options)
    plain, contents = (file_of(node, BATCH, rewrite_for(item)) for item in (TFLM, CMSIS_NN))
    if contents == plain or problems(contents, CMSIS_NN):
        return False
    inputs = random_inputs(node, numbers)
    results = [in_the_interpreter(variant, inputs, "tflm") for variant in (plain, contents)]
    assert all(map(np.array_equal, *results)), seed
    return True


def test_relu6_inside_of_an_int16_range():
    pytest.importorskip("tflite_micro")
    op = op_named("transpose_conv")
    assert any(check_forms(op, 16, seed, maximum=6.0) for seed in range(6))


@pytest.mark.slow
@pytest.mark.parametrize(("op", "bits"), CASES)
def test_random_examples(op, bits, seeds):
    pytest.importorskip("tflite_micro")
    for seed in range(min(seeds, 20)):
        for per_channel in (True, False):
            check_forms(op, bits, seed, per_channel=per_channel)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", kernel_faults.FAULTS)
def test_the_smallest_file_of_each_fault_is_found(name, tmp_path):
    kernel_faults.write(name, tmp_path)
    contents = (tmp_path / f"{name}.tflite").read_bytes()
    target = "xnnpack" if name == "mean_row" else "cmsis_nn"
    assert problems(contents, target) and not problems(contents, "tflm")
