"""Tests Keras layers that are expanded because they have no integer kernel."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.helpers import export_exact, images, keras, quantize_on, save_and_load, scramble
from tests.networks.forms.written_out import LAYERS
from tests.networks.small import functional, layers

pytestmark = pytest.mark.legacy


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("case", LAYERS)
def test_one_layer_trains_and_the_other_is_frozen(case):
    make, shape = LAYERS[case]
    options = {"kernel_regularizer": "l2", "kernel_constraint": keras.constraints.MaxNorm(0.1)}

    def build(x):
        trained = make(name="trained", **options)(x)
        return [trained, make(name="frozen", trainable=False)(x)]

    model, x = scramble(functional(shape, build=build)), images(8, shape)
    qat = keras_qat.quantize_model(model, strict=True)
    loss = float(tf.add_n(model.losses))
    assert float(tf.add_n(qat.losses)) == pytest.approx(loss)
    y = [np.zeros(np.shape(output), np.float32) for output in model(x)]
    qat.compile("sgd", "mse")
    qat.fit(x, y, verbose=0)
    plain = keras_qat.strip_quantization(qat)
    for name, is_trained in {"trained": True, "frozen": False}.items():
        before, after = (m.get_layer(name).kernel.numpy() for m in (model, plain))
        assert np.array_equal(before, after) != is_trained
    kernel = plain.get_layer("trained").kernel
    assert np.linalg.norm(kernel, axis=0).max() == pytest.approx(0.1, rel=1e-4)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [(3, 4), (6, 4), (7, 9)])
def test_random_crops_are_resized_at_inference(size, tmp_path):
    inputs = layers.Input((6, 7, 2))
    y = layers.RandomCrop(*size, seed=1, name="crop")(inputs)
    model, x = keras.Model(inputs, layers.Conv2D(2, 3)(y)), images(8, (6, 7, 2))
    qat = quantize_on(model, x, strict=True)
    contents = export_exact(qat, x)
    np.testing.assert_allclose(qat.predict(x, verbose=0), model.predict(x, verbose=0), atol=0.05)
    loaded = save_and_load(qat, tmp_path / "qat.keras")
    assert keras_qat.export_tflite(loaded) == contents
    z = np.arange(84, dtype=np.float32).reshape(1, 6, 7, 2)
    crop = loaded.get_layer("quant_crop")(
        z[:, : size[0], : size[1]], given=[z], training=True
    ).numpy()
    is_crop = np.all(np.diff(crop, axis=1) == 14) and np.all(np.diff(crop, axis=2) == 2)
    assert is_crop == (size != (7, 9))  # Training also resizes smaller images.


def test_layers_that_cannot_be_written_out_keep_their_weights_in_int8():
    """Includes dilated volumes, unknown sizes, and activity regularizers."""
    inputs = layers.Input((4, 4, None, 2)), layers.Input((4, 4, 4, 2))
    outputs = [
        layers.Conv3D(2, 2, name="open")(inputs[0]),
        layers.Conv3DTranspose(2, 2, dilation_rate=2, name="gaps")(inputs[1]),
        layers.Conv3D(2, 2, activity_regularizer="l2", name="regularized")(inputs[1]),
    ]
    reasons = keras_qat.plan(keras.Model(inputs, outputs)).float_layers
    assert reasons.keys() == {"open", "gaps", "regularized"}
    assert all("its weights are int8" in reason for reason in reasons.values())
