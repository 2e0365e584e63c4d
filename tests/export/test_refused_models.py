"""Tests models that cannot be exported: the message says what to do, and no file is written."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.comparison import export
from tests.helpers import images, keras, observe, quantize_on
from tests.networks.small import functional, layers, tiny_net

EXPORTS = [keras_qat.export_tflite, keras_qat.export_saved_model]


@pytest.mark.parametrize("exporter", EXPORTS)
def test_export_of_a_model_that_has_seen_no_data(exporter, tmp_path):
    qat = keras_qat.quantize_model(tiny_net())
    with pytest.raises(
        ValueError,
        match=r"quantizers have seen no data yet.*Train.*keras_qat\.calibrate\(model, data\)",
    ):
        exporter(qat, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.legacy
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_export_of_a_model_that_diverged(bad, tmp_path):
    qat = observe(keras_qat.quantize_model(tiny_net()), images(12, (6, 6, 2)))
    observe(qat, np.full((3, 6, 6, 2), bad, np.float32))
    with pytest.raises(ValueError, match=r"NaN or infinity.*checkpoint"):
        keras_qat.export_tflite(qat, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_export_of_weights_that_diverged():
    qat = observe(keras_qat.quantize_model(tiny_net()), images(12, (6, 6, 2)))
    bias = qat.get_layer("quant_logits").layer.bias
    bias.assign(bias + np.nan)
    with pytest.raises(ValueError, match="NaN or infinity"):
        keras_qat.export_tflite(qat)


def speech(loss):
    """Returns a model that computes its CTC loss from sparse labels."""
    spectrum, labels = keras.Input((16, 8), name="x"), keras.Input((4,), name="labels")
    lengths = [keras.Input((1,), name=name) for name in ("steps", "letters")]
    letters = layers.Dense(6, "softmax", name="letter")(spectrum)
    return keras.Model([spectrum, labels, *lengths], loss([labels, letters, *lengths]))


class CtcLoss(layers.Layer):
    def call(self, inputs):
        return keras.backend.ctc_batch_cost(*inputs)


LOSSES = [
    layers.Lambda(lambda inputs: keras.backend.ctc_batch_cost(*inputs), name="ctc"),
    CtcLoss(name="ctc"),
]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:These layers compute in float")
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_of_sparse_labels_is_named_and_left_out_of_the_file(loss):
    rng, model = np.random.default_rng(0), speech(loss)
    x = [rng.normal(size=(8, 16, 8)), rng.integers(0, 5, (8, 4)), np.full((8, 1), 16)]
    x = [np.float32(array) for array in (*x, np.full((8, 1), 4))]
    assert "sparse" in keras_qat.plan(model).float_layers["ctc"]
    qat = quantize_on(model, x)
    expected = model.predict(x, verbose=0)
    np.testing.assert_allclose(qat.predict(x, verbose=0), expected, rtol=0.2)
    with pytest.raises(ValueError, match=r"'ctc' .*tf\.CTCLoss.*outputs="):
        keras_qat.export_tflite(qat)
    qat = quantize_on(model, x, outputs=["letter"])
    assert list(keras_qat.TFLiteModel(keras_qat.export_tflite(qat)).outputs) == ["letter"]


@pytest.mark.legacy
def test_layer_that_the_converter_refuses():
    def build(x):
        x = layers.Dense(4, name="fine")(x)
        x = layers.Lambda(lambda x: tf.math.bessel_i0(x), name="waves")(x)
        x = layers.Dense(3)(x)
        return layers.Lambda(lambda x: tf.math.igamma(2.0, tf.abs(x)), name="gamma")(x)

    qat = observe(keras_qat.quantize_model(functional((4,), build=build)), images(8, (4,)))
    message = (
        r"refuses 2 layers: 'waves' \(tf.math.bessel_i0\): .*tf\.BesselI0; "
        r"'gamma' \(tf.math.igamma\): .*tf\.Igamma"
    )
    with pytest.raises(ValueError, match=message) as info:
        keras_qat.export_tflite(qat)
    assert "fine" not in str(info.value)


@pytest.mark.slow
def test_spectra_of_sizes_that_litert_has_no_kernel_for(tmp_path):
    """Such a file was written, but LiteRT could not load it."""

    def spectrum_of(size):
        def spectrum(x):
            return tf.abs(tf.signal.rfft(x))

        def build(x):
            return layers.Dense(3)(layers.Lambda(spectrum, name="spectrum")(layers.Dense(size)(x)))

        return functional((4,), build=build)

    x, recipe = images(8, (4,)), keras_qat.recipes.int8().override("spectrum", open=False)
    exported = export(spectrum_of(8), x, recipe=recipe)
    assert exported.report.outputs[0].identical == 1.0
    model = spectrum_of(12)
    qat = observe(keras_qat.quantize_model(model, recipe), x)
    with pytest.raises(
        ValueError, match=r"spectrum.*RFFT2D: powers of two only, not 12: fft_length=16"
    ):
        keras_qat.export_tflite(qat, tmp_path / "model.tflite")
    assert list(tmp_path.iterdir()) == []
    (problem,) = keras_qat.plan(model, recipe, target="xnnpack").problems
    assert problem.operator == "RFFT2D"
    micro = observe(keras_qat.quantize_model(model, recipe, target="tflm"), x)
    with pytest.warns(UserWarning, match="RFFT2D: no kernel"):  # LiteRT must not load it.
        keras_qat.export_tflite(micro)


class Counts(layers.Layer):
    def __init__(self, when=(None, False, True), **kwargs):
        super().__init__(**kwargs)
        self.when = when

    def build(self, shape):
        self.count = self.add_weight("count", (1, 3), trainable=False)

    def call(self, x, training=None):
        if training in self.when:
            self.count.assign(self.count * 0.5)
        return x + self.count

    def get_config(self):
        return super().get_config() | {"when": self.when}


def test_layer_that_assigns_to_a_variable():
    def exported(when):
        with pytest.warns(UserWarning, match="compute in float"):
            qat = keras_qat.quantize_model(functional((3,), build=Counts(when)))
        return keras_qat.export_tflite(observe(qat, images(8, (3,))))

    with pytest.raises(ValueError, match=r"assigns to a variable.* only in training, as in"):
        exported((None, False, True))
    assert exported((True,))
