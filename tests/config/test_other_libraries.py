"""Tests that names and arguments of other libraries are answered with the call to use instead."""

import re

import numpy as np
import pytest

import keras_qat
from keras_qat import callbacks, recipes, specs
from keras_qat.config.arguments import ARGUMENTS, COUNTERPARTS
from keras_qat.rewriting.quantized_model import VERBS
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
        (lambda: recipes.int8(bits=4), "int8() has no argument 'bits': pass weight_bits=4, or use"),
        (lambda: recipes.low_bits(bits=4), "pass low_bits(4, 4)"),
        (lambda: recipes.low_bits(weight_bit=4), "Did you mean 'weight_bits'?"),
        (lambda: recipes.contrib(bits=4), "pass weight_bits=4, activation_bits=4."),
        (lambda: recipes.int16x8(bits=16), "activations have 16"),
        (lambda: recipes.int4_weights(bits=4), "weights have 4"),
        (
            lambda: recipes.int8().override("conv", bits=4),
            "Recipe.override() has no argument 'bits'",
        ),
        (lambda: callbacks.FreezeBatchNorm(delay=3), "FreezeBatchNorm() has no argument 'delay'"),
        (lambda: keras_qat.export_tflite(None, input_type="uint8"), "Did you mean 'input_dtype'?"),
        (lambda: keras_qat.targets.register("mine"), "needs a keras_qat.targets.Target"),
        (lambda: keras_qat.quantize_model(None, strict="yes"), "strict='yes': pass True or False"),
        (lambda: specs.QuantSpec(symetric=True), "QuantSpec() has no argument 'symetric'. Did you"),
        (lambda: recipes.int8(symmetric=True), "pass keras_qat.recipes.symmetric() as the recipe."),
        (lambda: keras_qat.Recipe("int8"), "keras_qat.recipes.int8() and others make recipes."),
        (lambda: keras_qat.calibrate(None, None, epochs=2), "one pass over the data is enough"),
        (
            lambda: keras_qat.export_tflite(None, None, None),
            "Call it as export_tflite(model, path=",
        ),
        (lambda: keras_qat.simulate(None, None, kernel="tflm"), "Did you mean 'kernels'?"),
        (lambda: recipes.int8().override(weight_bits=4), "Call it as Recipe.override(layers, *"),
        (lambda: keras_qat.verify(None, "file"), "verify: missing a required argument: 'x'. Call"),
        (lambda: keras_qat.bias_correction(None), "Call it as bias_correction(model, data, steps="),
        (
            lambda: keras_qat.strip_quantization(None, "float.keras"),
            "folded='float.keras': pass True or False",
        ),
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


def test_recipes_and_targets_that_do_not_exist():
    with pytest.raises(
        AttributeError, match=r"no recipe 'int9'. Did you mean 'int8'\? The recipes are"
    ):
        recipes.int9  # noqa: B018
    with pytest.raises(
        AttributeError, match=r"no callback 'Quant'.* FreezeBatchNorm, .*QuantDelay\."
    ):
        callbacks.Quant  # noqa: B018
    with pytest.raises(AttributeError, match=r"no target 'ESP32'. The targets are: xnnpack, tflm"):
        keras_qat.targets.ESP32  # noqa: B018


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


def test_functions_that_people_call_as_methods():
    assert set(VERBS) < set(keras_qat.__all__)
    qat = keras_qat.quantize_model(tiny_net())
    with pytest.raises(AttributeError, match=r"Call keras_qat\.export_tflite\(model, \.\.\.\)\.$"):
        qat.export_tflite("model.tflite")
    with pytest.raises(AttributeError, match="Add layers to the float model, and quantize that"):
        qat.add(None)


def test_a_class_for_a_callback():
    with pytest.raises(TypeError, match=r"\[QuantDelay\]: make one of the class, QuantDelay\("):
        keras_qat.quantize_model(tiny_net()).fit(None, callbacks=[callbacks.QuantDelay])


def test_dir_shows_public_names_alone():
    assert dir(keras_qat) == sorted(keras_qat.__all__)
