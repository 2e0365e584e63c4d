"""Tests 4-bit weights: trained on 15 levels, stored as int8 or two in a byte."""

import contextlib
import warnings

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.lite.python import schema_py_generated as schema

import keras_qat
from keras_qat.integer_graph.passes import has_int4, pack_int4
from keras_qat.integer_graph.resolve import resolve
from keras_qat.ops.weighted_sums import RECENT
from keras_qat.tflite.interpreter import FileInterpreter
from keras_qat.tflite.schema import operator_code, unpack
from tests.helpers import images, observe, scramble
from tests.networks import composite
from tests.networks.convolutional import FAMILIES
from tests.networks.small import functional, layers, residual_net
from tests.targets.test_structures import known

pytestmark = [
    pytest.mark.legacy,
    pytest.mark.filterwarnings("ignore:pack_int4=True. kernels round sums:UserWarning"),
]
_Op = schema.BuiltinOperator
KERNELS = {_Op.CONV_2D, _Op.DEPTHWISE_CONV_2D, _Op.FULLY_CONNECTED}
X = images(96, (8, 8, 1))


def weights_of(contents):
    """Returns the type and the values of each kernel's weights in a file."""
    model = unpack(contents)
    (graph, *_) = model.subgraphs
    result = []
    for operator in graph.operators:
        if operator_code(model.operatorCodes[operator.opcodeIndex]) in KERNELS:
            tensor = graph.tensors[operator.inputs[1]]
            data = model.buffers[tensor.buffer].data
            if tensor.type == schema.TensorType.INT4:
                low, high = (np.int8(data << 4) >> 4), np.int8(data) >> 4
                codes = np.stack([low, high], -1).reshape(-1)[: np.prod(tensor.shape)]
            else:
                codes = data.view(np.int8)
            scale = np.asarray(tensor.quantization.scale)
            shape = [1] * len(tensor.shape)
            shape[tensor.quantization.quantizedDimension] = -1
            result.append((tensor.type, codes.reshape(tensor.shape) * scale.reshape(shape)))
    return result


def exact_in(qat, x, kernels):
    """Returns how well a packed file agrees with the model and with the simulation."""
    target = "tflm" if kernels == "tflm" else "xnnpack"
    contents = keras_qat.export_tflite(qat, pack_int4=True, target=target)
    given = x if len(x) > 1 else x[0]
    simulated = keras_qat.simulate(qat, given, kernels, pack_int4=True)
    codes = keras_qat.TFLiteModel(contents, kernels).predict(given, codes=True)
    for here, there in zip(
        simulated.outputs.values(), codes if len(simulated.outputs) > 1 else [codes], strict=True
    ):
        np.testing.assert_array_equal(getattr(here, "codes", here), there)
    return contents


