"""Tests warnings about data that differs from training data, or that 8 bits would lose."""

import numpy as np
import pytest

import keras_qat
from tests.helpers import keras, quantize_on, rng
from tests.networks.small import functional, layers

pytestmark = pytest.mark.legacy
UNIT = rng().uniform(0, 1, (32, 8, 8, 3)).astype(np.float32)
TO_ONE = UNIT / UNIT.max()
WITH_OUTLIER = np.where(UNIT.max() == UNIT, np.float32(9999), UNIT)
PIXELS = np.round(255 * UNIT).astype(np.uint8)
SYMMETRIC = PIXELS / np.float32(127.5) - 1
CAFFE = keras.applications.imagenet_utils.preprocess_input(PIXELS.astype(np.float32), mode="caffe")


def with_statistics(x, *first):
    """Returns a network whose BatchNormalization has the statistics of `x`."""
    keras.utils.set_random_seed(0)
    norm = layers.BatchNormalization(momentum=0.0, name="norm")
    model = keras.Sequential([keras.Input(x.shape[1:], name="image"), *first, norm, layers.ReLU()])
    model(x, training=True)
    return model


def conv():
    return layers.Conv2D(6, 3, use_bias=False)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("trained_on", "given", "message"),
    [
        (UNIT, PIXELS, r"'image' \(uint8, 0 to 255\) .* 'norm' varies 25. times .* x / 255\."),
        (SYMMETRIC, PIXELS, r"varies 12. times as much .* They fit as x / 127.5 - 1\."),
        (SYMMETRIC, UNIT, r"varies 0.[45]\d* times as much .* They fit as 2 \* x - 1\."),
        (UNIT, SYMMETRIC, r"varies 1.9. times as much .* They fit as \(x \+ 1\) / 2\."),
        (1.0 * PIXELS, UNIT, r"varies 0.0039. times as much .* They fit as 255 \* x\."),
        (UNIT, UNIT / 255, r" to 0.0039.* varies 0.0039. times .* They fit as 255 \* x\."),
        (TO_ONE, TO_ONE / 255, r" to 0.0039.* varies 0.0039. times .* They fit as 255 \* x\."),
        (UNIT, 1e9 * UNIT, r"varies at least 256 times as much .* Prepare them as in train"),
        (
            UNIT,
            WITH_OUTLIER,
            r"half of the examples vary by less .* few values widen the range to 0 to 9",
        ),
        (CAFFE, PIXELS, r"shifted by .*s\. They fit as .*preprocess_input\(x, mode='caffe'\)\."),
        (
            UNIT,
            100 * UNIT - 50,
            r"varies (99.*|100) times as much .* Prepare them as in training\.",
        ),
    ],
)
def test_data_of_another_preparation(trained_on, given, message):
    model = with_statistics(trained_on, conv())
    quantize_on(model, trained_on)  # A warning would fail the test.
    with pytest.warns(UserWarning, match=message):
        quantize_on(model, given)


def test_training_looks_at_its_first_data():
    base = with_statistics(UNIT, conv())
    model = keras.Model(base.input, layers.Dense(1)(layers.Flatten()(base.output)))
    labels = np.zeros(32)

    def quantized():
        qat = keras_qat.quantize_model(model)
        qat.compile("sgd", "mse")
        return qat

    quantized().fit(UNIT, labels, verbose=0)  # A warning would fail the test.
    qat = quantized()
    with pytest.warns(UserWarning, match=r"\(uint8, 0 to 255\) .* They fit as x / 255\.$") as told:
        qat.fit(PIXELS, labels, verbose=0)
    assert [warning.filename for warning in told] == [__file__]
    qat.fit(PIXELS, labels, verbose=0)  # Warns only once.


def test_statistics_without_images():
    """Recipe contrib has a different BatchNormalization class, with the axis of images."""
    x = rng().normal(size=(32, 4)).astype(np.float32)
    model = with_statistics(x, layers.Dense(4), layers.ReLU())
    for recipe in ("int8", "contrib"):
        qat = quantize_on(model, x, recipe)
        with pytest.warns(UserWarning, match=r"'norm' varies (99\.\d|100) times as much"):
            keras_qat.calibrate(qat, 100 * x)


