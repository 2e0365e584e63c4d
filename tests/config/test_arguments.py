"""Arguments of the wrong type or value are refused with what to pass."""

import re

import numpy as np
import pytest

import keras_qat
from keras_qat import callbacks, recipes
from tests.networks.small import tiny_net

pytestmark = pytest.mark.legacy


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (lambda: keras_qat.targets.register("mine"), "needs a keras_qat.targets.Target"),
        (lambda: keras_qat.quantize_model(None, strict="yes"), "strict='yes': pass True or False"),
        (
            lambda: keras_qat.strip_quantization(None, "float.keras"),
            "folded='float.keras': pass True or False",
        ),
    ],
)
def test_values_that_people_try(call, answer):
    with pytest.raises(TypeError, match=re.escape(answer)):
        call()


def test_data_for_a_recipe():
    with pytest.raises(ValueError, match=r"a recipe, got ndarray. quantize_model needs no data"):
        keras_qat.quantize_model(tiny_net(), np.zeros((4, 6, 6, 2)))


def test_what_cannot_be_set_on_a_model():
    qat = keras_qat.quantize_model(tiny_net())
    with pytest.raises(ValueError, match="cannot be changed"):
        qat.recipe = recipes.int16x8()
    with pytest.raises(TypeError, match="pack_int4='yes': pass True or False"):
        qat.pack_int4 = "yes"
    assert qat.recipe == recipes.int8() and not qat.pack_int4


def test_a_class_for_a_callback():
    with pytest.raises(TypeError, match=r"\[QuantDelay\] contains a class. Pass QuantDelay\("):
        keras_qat.quantize_model(tiny_net()).fit(None, callbacks=[callbacks.QuantDelay])


def test_dir_shows_public_names_alone():
    assert dir(keras_qat) == sorted(keras_qat.__all__)