STRUCTURES = {
    f"{name}-{kernels}": (value, kernels)
    for name, value in {**FAMILIES, **composite.FAMILIES}.items()
    for kernels in ("xnnpack", "tflm")
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_in_halves_of_bytes_are_simulated_exactly(name):
    family, kernels = STRUCTURES[name]
    if kernels == "tflm":
        pytest.importorskip("tflite_micro")
        model = known(family)
    elif not RECENT:
        pytest.skip("this TensorFlow's runtime has other kernels")
    else:
        model = family.model()
    qat = keras_qat.quantize_model(scramble(model), keras_qat.recipes.int8(weight_bits=4))
    x = family.inputs(6)
    observe(qat, *x)
    if not has_int4(pack_int4(resolve(qat))):
        pytest.skip("no weights of 4 bits")
    exact_in(qat, x, kernels)


def separable():
    """Returns a small network with a depthwise convolution and ranges, and inputs."""
    model = functional(
        (6, 6, 2),
        build=lambda x: layers.Conv2D(3, 1, name="pointwise")(
            layers.DepthwiseConv2D(3, name="depthwise")(layers.Conv2D(4, 3)(x))
        ),
    )
    x = images(8, (6, 6, 2))
    recipe = keras_qat.recipes.int8(weight_bits=4)
    return observe(keras_qat.quantize_model(scramble(model), recipe), x), x


@pytest.mark.skipif(not RECENT, reason="this TensorFlow's runtime has other kernels")
def test_packed_files_with_depthwise_convolutions_run_in_all_kernels():
    qat, x = separable()
    contents = keras_qat.export_tflite(qat, pack_int4=True)
    int4, int8 = schema.TensorType.INT4, schema.TensorType.INT8
    assert [kind for kind, _ in weights_of(contents)] == [int4, int8, int4]
    for kernels in ("xnnpack", "reference"):
        (simulated,) = keras_qat.simulate(qat, x, kernels, pack_int4=True).outputs.values()
        codes = keras_qat.TFLiteModel(contents, kernels).predict(x, codes=True)
        np.testing.assert_array_equal(simulated.codes, codes)


def test_a_plain_model_of_its_layers_has_its_weights_in_bytes():
    qat, x = separable()
    plain = keras_qat.keras.Model(qat.inputs, qat.outputs)
    (simulated,) = keras_qat.simulate(plain, x).outputs.values()
    np.testing.assert_array_equal(simulated.values, qat.predict(x, verbose=0))


def test_a_file_that_predict_does_not_compute_says_what_to_set():
    qat, x = separable()
    with pytest.warns(UserWarning, match=r"values of the file differ.* Set qat.pack_int4 = True"):
        contents = keras_qat.export_tflite(qat, pack_int4=True)
    assert not np.array_equal(qat.predict(x), keras_qat.TFLiteModel(contents).predict(x))
    report = keras_qat.verify(qat, contents, x)
    assert report.packs_int4 and "packs weights in 4 bits" in " ".join(report.findings())
    qat.pack_int4 = True
    with pytest.warns(UserWarning, match=r"values of the file differ.* Set qat.pack_int4 = False"):
        keras_qat.export_tflite(qat, pack_int4=False)


@pytest.mark.sample(1)
@pytest.mark.skipif(not RECENT, reason="this TensorFlow's runtime has other kernels")
@pytest.mark.parametrize("kernels", ["xnnpack", "tflm"])
def test_a_model_set_to_pack_int4_predicts_what_its_file_gives(kernels, tmp_path):
    if kernels == "tflm":
        pytest.importorskip("tflite_micro")
    model = functional(
        (6, 6, 2),
        build=lambda x: layers.Dense(5)(
            layers.Dense(7, "relu")(
                layers.Flatten()(layers.DepthwiseConv2D(3)(layers.Conv2D(4, 3)(x)))
            )
        ),
    )
    x = images(8, (6, 6, 2))
    qat = observe(keras_qat.quantize_model(scramble(model), "int4_weights", target=kernels), x)
    in_bytes = qat.predict(x)
    qat.pack_int4 = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Model and file are equal.
        contents = keras_qat.export_tflite(qat)
        report = keras_qat.verify(qat, contents, x, per_layer=True)
    given = keras_qat.TFLiteModel(contents, kernels).predict(x)
    assert not np.array_equal(in_bytes, given)
    np.testing.assert_array_equal(qat.predict(x), given)
    np.testing.assert_array_equal(tf.function(qat)(x, training=False), given)  # In a graph.
    (simulated,) = keras_qat.simulate(qat, x, kernels).outputs.values()
    np.testing.assert_array_equal(simulated.values, given)
    assert report.identical == 1 and not report.packs_int4
    qat.save(tmp_path / "packed.keras")
    loaded = keras_qat.keras.models.load_model(tmp_path / "packed.keras")
    assert loaded.pack_int4
    np.testing.assert_array_equal(loaded.predict(x), given)
    qat.pack_int4 = False
    np.testing.assert_array_equal(qat.predict(x), in_bytes)


def test_verify_tells_a_file_in_bytes_from_a_model_that_packs():
    qat, x = separable()
    contents = keras_qat.export_tflite(qat)
    qat.pack_int4 = True
    with pytest.warns(UserWarning, match=r"are not packed. Export it again"):
        assert keras_qat.verify(qat, contents, x).identical < 1


@pytest.mark.skipif(not RECENT, reason="this TensorFlow's runtime has other kernels")
def test_channels_that_training_switched_off_are_packed_too():
    """The scales of dead channels increase until the bias fits, by a factor with a fraction."""
    model = functional((4,), build=layers.Dense(3))
    x = images(8, (4,))
    kernel, _ = model.get_weights()
    kernel[:, 0] *= 3e-4
    model.set_weights([kernel, np.float32([50, 0.1, -0.1])])
    qat = observe(keras_qat.quantize_model(model, "int4_weights"), x)
    qat.pack_int4 = True
    contents = keras_qat.export_tflite(qat)
    (kind, _), *_ = weights_of(contents)
    assert kind == schema.TensorType.INT4
    np.testing.assert_array_equal(qat.predict(x), keras_qat.TFLiteModel(contents).predict(x))


def test_half_of_the_size():
    model = functional((128,), build=lambda x: layers.Dense(64)(layers.Dense(256)(x)))
    qat = observe(keras_qat.quantize_model(model, "int4_weights"), images(32, (128,)))
    in_bytes, packed = (len(keras_qat.export_tflite(qat, pack_int4=p)) for p in (False, True))
    count = 128 * 256 + 256 * 64
    assert in_bytes - packed == pytest.approx(count / 2, rel=0.02)


def test_layers_of_other_bits_stay_in_bytes():
    recipe = keras_qat.recipes.int8(weight_bits=4).override("logits", weight_bits=8)
    qat = observe(keras_qat.quantize_model(scramble(residual_net()), recipe), X)
    contents = keras_qat.export_tflite(qat, pack_int4=True)
    kinds = [kind for kind, _ in weights_of(contents)]
    assert len(set(kinds)) == 2
    assert kinds == [17, 9, 17, 9]  # Depthwise weights and the logits stay in bytes.
    assert keras_qat.verify(qat, contents, X).max_difference <= 3
    (name,) = FileInterpreter(contents).inputs
    assert name == "image"


def test_weights_that_no_file_packs_keep_8_bits():
    """Fewer bits would reduce accuracy without making the file smaller."""

    def build(x):
        x = layers.SeparableConv2D(4, 3)(layers.DepthwiseConv2D(3)(x))
        x = layers.Conv2DTranspose(4, 3)(layers.Conv2D(4, 1)(x))
        return layers.Dense(2)(layers.SimpleRNN(3)(layers.Reshape((-1, 4))(x)))

    model = functional((7, 7, 2), build=build)
    recipe = keras_qat.recipes.int4_weights()
    for few, bits in ((recipe, 8), (recipe.override("*", weight_bits=4), 4)):
        lines = [line.rstrip() for line in str(keras_qat.plan(model, few)).splitlines()]
        kernels = {line for line in lines if line.endswith("  kernel")}
        packed = {line for line in kernels if " Conv2D " in line or " Dense " in line}
        assert len(packed) == 3 and all("4-bit" in line for line in packed)
        assert len(kernels - packed) == 5
        assert all(f"{bits}-bit" in line for line in kernels - packed)


def test_nothing_to_pack():
    x = images(32, (6,))
    qat = observe(keras_qat.quantize_model(functional((6,), build=layers.Dense(4))), x)
    with pytest.raises(ValueError, match=r"no weights of at most 4 bits.*int4_weights"):
        keras_qat.export_tflite(qat, pack_int4=True)
    qat = keras_qat.quantize_model(functional((6,), build=layers.Dense(4)), "int16x8")
    with pytest.raises(ValueError, match=r"no kernels .*int4 weights"):
        keras_qat.export_tflite(observe(qat, x), pack_int4=True)
    with pytest.raises(ValueError, match=r"no kernels .*int4 weights"):
        qat.pack_int4 = True
    # Its 4-bit weights have a zero point, so values are up to 15.
    qat = keras_qat.quantize_model(
        functional((6,), build=layers.Dense(4, kernel_initializer="ones")),
        keras_qat.recipes.contrib(4),
    )
    with pytest.raises(ValueError, match="no weights of at most 4 bits"):
        keras_qat.export_tflite(observe(qat, 8 + x), pack_int4=True, input_range=(0, 16))


@pytest.mark.parametrize(("largest", "is_packed"), [(1.0, True), (1.3, False)], ids=["7", "8"])
def test_weights_with_a_zero_point_are_packed_up_to_7(largest, is_packed):
    model = functional((6,), build=layers.Dense(4))
    model.set_weights([np.linspace(-1, largest, 24).reshape(6, 4), np.zeros(4)])
    qat = observe(keras_qat.quantize_model(model, keras_qat.recipes.contrib(4)), images(32, (6,)))
    refused = pytest.raises(ValueError, match="no weights of at most 4 bits")
    with contextlib.nullcontext() if is_packed else refused:
        contents = keras_qat.export_tflite(qat, pack_int4=True, input_range=(-4, 4))
        ((kind, _),) = weights_of(contents)
        assert kind == schema.TensorType.INT4
