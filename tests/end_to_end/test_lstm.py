"""Tests LSTM as one operator: files, predictions, simulation, and reasons for staying in float."""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.arithmetic.kernel_families import kernel_family
from keras_qat.ops.op import Arguments
from keras_qat.ops.recurrent.lstm import LSTM
from keras_qat.targets import problems
from keras_qat.tflite.interpreter import FileInterpreter
from keras_qat.tflite.reader import FileGraph
from keras_qat.tflite.schema import unpack
from tests.end_to_end.exact import assert_exact_everywhere
from tests.helpers import export_exact, keras, layers, observe
from tests.networks.small import functional
from tests.ops.harness import assert_same, make_node, random_inputs
from tests.ops.test_movement import calls_of

SHAPE = (3, 4)
EXAMPLES = 12


def images() -> np.ndarray:
    return np.random.default_rng(3).normal(size=(EXAMPLES, *SHAPE)).astype(np.float32)


def stacked(x: Any) -> Any:
    x = layers.LSTM(6, return_sequences=True, go_backwards=True, dropout=0.2)(layers.Dense(3)(x))
    return layers.Dense(3)(layers.ReLU()(layers.LSTM(5, name="last")(x)))


@functools.cache
def trained() -> Any:
    """Returns a network of two LSTMs after one training step."""
    x = images()
    qat = keras_qat.quantize_model(functional(SHAPE, build=stacked))
    qat.compile(keras.optimizers.SGD(0.1), "mse")
    before = [variable.numpy() for variable in qat.trainable_variables]
    qat.fit(x, np.ones((EXAMPLES, 3)), EXAMPLES // 2, verbose=0)
    moved = [np.any(old != new) for old, new in zip(before, qat.trainable_variables, strict=True)]
    assert all(moved)
    return qat


@functools.cache
def file() -> bytes:
    return keras_qat.export_tflite(trained())


@pytest.mark.sample(1)
@pytest.mark.parametrize("kernels", ["xnnpack", "reference", "tflm"])
@pytest.mark.parametrize("per_layer", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_files_give_what_the_model_predicts(kernels, per_layer):
    assert_exact_everywhere(trained(), images(), kernels, per_layer)


def test_each_run_of_a_file_begins_with_zeros():
    """TFLite's operator keeps its states, unlike Keras' layer."""
    model, x = FileInterpreter(file()), {trained().input_names[0]: images()}
    (first,), (again,) = model.run(x).values(), model.run(x, batch=7).values()
    np.testing.assert_array_equal(first, again)


def test_zeros_are_written_before_sizes_are_told():
    model = functional(
        (None, 4), build=lambda x: layers.LSTM(3)(layers.Conv1DTranspose(2, 2, 2)(x))
    )
    qat = observe(keras_qat.quantize_model(model), images())
    graph = unpack(contents := keras_qat.export_tflite(qat)).subgraphs[0]
    kernels = [operation.kernel for operation in FileGraph(contents).operations]
    written = [
        position
        for position, operator in enumerate(graph.operators)
        if any(graph.tensors[index].isVariable for index in operator.outputs)
    ]
    assert len(written) == 2
    assert max(written) < kernels.index("SHAPE")


def of_one_unit(x: Any) -> Any:
    """Applies LSTMs with one unit: forwards, backwards and of several steps."""
    x = layers.Bidirectional(layers.LSTM(1, return_sequences=True))(x)
    x = layers.TimeDistributed(layers.LSTM(1))(layers.Reshape((3, 2, 1))(x))
    return layers.LSTM(1)(x)


@pytest.mark.parametrize("batch", [None, EXAMPLES])
@pytest.mark.parametrize(
    "build", [lambda x: layers.LSTM(1)(x), pytest.param(of_one_unit, marks=pytest.mark.slow)]
)
def test_states_of_one_unit_have_their_own_memory(build, batch):
    """LiteRT crashed if the first run had several examples."""
    qat = observe(keras_qat.quantize_model(functional(SHAPE, build=build)), images())
    contents = keras_qat.export_tflite(qat, batch_size=batch)
    report = keras_qat.verify(qat, contents, images(), per_layer=True)
    assert [tensor.identical for tensor in report.outputs] == [1.0]
    assert {tensor.run.identical for tensor in report.tensors} == {1.0}
    assert {tensor.fed.identical for tensor in report.tensors if tensor.fed} == {1.0}


# Activations of 16 bits, which only TFLite Micro supports.


@pytest.mark.slow
def test_wide_ones_stay_in_float_but_on_microcontrollers():
    model = functional(SHAPE, build=stacked)
    for reason in keras_qat.plan(model, "int16x8").float_layers.values():
        assert reason.startswith("no int16 kernel for LSTM, but with kernels='tflm'")
    plan = keras_qat.plan(model, "int16x8", target="tflm")
    assert not plan.float_layers
    assert not plan.problems
    qat = keras_qat.quantize_model(model, "int16x8", target="tflm")
    for result in problems(qat, "xnnpack"):
        assert result.reason == "no kernel for int16"
    assert len(problems(qat, "xnnpack")) == 2


def wide(build: Any, batch: int | None = None) -> Any:
    """Returns a network of 16-bit activations after one training step."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input(SHAPE, batch, name="sound")
    model = keras.Model(inputs, build(inputs), name="wide")
    qat, x = keras_qat.quantize_model(model, "int16x8", target="tflm"), images()
    qat.compile(keras.optimizers.SGD(0.1), "mse")
    qat.fit(x, np.ones((EXAMPLES, *qat.output_shape[1:])), batch or EXAMPLES // 2, verbose=0)
    return qat


def merged(x: Any) -> Any:
    """Applies LSTMs with shared ranges, in both directions, and one that is called twice."""
    both = layers.Bidirectional(layers.LSTM(3, return_sequences=True))
    shared = layers.LSTM(3, use_bias=False)
    x = both(x)
    return layers.Concatenate()([shared(layers.ReLU()(x)), shared(x)])


def of_steps(x: Any) -> Any:
    """Applies an LSTM to several sequences per example."""
    return layers.TimeDistributed(layers.LSTM(3))(layers.Reshape((3, 2, 2))(x))


def with_positions(x: Any) -> Any:
    """Applies an LSTM to several sequences per example that are repeated for all examples."""

    def positions(x):
        table = tf.tile(tf.constant([-1.0, 1.0]), [tf.shape(x)[0] * 3])
        return tf.reshape(table, [tf.shape(x)[0], 3, 2, 1])

    x = layers.Reshape((3, 2, 2))(x)
    x = layers.Concatenate()([layers.Lambda(positions, name="positions")(x), x])
    return layers.TimeDistributed(layers.LSTM(3))(x)


@pytest.mark.sample(1)
@pytest.mark.parametrize("batch", [None, 1])
def test_sequences_of_steps_begin_with_zeros_where_sizes_are_computed(batch):
    """Wrong numbers of sequences were computed once, and two tensors had the same name."""
    qat = observe(keras_qat.quantize_model(functional(SHAPE, build=with_positions)), images())
    export_exact(qat, images(), batch_size=batch)


@pytest.mark.slow
@pytest.mark.parametrize("build", [stacked, merged, of_steps, of_one_unit])
def test_wide_files_give_what_the_model_predicts(build):
    qat = wide(build)
    report = assert_exact_everywhere(qat, images(), "tflm", per_layer=True)
    assert {tensor.fed.identical for tensor in report.tensors if tensor.fed} <= {1.0}
    with pytest.raises(ValueError, match=r"refuse this TFLite file. keras_qat.targets.problems"):
        FileInterpreter(keras_qat.export_tflite(qat))


def test_wide_sums_past_what_float32_holds():
    """Half of the units sum up to 10^8, and the other half subtract that again."""
    numbers = np.random.default_rng(0)
    (call,) = calls_of(layers.LSTM(64, return_sequences=True), (6, 4))
    node = make_node(call, 16, numbers)
    weights, unit = node.weights, float(node.inputs[0].params.scale)
    recurrent = weights.recurrent
    sign = np.repeat([1.0, -1.0], 32)[:, None]
    recurrent = dataclasses.replace(
        recurrent,
        q=sign * numbers.integers(67, 128, recurrent.q.shape),
        scale=np.full_like(recurrent.scale, np.float32(0.01)),
    )
    gates = np.repeat([3.0, 1.0, 2.0, 3.0], 64)  # This makes all states large.
    bias = np.round(gates / (unit * weights.scale.reshape(-1)))
    weights = dataclasses.replace(weights, recurrent=recurrent, bias=bias)
    node = dataclasses.replace(node, weights=weights)
    assert_same(node, random_inputs(node, numbers), "tflm")


def test_sums_of_many_units_past_what_float32_holds():
    units = 1040
    (call,) = calls_of(layers.LSTM(2, return_sequences=True), (3, 4))
    node = make_node(call, 8, np.random.default_rng(0))
    q = np.full((units, 4), -127.0)
    weights = dataclasses.replace(
        node.weights, recurrent=dataclasses.replace(node.weights.recurrent, q=q, scale=np.ones(4))
    )
    params = [node.inputs[0].params.as_tensors()], node.output.params.as_tensors()
    prepared = LSTM.prepare(
        Arguments(kernel_family("xnnpack"), {}, [], params[0], params[1], call, weights)
    )
    hidden = np.full((1, units), -128)
    hidden[0, 0] = 127  # This makes the sum odd.
    kernel = prepared.of_hidden.kernel
    sums = hidden.astype(kernel.dtype.as_numpy_dtype) @ kernel.numpy()
    np.testing.assert_array_equal(sums.astype(np.int64), hidden @ q.astype(np.int64))
