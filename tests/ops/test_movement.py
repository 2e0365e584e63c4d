"""Tests operators that move, concatenate and pool values, beyond their examples."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.arithmetic.kernel_families import XNNPACK
from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.export.tflite_writer import get_tensor_index, write_node
from keras_qat.graph.calls import flatten_values
from keras_qat.graph.read_model import read_model
from keras_qat.helper_layers.operations import Contract, Roll
from keras_qat.integer_graph.execute import compute_node
from keras_qat.keras2.backend import keras, register
from keras_qat.ops.mean import MOST_WIDE
from keras_qat.ops.node import Node, Tensor
from keras_qat.ops.registry import match, register_op
from keras_qat.tflite.builder import Builder
from keras_qat.tflite.interpreter import FileInterpreter
from keras_qat.tflite.schema import unpack
from tests.comparison import KERNELS, RUNNABLE
from tests.helpers import build_model, layers
from tests.ops.harness import BATCH, assert_same, file_of, make_node, random_inputs, with_ends


def calls_of(build, *shapes):
    """Returns the calls of a function on Keras tensors."""
    inputs = [keras.Input(shape) for shape in shapes]
    return read_model(keras.Model(inputs, build(*inputs))).calls


def check(build, *shapes, bits=8, families=KERNELS):
    """Asserts that the last call of a function is exact in both families. Returns its operators."""
    numbers = np.random.default_rng(0)
    node = make_node(calls_of(build, *shapes)[-1], bits, numbers)
    inputs = random_inputs(node, numbers)
    for family in families:
        assert_same(node, inputs, family)
    return [name for name, *_ in FileInterpreter(file_of(node)).operations()]


OPEN = {
    "max_pool_1d": (layers.MaxPooling1D(2), (None, 4), ["EXPAND_DIMS", "MAX_POOL_2D", "SQUEEZE"]),
    "average_1d": (
        layers.AveragePooling1D(2, padding="same"),
        (None, 4),
        ["EXPAND_DIMS", "AVERAGE_POOL_2D", "SQUEEZE"],
    ),
    "max_pool_2d": (layers.MaxPooling2D(2), (None, None, 4), ["MAX_POOL_2D"]),
    "mean": (layers.GlobalAveragePooling2D(), (None, None, 4), ["MEAN"]),
    "resizing": (layers.Resizing(5, 7), (None, None, 4), ["RESIZE_BILINEAR"]),
    "pad": (layers.ZeroPadding2D(2), (None, None, 4), ["PAD"]),
    "crop": (layers.Cropping2D(1), (None, None, 4), ["STRIDED_SLICE"]),
    "slice": (lambda x: x[:, ::-2, -2:, 1], (None, None, 4), ["STRIDED_SLICE"]),
    "permute": (layers.Permute((3, 1, 2)), (None, None, 4), ["TRANSPOSE"]),
    "flatten": (lambda x: tf.reshape(x, [-1, 4]), (None, None, 4), ["RESHAPE"]),
    "new_axes": (
        lambda x: x[:, None, :, 1:, None],
        (None, 5),
        ["STRIDED_SLICE", "EXPAND_DIMS", "EXPAND_DIMS"],
    ),
    "tile": (
        lambda x: tf.tile(x, [2, 1, 3, 2]),
        (None, None, 4),
        ["CONCATENATION"] * 2 + ["GATHER"],
    ),
    "stack": (lambda x: tf.stack([x, x], 1), (None, None, 4), ["PACK"]),
    "reverse": (lambda x: tf.reverse(x, [2, 1]), (None, None, 4), ["STRIDED_SLICE"]),
}
"""Calls with sizes that are unknown before run time: call, inputs, operators."""


@pytest.mark.parametrize("name", OPEN)
def test_open_sizes(name):
    build, shape, expected = OPEN[name]
    assert check(build, shape) == expected


def test_shapes_between_new_axes_are_those_of_the_interpreter():
    build, shape, _ = OPEN["new_axes"]
    node = make_node(calls_of(build, shape)[-1], 8, np.random.default_rng(0))
    (graph,) = unpack(file_of(node)).subgraphs
    written = [list(graph.tensors[each.outputs[0]].shapeSignature) for each in graph.operators]
    assert written == [[-1, -1, 4], [-1, 1, -1, 4], [-1, 1, -1, 4, 1]]


PRODUCTS = {
    "abc,acd->abd": ["BATCH_MATMUL"],
    "abc,adc->abd": ["BATCH_MATMUL"],
    "abce,aced->abd": ["RESHAPE", "RESHAPE", "BATCH_MATMUL"],
    "abce,adce->abd": ["RESHAPE", "RESHAPE", "BATCH_MATMUL"],
    "acb,acd->abd": ["TRANSPOSE", "BATCH_MATMUL"],
    "abc,acd->adb": ["BATCH_MATMUL", "TRANSPOSE"],
}
"""The kernel needs the summed axis as the last or the second last of the second tensor."""


@pytest.mark.parametrize("equation", PRODUCTS)
def test_products_move_what_they_must(equation):
    sizes = dict(zip("bcde", (2, 3, 4, 5), strict=True))
    shapes = [[sizes[axis] for axis in term[1:]] for term in equation.split("->")[0].split(",")]
    assert check(lambda x, y: Contract(equation)([x, y]), *shapes) == PRODUCTS[equation]


BY_CONVERTER = {
    "nearest": (layers.UpSampling2D((2, 3)), (None, None, 4)),
    "repeat": (layers.UpSampling1D(3), (None, 4)),
    "roll": (Roll([2, -1], [1, 2]), (None, None, 4)),
    "flatten": (layers.Flatten(), (None, None, 4)),
    "expand": (lambda x: tf.expand_dims(x, 1), (None, 5)),
}
"""Unknown sizes, which files read at run time."""


@pytest.mark.sample(3)
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("name", BY_CONVERTER)
def test_what_the_converter_writes(name, bits):
    build, shape = BY_CONVERTER[name]
    families = ("xnnpack",) if name == "repeat" else KERNELS  # The reference kernels lack TILE.
    check(build, shape, bits=bits, families=families)


@register
class Shuffle(layers.Layer):
    """Reorders channels, and adds a border of copies."""

    def call(self, x):
        groups = tf.reshape(x, [-1, *x.shape[1:-1], 2, x.shape[-1] // 2])
        mixed = tf.reshape(tf.linalg.matrix_transpose(groups), [-1, *x.shape[1:]])
        wide = tf.pad(mixed, [[0, 0], [1, 0], [0, 0], [0, 0]], "SYMMETRIC")
        return wide, tf.pad(wide[:, :, ::2], [[0, 0], [0, 0], [1, 1], [0, 0]])


@register
class Scale(layers.Layer):
    """A layer that changes values instead of moving them."""

    def build(self, shape):
        self.factor = self.add_weight("factor", shape[1:])

    def call(self, x):
        return self.factor * x


@register
class Frame(layers.Layer):
    """Adds a border of ones."""

    def call(self, x):
        return tf.pad(x, [[0, 0], [1, 1]], constant_values=1.0)


@register
class Margin(layers.Layer):
    """Adds a border of zeros, which are a constant of the file."""

    def call(self, x):
        return tf.raw_ops.PadV2(input=x, paddings=[[0, 0], [1, 2]], constant_values=0.0)


@pytest.fixture
def registered():
    with contextlib.ExitStack() as stack:
        for layer in (Shuffle, Scale, Frame, Margin):
            stack.enter_context(register_op(layer, "move"))
        yield


@pytest.mark.sample(1)
@pytest.mark.parametrize("bits", [8, 16])
def test_a_custom_movement(registered, bits):
    operators = check(Shuffle(), (3, 4, 6), bits=bits)
    assert {"TRANSPOSE", "MIRROR_PAD"} < set(operators)


def test_zeros_are_zero_points(registered):
    assert check(Margin(), (4,)) == ["PADV2"]


def test_a_custom_layer_that_is_no_movement(registered):
    reasons = {Scale(): "Scale does more than move its values: .* into MUL", Frame(): "not 0"}
    for layer, reason in reasons.items():
        node = make_node(calls_of(layer, (4,))[-1], 8, np.random.default_rng(0))
        with pytest.raises(ValueError, match=reason):
            file_of(node)


def chain(build, *shapes):
    """Returns a file of calls that share one range, and their results."""
    inputs = [keras.Input(shape) for shape in shapes]
    graph = read_model(keras.Model(inputs, build(*inputs)))
    params, builder, indices = QuantParams(np.float32(0.1), 5), Builder(), {}
    tensors = {
        value: Tensor(value.name, value.shape, value.dtype, params if value.is_float else None)
        for value in graph.values()
    }
    starts = [tensors[value] for value in flatten_values(graph.inputs)]
    ends = [tensors[value] for value in flatten_values(graph.outputs)]
    ins = {start.name: get_tensor_index(builder, indices, start) for start in starts}
    numbers = np.random.default_rng(0)
    given = {
        start.name: numbers.integers(-128, 128, (3, *start.shape[1:])).astype(np.int8)
        for start in starts
    }
    computed = {start: tf.constant(given[start.name] - 5.0, tf.float32) for start in starts}
    for call in graph.calls:
        op, attributes, reason = match(call)
        assert op is not None, reason
        sources = tuple(tensors[value] for value in call.inputs)
        outputs = tuple(tensors[value] for value in flatten_values(call.outputs))
        node = Node(call.name, op, attributes, call, sources, outputs)
        results = compute_node(node, [computed[source] for source in sources], XNNPACK)
        computed.update(zip(outputs, results, strict=True))
        write_node(builder, node, indices)
    contents = builder.finish(ins, {f"y{i}": indices[end] for i, end in enumerate(ends)})
    file = FileInterpreter(contents)
    result = file.run_once(given)
    for place, end in enumerate(ends):
        expected = np.asarray(computed[end]) + (5 if end.params is not None else 0)
        np.testing.assert_array_equal(result[f"y{place}"], expected)
    return [name for name, *_ in file.operations()]


def test_shapes_that_tensors_were_asked_for():
    def build(x):
        batch, height = tf.shape(x)[0], tf.shape(x)[1]
        made = [
            tf.reshape(x, [batch, 20, 6]),
            tf.reshape(x, tf.stack([batch, 120])),
            tf.broadcast_to(x[:, None], [batch, 3, 4, 5, 6]),
            tf.gather(x, tf.stack([height, 0]) - 2 * tf.stack([0, 0]), axis=2),
        ]
        return made[:3]

    operators = chain(build, (4, 5, 6))
    assert operators.count("SHAPE") >= 1
    assert operators.count("GATHER") == 1


@pytest.mark.parametrize(
    "gather",
    [
        lambda x: tf.gather(x, [2, 0], None, 2),
        lambda x: tf.compat.v1.gather(x, [2, 0], None, None, 2),
    ],
)
def test_an_axis_by_its_position(gather):
    (call,) = calls_of(gather, (2, 3, 4))
    assert match(call)[1]["axis"] == 2


def test_indices_of_the_largest():
    def build(x):
        where = tf.argmax(x, -1, output_type=tf.int32)
        return where, tf.gather(x, where, axis=2, batch_dims=2), tf.stack(tf.unstack(x, axis=1), 2)

    assert sorted(chain(build, (4, 5))) == ["ARG_MAX", "GATHER", "PACK", "UNPACK"]


def test_a_mean_over_the_batch():
    assert check(lambda x: tf.reduce_mean(x, [0, 1]), (4, 5)) == ["MEAN"]
    assert check(tf.reduce_mean, (4, 5)) == ["EXPAND_DIMS", "MEAN", "SQUEEZE"]


def test_five_axes_are_turned_around_as_four_where_that_is_possible():
    """TFLite Micro cannot slice more axes."""
    written = [check(lambda x, axis=axis: tf.reverse(x, [axis]), (2, 3, 2, 2)) for axis in (2, 3)]
    assert written == [["RESHAPE", "STRIDED_SLICE", "RESHAPE"], ["STRIDED_SLICE"]]


def test_entries_of_the_batch():
    x, numbers = keras.Input((4,), 3), np.random.default_rng(0)
    (call,) = read_model(keras.Model(x, tf.unstack(x))).calls
    node = make_node(call, 8, numbers)
    for family in KERNELS:
        assert_same(node, random_inputs(node, numbers), family)


def test_means_of_more_values_than_float32_can_add():
    """The float sum of 2^18 values is 2 less than the sum whose mean is rounded up."""
    (call,) = calls_of(lambda x: tf.reduce_mean(x, 1), (2**18,))
    node = make_node(call, 8, np.random.default_rng(0))
    params = QuantParams(np.float32(1), -128, 8)
    node = with_ends(node, params, params)
    codes = np.resize(np.int8([73, 74]), (BATCH, 2**18))
    codes[:, 1:4] = 73
    for family in RUNNABLE:
        assert_same(node, {node.inputs[0].name: codes}, family)


def test_layers_that_augment_are_nothing_at_run_time():
    for build in (layers.Dropout(0.5), layers.RandomRotation(0.1), layers.GaussianNoise(1.0)):
        (call,) = calls_of(build, (6, 6, 3))
        assert match(call).op.alias


RARE = {
    "a tensor by name, of five axes": (lambda x: tf.reverse(tensor=x, axis=[1]), (2, 3, 2, 2)),
    "nothing moves": (lambda x: tf.tile(x, [1, 1, 1]), (3, 4)),
    "a slope of almost zero": (layers.LeakyReLU(1e-40), (40,)),
}


@pytest.mark.parametrize("name", RARE)
def test_rare_options(name):
    check(*RARE[name])


def test_one_hot_of_bytes():
    x, numbers = keras.Input((3,), dtype="uint8"), np.random.default_rng(0)
    (call,) = read_model(keras.Model(x, tf.one_hot(x, 5))).calls
    node = make_node(call, 8, numbers)
    assert_same(node, random_inputs(node, numbers), "reference")
    assert [name for name, *_ in FileInterpreter(file_of(node)).operations()] == ["CAST", "ONE_HOT"]


SIZES = {(256, 256, 1): True, (260, 260, 1): False, (MOST_WIDE + 1, 1, 1): False}


@pytest.mark.parametrize("shape", SIZES)
def test_16_bit_means_of_too_many_values_are_in_float(shape):
    model = build_model(shape, layers.GlobalAveragePooling2D(name="mean"))
    reason = keras_qat.plan(model, "int16x8").float_layers.get("mean", "")
    assert (not reason) == SIZES[shape]
    assert SIZES[shape] or reason == "no int16 kernel for GlobalAveragePooling2D"
    assert not keras_qat.plan(model).float_layers


def test_16_bit_means_of_many_values():
    call = calls_of(layers.GlobalAveragePooling2D(), (256, 256, 1))[-1]
    node = make_node(call, 16, np.random.default_rng(0))
    ((name, codes),) = random_inputs(node, np.random.default_rng(1)).items()
    codes[0], codes[1] = -32768, 32767
    for family in RUNNABLE:
        assert_same(node, {name: codes}, family)
