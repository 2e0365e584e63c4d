"""Tests recipes and specifications: refused options, and overrides without effect."""

import copy
import pickle

import numpy as np
import pytest

import keras_qat
from keras_qat import recipes, specs
from keras_qat.config.specs import from_config
from tests.networks.small import tiny_net


@pytest.mark.legacy
@pytest.mark.parametrize("bits", [-1, 0, 1, 9, 16, 4.0, "8", None, True])
@pytest.mark.parametrize("which", ["weight_bits", "activation_bits"])
def test_bits(which, bits):
    with pytest.raises(ValueError, match="from 2 to 8"):
        recipes.int8(**{which: bits})


def test_deprecated_names_of_bits():
    with pytest.warns(DeprecationWarning, match="use weight_bits= and"):
        assert recipes.low_bits(weights=2, activations=3) == recipes.low_bits(2, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"observer": "median"}, "moving_average"),
        ({"ema_decay": 1.0}, "below 1"),
        ({"ema_decay": -0.1}, "at least 0"),
    ],
)
def test_spec(options, message):
    with pytest.raises(ValueError, match=message):
        specs.QuantSpec(**options)


@pytest.mark.parametrize("ends", [(0.0, np.inf), (np.nan, 1.0), (2.0, 1.0), (1.0, 1.0)])
def test_ranges_that_are_empty_or_not_finite(ends):
    message = r"The range .* (is empty|is not finite)"
    with pytest.raises(ValueError, match=message):
        specs.FixedSpec(*ends)
    with pytest.raises(ValueError, match=message):
        specs.QuantSpec(initial_range=ends)


def test_configurations_of_no_specification():
    for config in ({"kind": "os.system"}, {"kind": "QuantSpec", "command": "ls"}, "QuantSpec", 3):
        with pytest.raises(ValueError, match="is not a quantization spec"):
            from_config(config)


def test_an_override_that_was_not_assigned_is_told_once():
    recipe = recipes.int8()
    recipe.override("Dense", quantize=False)
    for verb in (keras_qat.quantize_model, keras_qat.plan):
        recipe.override("Dense", quantize=False)
        with pytest.warns(UserWarning, match=r"Write recipe = recipe.override\('Dense', ...\).$"):
            verb(tiny_net(), recipe=recipe)
    keras_qat.quantize_model(tiny_net(), recipe)  # A warning would fail the test.


def test_overrides_that_were_used_are_not():
    base = recipes.int8()
    model = tiny_net()
    keras_qat.quantize_model(model, base.override("Dense", weight_bits=4))
    changed = base.override("Dense", weight_bits=4).override("*", activation_bits=4)
    keras_qat.quantize_model(model, base)
    keras_qat.quantize_model(model, changed)
    keras_qat.quantize_model(model, pickle.loads(pickle.dumps(changed)))
    assert copy.deepcopy(changed) == changed