def test_normalization_and_rescaling():
    norm = layers.Normalization(name="norm")
    norm.adapt(PIXELS)
    model = keras.Sequential([keras.Input((8, 8, 3)), norm, conv()])
    quantize_on(model, PIXELS)
    with pytest.warns(UserWarning, match=r"'norm' varies 0.0039. times .* 255 \* x"):
        quantize_on(model, UNIT)
    model = keras.Sequential([keras.Input((8, 8, 3)), layers.Rescaling(1 / 255, name="s"), conv()])
    quantize_on(model, PIXELS)
    with pytest.warns(
        UserWarning, match="rescaled already, but layer 's' multiplies them by 0.00392"
    ):
        quantize_on(model, UNIT)
    for first in (layers.Resizing(6, 6), layers.CenterCrop(6, 6), layers.ZeroPadding2D()):
        model = keras.Sequential([keras.Input((8, 8, 3)), first, layers.Rescaling(1 / 255), conv()])
        with pytest.warns(UserWarning, match="rescaled already"):
            quantize_on(model, UNIT)
    later = [conv(), layers.Rescaling(1 / 255, name="s")]
    quantize_on(keras.Sequential([keras.Input((8, 8, 3)), *later]), UNIT)


def test_large_quantization_steps_without_outliers():
    model = keras.Sequential([keras.Input((8, 8, 3), name="image"), conv()])
    with pytest.warns(UserWarning, match=r"half of .* less .* includes 0: it is 0 to 100\.1"):
        quantize_on(model, 100 + UNIT / 10)
    noise = rng().normal(size=(8, 8, 8, 3)).astype(np.float32)
    quantize_on(model, noise, keras_qat.recipes.int8(activation_bits=2))  # Nothing to warn about.


def test_statistics_that_say_nothing():
    """Statistics of a hardly trained model, and statistics after several inputs."""
    quantize_on(
        keras.Sequential([keras.Input((8, 8, 3)), conv(), layers.BatchNormalization()]), UNIT
    )
    model = keras.Sequential([keras.Input((8, 8, 3)), conv(), layers.BatchNormalization()])
    model(UNIT / 50, training=True)  # A hundredth of the way from the initial statistics.
    quantize_on(model, UNIT / 50)
    inputs = [keras.Input((4,), name=name) for name in "ab"]
    norm = layers.BatchNormalization(momentum=0.0)
    model = keras.Model(inputs, norm(layers.Add()(inputs)))
    x = [rng(seed).normal(size=(32, 4)).astype(np.float32) for seed in (0, 1)]
    model(x, training=True)
    quantize_on(model, [100 * part for part in x])


def test_pixels_beside_other_inputs():
    image, label = keras.Input((3,), name="image"), keras.Input((1,), dtype="int32", name="label")
    embedded = layers.Flatten()(layers.Embedding(5, 3, "ones")(label))
    outputs = layers.Dense(3)(layers.Concatenate()([image, embedded]))
    numbers = rng()
    x = numbers.integers(0, 256, (32, 3)).astype(np.float32), numbers.integers(0, 5, (32, 1))
    quantize_on(keras.Model([image, label], outputs), list(x))


def test_normalization_of_each_pixel():
    norm = layers.Normalization(axis=(1, 2, 3))
    x = UNIT * np.linspace(1, 2, 8, dtype=np.float32)[:, None, None]
    norm.adapt(x)
    model = keras.Sequential([keras.Input((8, 8, 3)), norm, conv()])
    quantize_on(model, x)
    with pytest.warns(UserWarning, match="varies 50 times as much as in training"):
        quantize_on(model, 50 * x)


def test_lost_features():
    model = functional((3,), build=layers.Dense(2), name="sensor")
    x = rng().uniform(0, 1, (32, 3)).astype(np.float32) * [1, 1000, 400]
    message = r"Input '.*': feature 0 \(of 0 to 2\) spans less .* range, 0 to 9\d\d\..*int16x8"
    with pytest.warns(UserWarning, match=message):
        quantize_on(model, x)
    quantize_on(model, x / [1, 1000, 400])
    quantize_on(model, x, "int16x8")


def test_few_examples():
    model = functional((3,), build=layers.Dense(2))
    x = rng().normal(size=(4, 3))
    with pytest.warns(UserWarning, match="The ranges come from 3 examples: .* few hundred"):
        qat = quantize_on(model, x[:3])
    keras_qat.calibrate(qat, x[3:], reset=False)
    keras_qat.calibrate(qat, x)


def test_one_number_per_example_varies_among_examples():
    x = rng().uniform(0, 1, (32, 1, 1)).astype(np.float32)
    quantize_on(functional((1, 1), build=layers.Dense(2)), x)
