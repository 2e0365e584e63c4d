"""Names and arguments of other libraries are answered with the call that stands for them."""

from __future__ import annotations

import re

import pytest

import keras_qat
from keras_qat import callbacks, recipes
from keras_qat.config.other_libraries import ARGUMENTS, COUNTERPARTS
from tests.networks.small import tiny_net

pytestmark = pytest.mark.legacy


@pytest.mark.parametrize("name", COUNTERPARTS)
def test_names_of_other_libraries(name):
    with pytest.raises(AttributeError, match=re.escape(f"Use {COUNTERPARTS[name]}.")):
        getattr(keras_qat, name)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_other_libraries(name):
    with pytest.raises(TypeError, match=re.escape(f"no argument '{name}': pass {ARGUMENTS[name]}")):
        keras_qat.quantize_model(tiny_net(), **{name: 4})


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (
            lambda: recipes.int8(bits=4),
            "int8() has no argument 'bits': pass weight_bits=4, or take",
        ),
        (lambda: recipes.low_bits(bits=4), "pass two numbers, low_bits(4, 4)"),
        (lambda: recipes.low_bits(weight_bits=4), "Did you mean 'weights'?"),
        (lambda: recipes.contrib(bits=4), "pass weight_bits=4, activation_bits=4."),
        (lambda: recipes.int16x8(bits=16), "activations have 16"),
        (lambda: recipes.int4_weights(bits=4), "weights have 4"),
        (
            lambda: recipes.int8().override("conv", bits=4),
            "Recipe.override() has no argument 'bits'",
        ),
        (lambda: callbacks.FreezeBatchNorm(delay=3), "FreezeBatchNorm() has no argument 'delay'"),
        (lambda: keras_qat.export_tflite(None, input_type="uint8"), "Did you mean 'input_dtype'?"),
        (lambda: keras_qat.search_bits(None, None, 0.5, bits=4), "such as (4, 8)"),
        (lambda: keras_qat.targets.register("mine"), "takes a keras_qat.targets.Target"),
        (lambda: keras_qat.quantize_model(None, strict="yes"), "strict='yes': give True or False"),
    ],
)
def test_arguments_that_people_try(call, answer):
    with pytest.raises(TypeError, match=re.escape(answer)):
        call()


def test_answers_name_what_exists():
    answers = [*COUNTERPARTS.values(), *ARGUMENTS.values()]
    for name in re.findall(r"\b((?:recipes|callbacks|layers)\.\w+)", " ".join(answers)):
        module, _, attribute = name.partition(".")
        assert hasattr(getattr(keras_qat, module), attribute), name
    for recipe in re.findall(r"recipe=(\S+\))$", "\n".join(answers), flags=re.M):
        assert isinstance(eval(recipe, {"keras_qat": keras_qat, "layer": "conv"}), keras_qat.Recipe)


def test_names_of_modules():
    with pytest.raises(AttributeError, match=r"Use keras_qat\.callbacks\.QuantDelay\.$"):
        keras_qat.QuantDelay  # noqa: B018


def test_unknown_names():
    with pytest.raises(AttributeError, match=r"Did you mean 'quantize_model'\?$"):
        keras_qat.quantise_model  # noqa: B018
    with pytest.raises(TypeError, match=r"no argument 'scopes'\. Did you mean 'scope'\?$"):
        keras_qat.quantize_model(tiny_net(), scopes="conv")


def test_dir_shows_public_names_alone():
    assert dir(keras_qat) == sorted(keras_qat.__all__)
