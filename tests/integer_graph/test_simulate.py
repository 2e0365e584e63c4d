"""Tests the integer simulation: complete models, its arithmetic, its arguments and results."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.analysis.verify.pairs import match_tensors
from keras_qat.tflite.interpreter import FileInterpreter
from keras_qat.tflite.reader import FileGraph
from tests.comparison import KERNELS, assert_identical
from tests.helpers import assert_all_equal, build_model, images, keras, observe
from tests.networks.small import functional, layers, residual_net

with_kernels = pytest.mark.parametrize("kernels", KERNELS)


def test_the_families_differ(exported):
    """The families differ in a few values by one step, so comparing with each is meaningful."""
    first, second = (keras_qat.simulate(exported.model, exported.x, family) for family in KERNELS)
    differences = {
        name: first.tensors[name].codes.astype(int) - second.tensors[name].codes
        for name in first.tensors
    }
    assert not differences["image"].any()
    assert 0 < np.mean(differences["stem_relu"] != 0) < 0.01
    assert np.abs(differences["stem_relu"]).max() == 1


@with_kernels
def test_tensors_inside(exported, kernels):
    """Tensors of the simulation equal those of the file."""
    file_graph = FileGraph(exported.tflite)
    pairs, _ = match_tensors(keras_qat.resolve(exported.model), file_graph)
    contents = file_graph.replace_outputs(item.tensor.index for item in pairs)
    file = FileInterpreter(contents, kernels)
    codes = file.run(dict.fromkeys(file.inputs, exported.x))
    simulated = keras_qat.simulate(exported.model, exported.x, kernels)
    assert (simulated.kernels, simulated.float_layers) == (kernels, ())
    tensors = simulated.tensors
    assert {"image", "stem_relu", "project_bn", "merge_relu", "pool", "logits"} <= set(tensors)
    assert len(pairs) >= 7
    for item in pairs:
        result = tensors[item.ours.label]
        np.testing.assert_array_equal(result.codes, codes[str(item.tensor.index)], item.name)
        assert (result.scale, result.zero_point) == (item.tensor.scale, item.tensor.zero_point)


def test_real_values_and_codes_as_inputs(exported):
    simulated = keras_qat.simulate(exported.model, exported.x)
    image, logits = simulated.tensors["image"], simulated.outputs["logits"]
    inside = np.clip(exported.x, image.values.min(), image.values.max())
    assert np.abs(image.values - inside).max() <= 0.51 * image.scale
    np.testing.assert_array_equal(
        logits.values, (logits.codes.astype(np.float32) - logits.zero_point) * logits.scale
    )
    again = keras_qat.simulate(exported.model, image.codes, batch_size=7)
    np.testing.assert_array_equal(again.outputs["logits"].codes, logits.codes)


def test_the_model_is_not_changed(exported):
    before = exported.model.get_weights()
    keras_qat.simulate(exported.model, exported.x[:4])
    assert_all_equal(exported.model.get_weights(), before)


def test_float_layers_are_named():
    def build(x):
        return layers.Conv2D(3, 1)(layers.LayerNormalization(name="norm")(layers.Conv2D(4, 1)(x)))

    x = images(16, (4, 4, 3))
    qat = observe(keras_qat.quantize_model(functional((4, 4, 3), build=build)), x)
    assert keras_qat.simulate(qat, x).float_layers == ("norm",)


BEYOND = {
    # Ratios of scales that XNNPACK leaves to TFLite's kernels.
    "add": lambda x: layers.Add()([x, layers.Rescaling(1e-4)(x)]),
    "subtract": lambda x: layers.Subtract()(
        [layers.Rescaling(1e4)(x), layers.Rescaling(9999.0)(x)]
    ),
    "leaky_relu": lambda x: layers.LeakyReLU(0.001)(x),
    "leaky_relu_negative": lambda x: layers.LeakyReLU(-0.3)(x),
    # Sums that float32 cannot represent.
    "conv_of_many": lambda x: layers.Conv2D(4, 3)(tf.tile(x, [1, 1, 1, 200])),
    # Kernels that compute eight channels at a time.
    "transposed": lambda x: layers.Conv2DTranspose(11, 3, strides=2)(tf.tile(x, [1, 1, 1, 40])),
    "constants": lambda x: tf.maximum(x, 0.1) * tf.constant([0.5, -1.0, 2.0, 0.25]),
    "softmax_of_rows": lambda x: layers.Softmax(axis=1)(x),
    "means": lambda x: tf.reduce_mean(x, axis=[1, 3]),
    "gelu": lambda x: tf.nn.gelu(x, approximate=True),
    "dot": lambda x: layers.Dot(axes=(3, 3))([x, tf.nn.relu(x)]),
    "attention": lambda x: (lambda y: layers.MultiHeadAttention(2, 4)(y, y))(
        layers.Reshape((18, 8))(x)
    ),
    "split": lambda x: layers.Subtract()(list(tf.split(x, 2, axis=-1))),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", BEYOND)
def test_parameters_out_of_the_ordinary(name):
    x = images(48, (6, 6, 4))
    qat = observe(keras_qat.quantize_model(functional((6, 6, 4), build=BEYOND[name])), x)
    contents = keras_qat.export_tflite(qat)
    assert_identical(qat, x, "xnnpack", contents)
    if "TILE" not in [operation for operation, _, _ in FileInterpreter(contents).operations()]:
        assert_identical(qat, x, "reference", contents)


def test_unknown_kernels(exported):
    with pytest.raises(ValueError, match=r"kernels='gpu': use one of 'xnnpack'"):
        keras_qat.simulate(exported.model, exported.x, "gpu")


def test_model_that_cannot_be_exported():
    with pytest.raises(ValueError, match="have seen no data yet"):
        keras_qat.simulate(keras_qat.quantize_model(residual_net()), images(2, (8, 8, 1)))


def test_tensors_made_of_weights_alone_have_no_examples():
    """A scalar weight, as of StarReLU; with several batches."""
    keras.utils.set_random_seed(0)

    class StarReLU(layers.Layer):
        def build(self, input_shape):
            self.factor = self.add_weight("factor", (), initializer="ones")
            self.offset = self.add_weight("offset", (4,), initializer="ones")
            super().build(input_shape)

        def call(self, x):
            return self.factor * tf.nn.relu(x) ** 2 + self.offset

    model = build_model((4,), lambda inputs: layers.Dense(3)(StarReLU(name="star")(inputs)))
    x = images(10, (4,))
    qat = observe(keras_qat.quantize_model(model), x)
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), x, per_layer=True)
    assert report.outputs[0].identical == 1.0
    tensors = keras_qat.simulate(qat, x, batch_size=4).tensors
    assert tensors["star/factor"].codes.shape == ()
    assert tensors["star/offset"].codes.shape == (4,)


def test_a_number_that_is_computed_has_no_examples():
    """For example, global response normalization divides by a size, as a float."""
    inputs = keras.Input((None, 4))
    count = tf.cast(tf.shape(inputs)[1], tf.float32)
    model = keras.Model(inputs, layers.Dense(3)(inputs) + count)
    x = images(10, (6, 4))
    qat = observe(keras_qat.quantize_model(model), x)
    simulated = keras_qat.simulate(qat, x, batch_size=4)
    (output,) = simulated.outputs.values()
    assert output.codes.shape == (10, 6, 3)


def test_examples_along_another_axis():
    """A stack of two tensors has its examples in axis 1; with several batches."""
    inputs = keras.Input((3, 4))
    stacked = tf.stack([inputs, tf.nn.relu(inputs)], name="stacked")
    model = keras.Model(inputs, layers.Dense(3)(stacked[1] + stacked[0]))
    x = images(10, (3, 4))
    qat = observe(keras_qat.quantize_model(model), x)
    at_once = keras_qat.simulate(qat, x)
    (shape,) = {x.codes.shape for x in at_once.tensors.values() if x.codes.ndim == 4}
    assert shape == (2, 10, 3, 4)
    for name, tensor in keras_qat.simulate(qat, x, batch_size=4).tensors.items():
        np.testing.assert_array_equal(tensor.codes, at_once.tensors[name].codes, name)
