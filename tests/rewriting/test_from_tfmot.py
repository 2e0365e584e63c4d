"""Models that tfmot quantized and trained are taken over with their ranges, bits and weights."""

import sys

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.helpers import export_exact, images, keras, layers

tfmot = pytest.importorskip("tensorflow_model_optimization").quantization.keras
X = np.clip(images(64, (6, 6, 2)), -3, 3)
Y = np.arange(64) % 3


def network():
    image = keras.Input((6, 6, 2), name="image")
    start = layers.Conv2D(4, 3, padding="same", activation="relu", name="start")(image)
    x = layers.DepthwiseConv2D(3, padding="same", use_bias=False, name="depthwise")(start)
    x = layers.ReLU(6.0, name="relu6")(layers.BatchNormalization(name="norm")(x))
    x = layers.BatchNormalization(name="norm2")(layers.Conv2D(4, 1, name="project")(x))
    x = layers.ReLU(name="merged")(layers.Add(name="add")([x, start]))
    return keras.Model(image, layers.Dense(3, "softmax", name="logits")(layers.Flatten()(x)))


def trained(model):
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy())
    model.fit(X, Y, 16, epochs=3, verbose=0)
    return model


@pytest.fixture(scope="module")
def theirs():
    keras.utils.set_random_seed(0)
    return trained(tfmot.quantize_model(network()))


@pytest.fixture(scope="module")
def qat(theirs):
    return keras_qat.from_tfmot(theirs)


def test_ranges_and_weights_are_theirs(theirs, qat):
    ours = {quantizer.quantizes[0]: quantizer for quantizer in keras_qat.quantizers(qat)}
    for name, layer, prefix in (
        ("image", "quantize_layer", "quantize_layer"),
        ("start", "quant_start", "post_activation"),
        ("relu6", "quant_relu6", "output"),
        ("norm2", "quant_norm2", "output"),
        ("merged", "quant_merged", "output"),
        ("logits_before_activation", "quant_logits", "pre_activation"),
    ):
        weights = {w.name.split("/")[-1]: w.numpy() for w in theirs.get_layer(layer).weights}
        step = (ours[name].maximum - ours[name].minimum) / 255
        low, high = (float(weights[f"{prefix}_{end}:0"]) for end in ("min", "max"))
        is_relu = name in ("start", "relu6", "merged")
        assert ours[name].minimum == pytest.approx(0 if is_relu else low, abs=step)
        assert ours[name].maximum == pytest.approx(high, abs=step)
    stripped = keras_qat.strip_quantization(qat)
    wanted = {w.name.split("/")[-2:][0] + w.name.split("/")[-1]: w for w in theirs.weights}
    for weight in stripped.weights:
        name = "".join(weight.name.split("/")[-2:])
        np.testing.assert_array_equal(weight.numpy(), wanted[name].numpy())


def test_it_computes_nearly_the_same_and_exports(theirs, qat):
    before = theirs.predict(X, verbose=0)
    np.testing.assert_allclose(qat.predict(X, verbose=0), before, atol=0.03)
    export_exact(qat, X[:16])
    np.testing.assert_array_equal(theirs.predict(X, verbose=0), before)


@pytest.mark.slow
def test_weights_with_the_same_name():
    """Both directions of an LSTM have a kernel."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((5, 3))
    x = layers.Bidirectional(layers.LSTM(4), name="both")(inputs)
    head = tfmot.quantize_annotate_layer(layers.Dense(3, name="logits"))
    theirs = tfmot.quantize_apply(keras.Model(inputs, head(x)))
    theirs.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    theirs.fit(images(64, (5, 3)), Y, verbose=0)
    qat = keras_qat.from_tfmot(theirs, images(64, (5, 3)))
    layer, expected = keras_qat.strip_quantization(qat).get_layer("both"), theirs.get_layer("both")
    for pair in zip(layer.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_array_equal(*pair)


def test_weights_that_cannot_be_told_apart():
    class Block(layers.Layer):
        def __init__(self, **options):
            super().__init__(**options)
            self.inner = layers.Dense(3)

        def build(self, shape):
            self.kernel = self.add_weight("kernel", (shape[-1], 3))

        def call(self, x):
            return self.inner(tf.matmul(x, self.kernel))

        def get_config(self):
            return super().get_config() | {"name": self.name}

    class Config(tfmot.QuantizeConfig):
        def get_weights_and_quantizers(self, layer):
            quantizer = tfmot.quantizers.LastValueQuantizer(8, False, True, False)
            return [(layer.kernel, quantizer)]

        def get_activations_and_quantizers(self, layer):
            return []

        def get_output_quantizers(self, layer):
            return []

        def set_quantize_weights(self, layer, weights):
            (layer.kernel,) = weights

        def set_quantize_activations(self, layer, activations):
            pass

        def get_config(self):
            return {}

    inputs = keras.Input((4,))
    block = tfmot.quantize_annotate_layer(Block(name="block"), Config())
    with tfmot.quantize_scope({"Config": Config, "Block": Block}):
        theirs = tfmot.quantize_apply(keras.Model(inputs, block(inputs)))
    with pytest.raises(ValueError, match="'block' has several weights named 'kernel'"):
        keras_qat.from_tfmot(theirs)


@pytest.mark.parametrize("ending", [pytest.param("h5", marks=pytest.mark.slow), "keras"])
def test_files(ending, theirs, qat, tmp_path):
    """tfmot itself cannot load what it saves as `.keras`."""
    theirs.save(tmp_path / f"model.{ending}")
    loaded = keras_qat.from_tfmot(str(tmp_path / f"model.{ending}"))
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), qat.predict(X, verbose=0))


@pytest.mark.slow
def test_layers_that_tfmot_left_in_float():
    def annotate(layer):
        is_first = layer.name in ("start", "depthwise")
        return tfmot.quantize_annotate_layer(layer) if is_first else layer

    annotated = keras.models.clone_model(network(), clone_function=annotate)
    theirs = trained(tfmot.quantize_apply(annotated))
    qat = keras_qat.from_tfmot(theirs, X)
    kernels = [
        quantizer.name for quantizer in keras_qat.quantizers(qat) if "kernel" in quantizer.name
    ]
    assert kernels == ["quant_start/kernel", "quant_depthwise/depthwise_kernel"]
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), X[:16]).identical == 1
    with pytest.warns(UserWarning, match=r"tfmot has no ranges for .*Pass data"):
        keras_qat.from_tfmot(theirs)


@pytest.mark.slow
def test_bits():
    scheme = tfmot.experimental.default_n_bit.DefaultNBitQuantizeScheme(
        num_bits_weight=4, num_bits_activation=6
    )
    annotated = tfmot.quantize_annotate_model(network())
    theirs = trained(tfmot.quantize_apply(annotated, scheme))
    specs = {
        quantizer.name: quantizer.spec
        for quantizer in keras_qat.quantizers(keras_qat.from_tfmot(theirs, X))
    }
    assert specs["quant_project/kernel"].bits == 4
    assert specs["quant_depthwise/output"].bits == 6


def test_errors(monkeypatch):
    with pytest.raises(ValueError, match="was not quantized by tfmot"):
        keras_qat.from_tfmot(network())
    with pytest.raises(ValueError, match="was not trained after"):
        keras_qat.from_tfmot(tfmot.quantize_model(network()))
    monkeypatch.setitem(sys.modules, "tensorflow_model_optimization", None)
    with pytest.raises(ImportError, match="pip install tensorflow-model-optimization"):
        keras_qat.from_tfmot("model.h5")
