"""Tests the costs of fewer bits, and the search within a budget, against simple searches."""

import itertools

import numpy as np
import pytest

import keras_qat
from keras_qat.analysis.search_bits import choose_bits
from keras_qat.analysis.sensitivity import LayerSensitivity, noise
from keras_qat.training.weight_limits import find_least_squares_limits, round_weights
from tests.helpers import images, rng, scramble
from tests.networks.small import functional, layers, residual_net

pytestmark = pytest.mark.legacy
X = images(24, (8, 8, 1))


@pytest.fixture(scope="module")
def model():
    return scramble(residual_net())


@pytest.fixture(scope="module")
def found(model):
    return keras_qat.sensitivity(model, X, bits=(4, 2, 8), batch_size=9)


def test_costs_are_those_of_one_layer(model, found):
    """Compares a cost with a manual rounding of one layer's weights."""
    assert [layer.name for layer in found.layers] == ["stem", "depthwise", "project", "logits"]
    assert [layer.weights for layer in found.layers] == [54, 54, 36, 3 * 96]
    wanted, kernel = model.predict(X, verbose=0), model.get_layer("stem").kernel
    value = kernel.numpy()
    for bits in (2, 8):
        kernel.assign(round_weights(value, find_least_squares_limits(value, (-1,), bits), bits))
        expected = noise([wanted], [model.predict(X, verbose=0)])
        kernel.assign(value)
        assert found.layers[0].costs[bits] == pytest.approx(expected, rel=1e-3)


def test_ranks(found):
    ranked = found.ranked()
    costs = [entry.costs[2] for entry in ranked]
    assert costs == sorted(costs, reverse=True)
    for layer in found.layers:
        assert layer.costs[2] > 10 * layer.costs[8]
    lines = str(found).splitlines()
    assert lines[0].split() == ["layer", "weights", "2", "bits", "4", "bits", "8", "bits"]
    assert lines[1].startswith(ranked[0].name)


def test_own_measure_and_parts_of_a_layer():
    def build(x):
        return layers.SeparableConv2D(3, 3, name="separable")(x)

    model = functional((8, 8, 2), build=build)
    ranking = keras_qat.sensitivity(
        model,
        images(4, (8, 8, 2)),
        bits=[3],
        measure=lambda exact, quantized: float(len(quantized)),
    )
    (layer,) = ranking.layers
    assert layer == LayerSensitivity("separable", 18 + 6, {3: 1.0})
    qat = keras_qat.quantize_model(
        model, keras_qat.search_bits(model, X, 1, bits=[3], known=ranking).recipe
    )
    assert {
        quantizer.spec.bits for quantizer in keras_qat.quantizers(qat) if "kernel" in quantizer.name
    } == {3}


@pytest.mark.parametrize("share", [0.26, 0.4, 0.55, 0.8, 1.0])
def test_cheapest_is_the_cheapest(share):
    """Compares the choice with all possible choices."""
    numbers, choices = rng(), [2, 4, 8]
    made = [
        LayerSensitivity(str(place), int(size), dict(zip(choices, costs, strict=True)))
        for place, (size, costs) in enumerate(
            zip(numbers.integers(50, 5000, 6), numbers.exponential(size=(6, 3)), strict=True)
        )
    ]
    budget = share * sum(item.weights for item in made)

    def total(chosen):
        size = sum(value.weights * bits / 8 for value, bits in zip(made, chosen, strict=True))
        cost = sum(value.costs[bits] for value, bits in zip(made, chosen, strict=True))
        return cost if size <= budget else np.inf

    best = min(map(total, itertools.product(choices, repeat=6)))
    assert total(choose_bits(made, budget, choices).values()) == pytest.approx(best, rel=1e-3)


def test_search(model, found):
    result = keras_qat.search_bits(model, X, 0.6, bits=(4, 8), known=found)
    assert result.bytes <= 0.6 * sum(layer.weights for layer in found.layers)
    assert {4, 8} == set(result.bits.values())
    scope = {"keras_qat": keras_qat}
    exec(str(result), scope)
    assert scope["recipe"] == result.recipe
    qat = keras_qat.quantize_model(model, scope["recipe"])
    there = {quantizer.quantizes[0]: quantizer.spec.bits for quantizer in keras_qat.quantizers(qat)}
    for name, bits in result.bits.items():
        kernel = "depthwise_kernel" if name == "depthwise" else "kernel"
        assert there[f"{name}/{kernel}"] == bits


def test_bad_input(model, found):
    with pytest.raises(ValueError, match=r"The budget is 10 bytes, but the weights need 216"):
        keras_qat.search_bits(model, X, 10, known=found)
    with pytest.raises(ValueError, match="No bits"):
        keras_qat.sensitivity(model, X, bits=())
    with pytest.raises(ValueError, match="bits=9"):
        keras_qat.sensitivity(model, X, bits=(9,))
    with pytest.raises(ValueError, match="weights per tensor"):
        keras_qat.sensitivity(model, X, recipe="contrib")
