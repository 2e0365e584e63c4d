"""Tests inputs of files: usual data has no ties, and users can pass ranges."""

import contextlib
import dataclasses

import numpy as np
import pytest

import keras_qat
from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.integer_graph.pixel_inputs import accept_pixels
from keras_qat.integer_graph.resolve import resolve
from tests.comparison import KERNELS, RUNNABLE
from tests.helpers import images, observe, rng, scramble
from tests.networks.small import functional, layers

PIXELS = np.arange(256)
NORMALIZED = {
    "x / 127.5 - 1": lambda pixels: pixels / 127.5 - 1,
    "x / 255": lambda pixels: pixels / 255,
    "raw": lambda pixels: pixels,
    "(x - 127.5) / 64": lambda pixels: (pixels - 127.5) / 64,
}


def network():
    def build(x):
        x = layers.Conv2D(8, 3, activation="relu")(x)
        return layers.Dense(5)(layers.Flatten()(layers.Conv2D(8, 3)(x)))

    return scramble(functional((10, 10, 3), build=build))


@pytest.fixture(scope="module", params=NORMALIZED)
def fed(request):
    """Returns a model that observed normalized pixels, and the pixels."""
    pixels = rng(3).integers(0, 256, (48, 10, 10, 3))
    pixels[:, :8, :8, 0].reshape(-1)[:256] = PIXELS
    pixels[0, 0, 0], pixels[:, 1, 1, 0], pixels[:, 1, 1, 1] = 7, 0, 255
    x = NORMALIZED[request.param](pixels).astype(np.float32)
    return observe(keras_qat.quantize_model(network()), x), x


def test_ranges_of_other_tensors_are_what_was_observed(fed):
    qat, x = fed
    first, *others = keras_qat.quantizers(qat)
    assert first.spec.off_ties
    width = x.max() - min(x.min(), 0)
    assert first.maximum == pytest.approx(x.max() + width / 1019, rel=1e-6)
    assert not any(getattr(other.spec, "off_ties", False) for other in others)


@pytest.mark.parametrize("recipe", ["int16x8", "contrib"])
def test_other_recipes_are_as_they_were(recipe):
    qat = keras_qat.quantize_model(network(), recipe)
    assert not any(
        getattr(quantizer.spec, "off_ties", False) for quantizer in keras_qat.quantizers(qat)
    )


@pytest.fixture(scope="module")
def pixels(fed):
    """Returns the pixels that a model was trained on, and the scale and offset of its inputs."""
    _, x = fed
    scale, offset = (float(x.max()) - float(x.min())) / 255, float(x.min())
    return np.round((x - offset) / scale).astype(np.uint8), (scale, offset)


@pytest.mark.sample(3)
@pytest.mark.parametrize("kernels", RUNNABLE)
def test_a_file_of_pixels_gives_the_codes_of_the_model(fed, pixels, kernels):
    if kernels == "tflm":
        pytest.importorskip("tflite_micro")
    (qat, x), (taken, rescaling) = fed, pixels
    size = 16 if kernels == "tflm" else None
    contents = keras_qat.export_tflite(
        qat, input_dtype="uint8", rescaling=rescaling, batch_size=size
    )
    file = keras_qat.TFLiteModel(contents, kernels)
    (expected,) = keras_qat.simulate(qat, x, kernels).outputs.values()
    np.testing.assert_array_equal(file.predict(taken, codes=True), expected.codes)
    np.testing.assert_array_equal(file.predict(x, codes=True), expected.codes)


@pytest.fixture(scope="module")
def rescaled():
    """Returns a model that begins with `Rescaling`, and observed no pixel above 250."""
    network_ = functional(
        (6, 6, 3), build=lambda x: layers.Conv2D(4, 3)(layers.Rescaling(1 / 127.5, -1)(x))
    )
    x = rng(1).integers(0, 251, (32, 6, 6, 3)).astype(np.float32)
    return observe(keras_qat.quantize_model(scramble(network_)), x), x


def test_a_model_that_begins_with_rescaling_takes_pixels(rescaled):
    qat, x = rescaled
    file = keras_qat.TFLiteModel(keras_qat.export_tflite(qat, input_dtype="uint8"))
    (image,) = file.inputs.values()
    assert (image.dtype, image.scale, image.zero_point) == (np.uint8, 1, 0)
    np.testing.assert_array_equal(file.predict(x.astype(np.uint8)), qat.predict(x, verbose=0))


