"""Tests the SavedModel: it runs without keras_qat, on a CPU, and returns the model's values."""

import collections

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.export.saved_model import make_inference_module
from tests.helpers import images, keras, observe, scramble
from tests.networks.convolutional import FAMILIES
from tests.networks.small import layers, residual_net


def test_runs_where_only_tensorflow_is(exported, tmp_path, fresh_process):
    path = str(tmp_path / "model")
    keras_qat.export_saved_model(exported.model, path)
    printed = fresh_process(
        f"""
import sys
import tensorflow as tf
model = tf.saved_model.load({path!r})
assert not any(name.split(".")[0] in ("keras_qat", "tf_keras") for name in sys.modules)
result = model.signatures["serving_default"](image=tf.constant(arrays["x"]))["logits"].numpy()
""",
        x=exported.x,
    )
    np.testing.assert_array_equal(printed, exported.model.predict(exported.x, verbose=0))


@pytest.mark.slow
@pytest.mark.legacy
@pytest.mark.parametrize("family", ["depthwise"])
def test_every_spelling_runs_on_a_cpu(family, tmp_path):
    """TensorFlow's CPU kernels support dilated and strided layers only in some forms."""
    qat = keras_qat.quantize_model(scramble(FAMILIES[family].model()))
    inputs = FAMILIES[family].inputs(16)
    observe(qat, *inputs)
    keras_qat.export_saved_model(qat, tmp_path / "model")
    serve = tf.saved_model.load(str(tmp_path / "model")).signatures["serving_default"]
    served = serve(**dict(zip(qat.input_names, map(tf.constant, inputs), strict=True)))
    expected = dict(zip(qat.output_names, qat.predict(inputs, verbose=0), strict=True))
    assert served.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(served[name], values)


def test_folded():
    """A convolution and BatchNormalization become one convolution."""
    qat = observe(keras_qat.quantize_model(scramble(residual_net())), images(32, (8, 8, 1)))
    module = make_inference_module(keras_qat.resolve(qat))
    operations = collections.Counter(
        operation.type for operation in module.serve.get_concrete_function().graph.get_operations()
    )
    assert operations["Conv2D"] == 2
    assert operations["DepthwiseConv2dNative"] == 1
    assert not any("BatchNorm" in kind or kind == "Rsqrt" for kind in operations)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kernels", ["reference", "xnnpack"])
def test_values_are_those_of_predict(kernels, tmp_path):
    """Includes float layers, and tensors that each kernel family rounds differently."""
    x = keras.Input((8, 8, 3), name="image")
    y = layers.Conv2D(8, 3, activation="swish")(x)
    y = layers.Add()([y, layers.DepthwiseConv2D(3, padding="same")(y)])
    y = layers.LayerNormalization()(layers.AveragePooling2D(3)(y))
    y = layers.Dense(4, activation="softmax", name="classes")(layers.Flatten()(y))
    data = images(128, (8, 8, 3))
    qat = observe(keras_qat.quantize_model(scramble(keras.Model(x, y)), kernels=kernels), data)
    keras_qat.export_saved_model(qat, tmp_path / "model")
    serve = tf.saved_model.load(str(tmp_path / "model")).signatures["serving_default"]
    served = serve(image=tf.constant(data))["classes"]
    assert np.mean(served == qat.predict(data, verbose=0)) > 0.999  # One layer is in float.


def test_existing_saved_model_is_replaced(exported, tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    keras_qat.export_saved_model(exported.model, path)
    (path / "old").write_text("old")
    keras_qat.export_saved_model(exported.model, path)
    assert not (path / "old").exists()
    assert (path / "saved_model.pb").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.slow
def test_layers_in_float_whose_inputs_have_no_quantizer(tmp_path):
    """The weights of these layers are saved, because the function reads them."""
    qat = keras_qat.quantize_model(scramble(residual_net()), "contrib")
    observe(qat, x := images(8, (8, 8, 1)))
    keras_qat.export_saved_model(qat, tmp_path / "model")
    serve = tf.saved_model.load(str(tmp_path / "model")).signatures["serving_default"]
    served, expected = serve(image=tf.constant(x))["logits"], qat.predict(x, verbose=0)
    assert np.abs(served - expected).max() <= np.ptp(expected) / 50
