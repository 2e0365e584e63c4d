"""Tests that a plan's problems of a target are also the problems of the exported file."""

import warnings

import pytest
import tensorflow as tf

import keras_qat
from keras_qat import targets
from keras_qat.ops.registry import op_named
from keras_qat.tflite.reader import FileGraph
from tests.helpers import images, keras, observe
from tests.networks import composite, convolutional, single_layers
from tests.networks.small import functional, layers
from tests.ops.harness import file_of, node_of

FAMILIES = {
    name: family
    for name, family in (
        convolutional.FAMILIES | single_layers.FAMILIES | composite.FAMILIES
    ).items()
    if not family.slow and not any(None in shape for shape in family.shapes)
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("target", targets.known())
@pytest.mark.parametrize("name", FAMILIES)
def test_a_plan_names_what_a_file_lacks(name, target):
    family = FAMILIES[name]
    keras.utils.set_random_seed(0)
    model = family.model()
    planned = keras_qat.plan(model, target=target).problems
    qat = observe(keras_qat.quantize_model(model, target=target), *family.inputs(4))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", f"target {target}: operators")
        contents = keras_qat.export_tflite(qat)
    exported = targets.problems(contents, target)
    assert [(p.operator, p.reason) for p in planned] == [(p.operator, p.reason) for p in exported]


def reasons(build, target, shape=(8, 8, 8)):
    return {
        problem.operator: problem.reason
        for problem in keras_qat.plan(functional(shape, build=build), target=target).problems
    }


NEUTRON = {
    "channels": (
        lambda x: layers.MaxPooling2D()(layers.Conv2D(6, 3)(x)),
        {"MAX_POOL_2D": "channels in multiples of 8 only, not 6"},
    ),
    "strides": (
        lambda x: layers.MaxPooling2D(3)(layers.Conv2D(8, 3)(x)),
        {"MAX_POOL_2D": "strides of 1 or 2 rows only, not 3"},
    ),
    "groups": (lambda x: layers.Conv2D(8, 3, groups=2)(x), {"CONV_2D": "no groups"}),
    "broadcast": (
        lambda x: layers.Add()([x, layers.GlobalAveragePooling2D(keepdims=True)(x)]),
        {"ADD": "operands of one shape only"},
    ),
    "resize": (
        lambda x: layers.UpSampling2D(3, interpolation="bilinear")(x),
        {"RESIZE_BILINEAR": "2x or 4x only"},
    ),
    "classes": (
        lambda x: layers.Softmax()(layers.Dense(10)(layers.Flatten()(x))),
        {"SOFTMAX": "channels in multiples of 8 only, not 10"},
    ),
    "all well": (lambda x: layers.Dense(8)(layers.GlobalAveragePooling2D()(layers.ReLU()(x))), {}),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", NEUTRON)
def test_limits_of_neutron(case):
    build, expected = NEUTRON[case]
    assert reasons(build, "neutron") == expected


def test_stm32n6_leaves_means_bilinear_resizing_and_softmax_to_the_cpu():
    def build(x):
        x = layers.UpSampling2D(2, interpolation="bilinear")(layers.Conv2D(4, 3)(x))
        return layers.Softmax()(layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))

    refused = dict.fromkeys(("RESIZE_BILINEAR", "MEAN", "SOFTMAX"), "no kernel")
    assert reasons(build, "stm32n6") == refused


def test_operators_that_the_npu_s_host_lacks_too():
    def build(x):
        return layers.Dense(3)(tf.math.top_k(layers.ELU()(tf.reverse(x, [1])), 4).values)

    planned = keras_qat.plan(functional((8,), build=build), target="ethos_u55")
    assert {problem.operator: problem.elsewhere for problem in planned.problems} == {
        "STRIDED_SLICE": "the CPU",
        "TOPK_V2": None,
    }
    assert "TFLite Micro lacks too, so files with them do not run" in str(planned)
    qat = observe(
        keras_qat.quantize_model(functional((8,), build=build), target="ethos_u55"), images(8, (8,))
    )
    with pytest.warns(UserWarning, match="TFLite Micro lacks too"):
        keras_qat.export_tflite(qat)


@pytest.mark.sample(1)
@pytest.mark.parametrize("target", ["tflm", "ethos_u55"])
def test_long_concatenations_take_several_steps(target):
    def build(x):
        heads = [layers.Dense(2, activation="relu")(x) for _ in range(12)]
        return layers.Dense(3)(layers.Flatten()(layers.Concatenate(1)([h[:, None] for h in heads])))

    x = images(16, (8,))
    assert "CONCATENATION" not in reasons(build, target, (8,))
    qat = observe(keras_qat.quantize_model(functional((8,), build=build), target=target), x)
    contents = keras_qat.export_tflite(qat)
    kernels = [operation.kernel for operation in FileGraph(contents).operations]
    assert kernels.count("CONCATENATION") == 2
    assert keras_qat.verify(qat, contents, x).identical == 1


def test_mediatek_leaves_operators_without_a_legalization_to_the_cpu():
    def build(x):
        x = layers.LeakyReLU()(layers.UpSampling2D(2)(layers.Conv2D(4, 3, activation="relu6")(x)))
        return layers.Activation("elu")(layers.Dense(3)(layers.Flatten()(x)))

    assert reasons(build, "mediatek") == {"ELU": "no kernel"}


def test_ethos_u85_normalizes_in_float_and_names_what_vela_fails_on():
    def build(x):
        return layers.Dense(3)(layers.Flatten()(layers.LayerNormalization()(x)))

    assert reasons(build, "ethos_u85")["QUANTIZE"] == "no kernel for float32"
    contents = file_of(node_of(op_named("from_integers"), 8, 0)[0], 1)
    told = {problem.operator: problem.reason for problem in targets.problems(contents, "ethos_u85")}
    assert told["QUANTIZE"] == "Vela 5.2 fails on files with a QUANTIZE of int32"


def test_coral_npu_is_tflite_micro():
    network = functional((8, 8, 1), build=lambda x: layers.Dense(3)(layers.Flatten()(x)))
    qat = observe(keras_qat.quantize_model(network, target="coral_npu"), images(8, (8, 8, 1)))
    assert qat.kernels == "tflm"
    assert keras_qat.export_tflite(qat) == keras_qat.export_tflite(qat, target="tflm")