EACH = {
    "ImageNet's": ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375)),
    "means alone": ((103.939, 116.779, 123.68), (1.0, 1.0, 1.0)),
    "negatives": ((127.5, 127.5, 127.5), (-127.5, -127.5, -127.5)),
    "far apart": ((10.0, 200.0, 30.0), (-20.0, 50.0, 100.0)),
}
"""Means and deviations of the channels."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", EACH)
def test_scale_and_offset_may_be_of_each_channel(name):
    """Rounding to 127ths of a pixel changed up to 1 % of the quantized values."""
    mean, deviation = map(np.array, EACH[name])
    qat = keras_qat.quantize_model(network())
    given = rng(2).integers(0, 256, (32, 10, 10, 3))
    given[:3].reshape(-1, 3)[:256] = PIXELS[:, None]
    x = ((given - mean) / deviation).astype(np.float32)
    observe(qat, x)
    rescaling = (1 / deviation, -mean / deviation)
    contents = keras_qat.export_tflite(qat, input_dtype="uint8", rescaling=rescaling, batch_size=1)
    for kernels in (*KERNELS, "tflm"):
        if kernels == "tflm":
            pytest.importorskip("tflite_micro")
        predicted = keras_qat.TFLiteModel(contents, kernels).predict(
            given.astype(np.uint8), codes=True
        )
        (expected,) = keras_qat.simulate(qat, x, kernels).outputs.values()
        np.testing.assert_array_equal(predicted, expected.codes)
    assert keras_qat.verify(qat, contents, x).identical == 1


def test_each_channel_may_be_said_by_a_layer():
    mean, deviation = map(np.array, EACH["ImageNet's"])
    qat = keras_qat.quantize_model(network())
    observe(qat, ((rng(2).integers(0, 256, (8, 10, 10, 3)) - mean) / deviation).astype(np.float32))
    layer = layers.Normalization(mean=mean, variance=deviation**2)
    first, second = (
        keras_qat.TFLiteModel(keras_qat.export_tflite(qat, input_dtype="uint8", rescaling=item))
        for item in ((1 / deviation, -mean / deviation), layer)
    )
    given = rng(3).integers(0, 256, (8, 10, 10, 3)).astype(np.uint8)
    np.testing.assert_array_equal(first.predict(given), second.predict(given))


def test_many_channels_are_rescaled_by_one_operator():
    """TFLite Micro concatenates up to 10 tensors, so the file rounds to 127ths of a pixel."""
    qat = keras_qat.quantize_model(functional((6, 6, 12), build=layers.Conv2D(3, 3)))
    deviation = np.linspace(50, 60, 12)
    given = rng(2).integers(0, 256, (32, 6, 6, 12))
    x = (given / deviation - 2).astype(np.float32)
    observe(qat, x)
    with pytest.warns(
        UserWarning, match=r"rescaling: \d\.\d% of the pixel values of .* the middle"
    ):
        contents = keras_qat.export_tflite(qat, input_dtype="uint8", rescaling=(1 / deviation, -2))
    report = keras_qat.verify(qat, contents, x, per_layer=True)
    assert report.tensors[0].run.identical > 0.99


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rescaling": (1 / 255, 0)}, "rescaling requires input_dtype='uint8'"),
        ({"rescaling": 1 / 255}, "pass \\(scale, offset\\)"),
        ({"rescaling": (1 / 255, float("nan"))}, "pass \\(scale, offset\\)"),
        ({"rescaling": ([[1.0, 2.0], [3.0, 4.0]], 0)}, "pass \\(scale, offset\\)"),
        ({"rescaling": ([1.0, 1.0], 0)}, "2 values do not fit its shape"),
        ({"rescaling": {"photo": (1 / 255, 0)}}, "there is no input 'photo'"),
    ],
)
def test_rescalings_that_are_none(fed, given, message):
    dtype = None if "requires" in message else "uint8"
    with pytest.raises(ValueError, match=message):
        keras_qat.export_tflite(fed[0], input_dtype=dtype, **given)


def test_a_rescaling_of_other_data_is_told(rescaled):
    with pytest.warns(UserWarning, match="become -1 to 1, but the model's input has the range 0"):
        keras_qat.export_tflite(rescaled[0], input_dtype="uint8", rescaling=(1 / 127.5, -1))


@pytest.mark.parametrize(("scale", "match"), [(0.599, "range 0 to 255"), (0.6, None)])
def test_three_fifths_in_common_are_the_same_data(rescaled, scale, match):
    graph = resolve(rescaled[0])
    ((name, image),) = graph.inputs.items()
    image = dataclasses.replace(image, params=QuantParams(1.0, -128))
    graph = dataclasses.replace(graph, inputs={name: image})
    with pytest.warns(UserWarning, match=match) if match else contextlib.nullcontext():
        accept_pixels(graph, {name: (scale, 0.0)})


NO_RANGES = [(0.0, np.nan), (0.0, np.inf), (1.0, -1.0), (0.0, 0.0), (0.0, 0.5, 1.0), "ab", 3.0]


@pytest.fixture(scope="module")
def without_input_range():
    """Returns a model with inputs without a quantizer, and its data."""
    model = functional((6,), build=layers.Dense(3))
    x = np.abs(images(32, (6,))) + 3
    return observe(keras_qat.quantize_model(model, keras_qat.recipes.contrib(7, 7)), x), x


@pytest.mark.parametrize("given", NO_RANGES, ids=str)
def test_input_ranges_that_are_none(given, without_input_range):
    qat, x = without_input_range
    for verb in (
        keras_qat.export_tflite,
        keras_qat.resolve,
        lambda qat, **options: keras_qat.simulate(qat, x, **options),
    ):
        with pytest.raises(ValueError, match=r"input_range=.*: pass the minimum and the maximum"):
            verb(qat, input_range=given)


def test_input_range_without_zero(without_input_range):
    """Quantized values represented 0 to 3 instead of 3 to 6."""
    qat, x = without_input_range
    contents = keras_qat.export_tflite(qat, input_range=(3.0, 6.0))
    assert contents == keras_qat.export_tflite(qat, input_range=(0.0, 6.0))
    assert keras_qat.verify(qat, contents, np.minimum(x, 6)).max_difference <= 2
