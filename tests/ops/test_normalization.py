"""Tests that normalization in 32-bit integers is as precise as in float."""

import re

import numpy as np
import pytest

import keras_qat
from keras_qat.graph.read_model import read_model
from keras_qat.ops.normalization import LARGEST, LEAST_WEIGHTS, _bits_of_mean
from keras_qat.ops.weighted_sums import RECENT
from tests.comparison import KERNELS, assert_identical, export
from tests.helpers import build_model, images, keras, layers, rng
from tests.ops.examples.elementwise import GroupNorm
from tests.ops.harness import assert_same, make_node, random_inputs
from tests.ops.harness import in_integers as codes_of
from tests.ops.test_movement import check

pytestmark = pytest.mark.skipif(not RECENT, reason="this TensorFlow lacks a kernel")


def in_integers(kind, recipe=None):
    """Returns a recipe that quantizes a class of layers."""
    return (recipe or keras_qat.recipes.int8()).override(kind, quantize=True)


def signal_to_noise(found, expected):
    found, expected = np.asarray(found), np.asarray(expected)
    return 10 * np.log10(np.sum(expected**2) / np.sum((found - expected) ** 2))


HARD = {
    "rows of other means": lambda x, numbers: x + 5 * numbers.normal(size=(len(x), 1, 1)),
    "far from zero": lambda x, numbers: x + 20,
    "of small numbers": lambda x, numbers: 1e-6 * x,
    "of large numbers": lambda x, numbers: 1e6 * x,
    "one channel alone": lambda x, numbers: np.where(np.arange(24) == 3, 40 * x, x),
    "rows of one value": lambda x, numbers: np.where(numbers.random((len(x), 1, 1)) < 0.3, 1, x),
}


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("data", HARD)
@pytest.mark.parametrize("groups", [None, 1, 3, -1])
def test_hard_data(data, groups):
    """Intermediate results fit 32 bits, whatever the inputs, epsilon and weights are."""
    numbers = rng(0)
    x = HARD[data](numbers.normal(size=(64, 5, 24)), numbers).astype(np.float32)
    inputs = keras.Input((5, 24))
    kind = "LayerNormalization" if groups is None else "GroupNormalization"
    layer = getattr(layers, kind)(*[] if groups is None else [groups])
    model = keras.Model(inputs, layer(inputs))
    gamma = numbers.normal(size=24) * np.where(np.arange(24) == 7, 10, 1)
    layer.set_weights([gamma, 3 * numbers.normal(size=24)])
    exported = export(model, x, recipe=in_integers(kind), strict=True)
    for kernels in KERNELS:
        assert_identical(exported.model, x, kernels, exported.contents)
    in_float = signal_to_noise(export(model, x).model(x), model(x))
    assert signal_to_noise(exported.model(x), model(x)) > in_float - 0.5


def test_an_offset_that_is_far_larger_than_the_factor():
    layer, x = layers.LayerNormalization(), images(64, (24,))
    model = build_model((24,), layer)
    layer.set_weights([np.full(24, 0.01), 100 * rng(0).normal(size=24)])
    exported = export(model, x, recipe=in_integers("LayerNormalization"), strict=True)
    assert signal_to_noise(exported.model(x), model(x)) > 40


@pytest.mark.parametrize("size", [1, 2, 3, 16, 100, 512, 3000, 43_000, 44_000, 10**6])
def test_means_have_as_many_bits_as_there_is_room_for(size):
    """Up to 7 fractional bits, which leaves enough steps for gamma."""
    bits = _bits_of_mean(size)
    room = LARGEST / (32767 * min((1.5 * size) ** 0.5, 255))
    assert 0 <= bits <= 7
    assert room / 2**bits >= LEAST_WEIGHTS
    assert bits == 7 or room / 2 ** (bits + 1) < LEAST_WEIGHTS


@pytest.mark.parametrize(
    "layer",
    [
        layers.LayerNormalization(name="norm"),
        pytest.param(layers.GroupNormalization(2, name="norm"), marks=pytest.mark.slow),
    ],
)
def test_integers_are_asked_for(layer, tmp_path):
    """Only an override quantizes them, and the saved model keeps it."""
    inputs, path = keras.Input((6, 8)), str(tmp_path / "qat.keras")
    model = keras.Model(inputs, layers.Dense(3)(layer(inputs)))
    reason = keras_qat.plan(model).float_layers["norm"]
    kind = re.search(r"override\('(\w+)', quantize=True\)", reason).group(1)
    for recipe, in_float in ((keras_qat.recipes.int8(), True), (in_integers(kind), False)):
        exported = export(model, images(24, (6, 8)), recipe=recipe)
        assert exported.report.outputs[0].identical == 1.0
        assert ("norm" in keras_qat.plan(model, recipe).float_layers) is in_float
        exported.model.save(path)
        assert keras_qat.export_tflite(keras.models.load_model(path)) == exported.contents
        floats = [op for op, reads, _ in exported.file.operations() if reads[0].kind == "f"]
        assert bool(set(floats) - {"QUANTIZE"}) is in_float


def test_earlier_versions_did_not_note_that_it_is_in_float(tmp_path):
    model = build_model((6, 8), layers.LayerNormalization(name="norm"))
    qat = export(model, images(24, (6, 8))).model
    config = {**qat.get_config(), "float_layers": {}}
    del config["asked_for"]
    old = type(qat).from_config(config)
    old.set_weights(qat.get_weights())
    assert keras_qat.export_tflite(old) == keras_qat.export_tflite(qat)


@pytest.mark.parametrize("pixels", [1, 2])
def test_two_groups_of_few_pixels(pixels):
    numbers = rng(1)
    x = keras.Input((pixels, 6))
    layer = GroupNorm(2, epsilon=1e-3, gamma_initializer="normal", beta_initializer="normal")
    (call,) = read_model(keras.Model(x, layer(x))).calls
    node = make_node(call, 8, numbers)
    inputs = random_inputs(node, numbers)
    assert_same(node, inputs, "reference")
    (codes,) = codes_of(node, inputs, "reference")
    real = layer(node.inputs[0].params.dequantize(inputs[node.inputs[0].name]))
    params = node.output.params
    away = params.dequantize(codes) - np.clip(
        real, *(params.dequantize(np.array(end)) for end in (params.lowest, params.highest))
    )
    assert np.abs(away).max() < params.scale


def test_an_epsilon_that_is_far_larger_than_the_variance():
    """Results are small, and the largest come from few channels."""
    x = 1e-3 * np.float32(rng(0).choice([-128, 127], (64, 4), p=[0.75, 0.25]))
    model = build_model((4,), layers.LayerNormalization(epsilon=1.0))
    exported = export(model, x, recipe=in_integers("LayerNormalization"), strict=True)
    in_float = signal_to_noise(exported.model(x, training=True), model(x))
    assert signal_to_noise(exported.model(x), model(x)) > in_float - 0.1


def test_several_sizes_that_are_not_known_before_run_time():
    assert "SHAPE" in check(layers.LayerNormalization(), (None, None, 4), families=("xnnpack",))
