"""Tests faults of LiteRT's kernels: files avoid them on all processors, and compute the same."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from benchmarks import kernel_faults
from keras_qat.config.targets.litert import MOST_IN_ROW
from keras_qat.export.target_rewrites import rewrite_for
from keras_qat.targets import TFLM, problems
from keras_qat.tflite.reader import FileGraph
from tests.comparison import RUNNABLE
from tests.helpers import images, keras, layers, observe
from tests.ops.harness import assert_same, file_of, make_node, random_inputs
from tests.ops.test_movement import calls_of

COLUMN = ["EXPAND_DIMS", "MEAN", "SQUEEZE"]
LONG = MOST_IN_ROW + 1

MEANS = {
    "one axis": (lambda x: tf.reduce_mean(x, 1), (LONG,)),
    "kept axes": (lambda x: tf.reduce_mean(x, -1, keepdims=True), (2, LONG)),
    "adjacent axes": (lambda x: tf.reduce_mean(x, (2, 3)), (2, 64, 65)),
    "all axes": (tf.reduce_mean, (2, LONG)),
    "axes around another one": (lambda x: tf.reduce_mean(x, (1, 3)), (2, 2, LONG)),
    "five axes": (lambda x: tf.reduce_mean(x, (2, 4)), (1, 2, 2, LONG)),
    "open size": (lambda x: tf.reduce_mean(x, 1), (None,)),
    "open sizes": (lambda x: tf.reduce_mean(x, 2), (None, None)),
    "channels first": (layers.GlobalAveragePooling1D("channels_first"), (2, LONG)),
}
SHORT = {
    "few values": (lambda x: tf.reduce_mean(x, 1), (MOST_IN_ROW,)),
    "another axis": (lambda x: tf.reduce_mean(x, 1), (LONG, 2)),
    "few values beside another axis": (lambda x: tf.reduce_mean(x, (1, 3)), (LONG, 2, 2)),
    "pooling": (layers.GlobalAveragePooling2D(), (70, 70, 1)),
}


def mean_of(build, shape, bits=8):
    """Returns a mean, and inputs with the smallest and the largest sum."""
    node = make_node(calls_of(build, shape)[-1], bits, np.random.default_rng(0))
    ((name, codes),) = random_inputs(node, np.random.default_rng(1)).items()
    codes[0], codes[1] = np.iinfo(codes.dtype).min, np.iinfo(codes.dtype).max
    return node, {name: codes}


def kernels_of(contents):
    return [operation.kernel for operation in FileGraph(contents).operations]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MEANS)
def test_long_rows_are_averaged_as_columns(name):
    """A processor without VNNI computes the plain file incorrectly."""
    node, inputs = mean_of(*MEANS[name])
    plain, contents = file_of(node, rewrite=rewrite_for(TFLM)), file_of(node)
    assert [kernels_of(file) for file in (plain, contents)] == [["MEAN"], COLUMN]
    (problem,) = problems(plain, "xnnpack")
    assert problem.operator == "MEAN" and "in a sum overflow on x86" in problem.reason
    assert problems(contents, "xnnpack") == ()
    for family in RUNNABLE:
        assert_same(node, inputs, family)


@pytest.mark.parametrize("name", SHORT)
def test_other_means_are_one_operator(name):
    contents = file_of(mean_of(*SHORT[name])[0])
    assert kernels_of(contents) == ["MEAN"]
    assert problems(contents, "xnnpack") == ()


def test_16_bits_need_no_column():
    assert kernels_of(file_of(mean_of(*MEANS["one axis"], bits=16)[0])) == ["MEAN"]


def test_files_for_phones_have_columns_and_those_for_boards_have_none():
    """Microcontrollers sum in 32 bits, and a column would need memory there."""
    x = keras.Input((LONG,))
    for kernels, expected in (("xnnpack", COLUMN), ("tflm", ["MEAN"])):
        target = "tflm" if kernels == "tflm" else None
        qat = keras_qat.quantize_model(keras.Model(x, tf.reduce_mean(x, 1)), target=target)
        observe(qat, images(4, (LONG,)))
        assert kernels_of(keras_qat.export_tflite(qat)) == expected


def test_the_smallest_file_of_the_fault_is_found(tmp_path):
    kernel_faults.write("mean_row", tmp_path)
    contents = (tmp_path / "mean_row.tflite").read_bytes()
    assert [problem.operator for problem in problems(contents, "xnnpack")] == ["MEAN"]
    assert problems(contents, "tflm") == ()
