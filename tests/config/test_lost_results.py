"""`recipe.override(...)` that is not assigned has no effect, which is told."""

import copy
import pickle

import pytest

import keras_qat
from keras_qat import recipes
from tests.networks.small import tiny_net


def test_an_override_that_was_not_assigned_is_told_once():
    recipe = recipes.int8()
    recipe.override("Dense", quantize=False)
    for verb in (keras_qat.quantize_model, keras_qat.plan):
        recipe.override("Dense", quantize=False)
        with pytest.warns(UserWarning, match=r"Write recipe = recipe.override\('Dense', ...\).$"):
            verb(tiny_net(), recipe=recipe)
    keras_qat.quantize_model(tiny_net(), recipe)  # A warning would be an error.


def test_overrides_that_were_used_are_not():
    base = recipes.int8()
    model = tiny_net()
    keras_qat.quantize_model(model, base.override("Dense", weight_bits=4))
    changed = base.override("Dense", weight_bits=4).override("*", activation_bits=4)
    keras_qat.quantize_model(model, base)
    keras_qat.quantize_model(model, changed)
    keras_qat.quantize_model(model, pickle.loads(pickle.dumps(changed)))
    assert copy.deepcopy(changed) == changed
