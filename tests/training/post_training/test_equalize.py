"""Cross-layer equalization: outputs stay to the last bit, ranges become alike."""

import numpy as np
import pytest

import keras_qat
from keras_qat.training.post_training.equalize import _INPUTS, _equalize, _Layer, _pairs
from tests.helpers import assert_all_equal, images, keras, rng, scramble
from tests.networks.small import functional, layers, residual_net

pytestmark = pytest.mark.legacy
X = images(16, (8, 8, 2))


def separable(x, end=None, **norm):
    """Depthwise and pointwise convolutions, the channels of which differ by powers of ten."""
    x = layers.Conv2D(8, 3, use_bias=False, name="stem")(x)
    x = layers.ReLU(end)(layers.BatchNormalization(**norm)(x))
    x = layers.DepthwiseConv2D(3, padding="same", depth_multiplier=2, name="depthwise")(x)
    x = layers.MaxPooling2D()(layers.ReLU(end)(x))
    x = layers.Conv2D(6, 1, activation="relu", name="project")(x)
    x = layers.GlobalAveragePooling2D()(x)
    return layers.Dense(3, name="logits")(layers.Dense(5, activation="tanh", name="hidden")(x))


def uneven(model):
    for name, axis in (("stem", 3), ("depthwise", 2), ("project", 3)):
        kernel = model.get_layer(name).weights[0]
        shape = [size if place == axis else 1 for place, size in enumerate(kernel.shape)]
        kernel.assign(kernel * 10.0 ** rng().uniform(-2, 2, shape))
    return model


@pytest.mark.parametrize("norm", [{}, pytest.param({"center": False}, marks=pytest.mark.slow)])
def test_outputs_stay_to_the_last_bit(norm):
    model = uneven(functional((8, 8, 2), build=lambda x: separable(x, **norm)))
    before = model.get_weights()
    equalized = keras_qat.equalize(model)
    np.testing.assert_array_equal(equalized.predict(X, verbose=0), model.predict(X, verbose=0))
    assert [layer.name for layer in equalized.layers] == [layer.name for layer in model.layers]
    assert_all_equal(model.get_weights(), before)


def test_ranges_become_alike():
    """As equal as powers of two make them."""
    from keras_qat.graph.read_model import read_model
    from keras_qat.lowering import LoweringContext, lower

    model = keras_qat.equalize(uneven(functional((8, 8, 2), build=separable)))
    graph = lower(read_model(model), LoweringContext(activations=False))
    pairs = [(one, other) for one, other, reason in _pairs(graph) if not reason]
    assert [one.kernel.name for one, _ in pairs] == ["stem", "depthwise", "project"]
    for one, other in pairs:
        first, second = _Layer(one, graph), _Layer(other, graph)
        ratio = first.largest(first.axes) / second.largest(_INPUTS)
        assert np.all((ratio < 2.01) & (ratio > 0.49))
        assert not _equalize(first, second)


def test_separable_layers_and_nested_models():
    inner = keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            layers.SeparableConv2D(6, 3, activation="relu", name="one"),
            layers.SeparableConv2D(4, 3, activation="relu", name="other"),
        ],
        name="inner",
    )
    model = functional((8, 8, 2), build=lambda x: layers.Conv2D(2, 1, name="y")(inner(x)))
    kernel = inner.get_layer("one").pointwise_kernel
    kernel.assign(kernel * 10.0 ** rng().uniform(-2, 2, 6))
    equalized = keras_qat.equalize(model)
    np.testing.assert_array_equal(equalized.predict(X, verbose=0), model.predict(X, verbose=0))
    other = equalized.get_layer("inner").get_layer("one").pointwise_kernel
    assert np.ptp(np.log(np.abs(other).max((0, 1, 2)))) < np.ptp(
        np.log(np.abs(kernel).max((0, 1, 2)))
    )


def test_what_is_not_equalized(capsys):
    model = functional((8, 8, 2), build=lambda x: separable(x, 6.0))
    equalized = keras_qat.equalize(model, verbose=1)
    lines = capsys.readouterr().out.splitlines()
    assert "stem: its ReLU ends at 6, whatever the factor" in lines
    assert "project: equalized" in lines
    assert "hidden: Activation follows" in lines
    np.testing.assert_array_equal(equalized.predict(X, verbose=0), model.predict(X, verbose=0))
    scramble(residual := residual_net())
    with pytest.warns(UserWarning, match="No layers of 'residual' can be equalized: ") as warned:
        keras_qat.equalize(residual)
    files = [warning.filename for warning in warned if warning.category is UserWarning]
    assert files == [__file__]
    with pytest.raises(ValueError, match="quantized"):
        keras_qat.equalize(keras_qat.quantize_model(model))
