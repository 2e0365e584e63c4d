"""Tests targets: their defaults, contradicting arguments, and their problems."""

import dataclasses

import numpy as np
import pytest

import keras_qat
from keras_qat import recipes, targets
from keras_qat.targets import Kernel, Target, problems
from keras_qat.tflite.reader import FileGraph
from tests.helpers import build_model, images, keras, observe, save_and_load
from tests.networks.small import functional, layers, residual_net

X = images(24, (8, 8, 1))
MINE = Target("mine", "My chip", "reference", 1, {"CONV_2D": Kernel(("int8", "int32"))})


def wide(activation="relu"):
    def build(x):
        x = layers.UpSampling2D(3, interpolation="bilinear", name="up")(x)
        x = layers.Conv2D(4, 5, strides=4, padding="same", name="wide")(x)
        return layers.Activation(activation, name="last")(x)

    return functional((8, 8, 2), build=build)


@pytest.fixture(scope="module")
def for_tflm():
    return observe(keras_qat.quantize_model(residual_net(), target="tflm"), X)


def test_all_targets_are_there():
    assert targets.known() == (
        *("xnnpack", "tflm", "cmsis_nn", "ethos_u55", "ethos_u65", "ethos_u85"),
        *("edgetpu", "stm32_npu", "stm32n6", "neutron", "mediatek", "esp_nn", "coral_npu"),
    )
    assert all(targets.get(name).source for name in targets.known())


def test_recipe_and_kernels_follow():
    qat = keras_qat.quantize_model(residual_net(), target="stm32_npu")
    assert qat.recipe == recipes.int8(per_channel=False)
    assert qat.kernels == "xnnpack"
    qat = keras_qat.quantize_model(residual_net(), target=targets.ETHOS_U55)
    assert (qat.recipe, qat.kernels) == (recipes.int8(), "tflm")


def test_the_user_may_say_another_recipe():
    recipe = recipes.int4_weights()
    qat = keras_qat.quantize_model(residual_net(), recipe, target="ethos_u55", kernels="tflm")
    assert qat.recipe == recipe


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "tflm", "kernels": "xnnpack"}, "has the kernels 'tflm'. Leave kernels out"),
        ({"target": "edgetpu", "recipe": "int16x8"}, "no kernels for activations of 16 bits"),
        ({"target": "ethos"}, r"target='ethos': use one of 'xnnpack', 'tflm'.*register"),
    ],
)
def test_contradictions_are_said(options, message):
    with pytest.raises(ValueError, match=message):
        keras_qat.quantize_model(residual_net(), **options)


def test_the_file_is_for_the_target(for_tflm, tmp_path):
    pytest.importorskip("tflite_micro")
    contents = keras_qat.export_tflite(for_tflm)
    (image,) = FileGraph(contents).inputs.values()
    assert image.shape[0] == 1
    report = keras_qat.verify(for_tflm, contents, X)
    assert (report.kernels, report.identical) == ("tflm", 1)
    assert keras_qat.simulate(for_tflm, X[:2]).kernels == "tflm"
    with pytest.raises(ValueError, match="batch_size=4: TFLite Micro requires batch size 1"):
        keras_qat.export_tflite(for_tflm, batch_size=4)
    (image,) = FileGraph(keras_qat.export_tflite(for_tflm, target="xnnpack")).inputs.values()
    assert image.shape[0] == -1


def test_a_model_remembers_its_target(for_tflm, tmp_path):
    loaded = save_and_load(for_tflm, tmp_path / "model.keras")
    assert loaded.target is targets.TFLM
    assert keras_qat.quantize_model(residual_net()).target is None


def test_the_target_of_a_vendor(tmp_path):
    undo = targets.register(MINE)
    try:
        qat = observe(keras_qat.quantize_model(residual_net(), target="mine"), X)
        assert qat.kernels == "reference"
        qat.save(tmp_path / "model.keras")
        assert keras.models.load_model(tmp_path / "model.keras").target is MINE
        with pytest.warns(UserWarning, match="target mine: operators missing.*\n.*: no kernel"):
            keras_qat.export_tflite(qat)
    finally:
        undo()
    with pytest.warns(UserWarning, match="'mine', which is not registered") as warned:
        assert keras.models.load_model(tmp_path / "model.keras").target is None
    files = [warning.filename for warning in warned if warning.category is UserWarning]
    assert files == [__file__]
    assert keras_qat.quantize_model(residual_net(), target=MINE).target is MINE


def test_a_plan_names_what_the_target_lacks_and_what_to_change():
    text = str(keras_qat.plan(wide("gelu"), target="ethos_u55"))
    assert "target ethos_u55: operators left to the CPU" in text
    assert "up: RESIZE_BILINEAR: 2x only, not 3x3" in text
    assert "wide: CONV_2D: strides up to 3 only, not 4" in text
    plan = keras_qat.plan(wide("gelu"), target="tflm")
    assert "operators missing, so files with them do not run\n" in str(plan)
    (problem,) = plan.problems
    assert str(problem).endswith("no kernel; use an activation that the target has, such as ReLU")
    assert plan.to_dict()["problems"][0]["operator"] == "GELU"
    wrong = build_model((4,), layers.Dense(1, activation="softmax"))
    text = str(keras_qat.plan(wrong, "int16x8", target="cmsis_nn"))
    assert "operators faulty or inexact, so files with them return other values or stop\n" in text
    assert "LiteRT runs all of it" in str(keras_qat.plan(wide("gelu"), target="xnnpack"))
    assert "target" not in keras_qat.plan(wide()).to_dict()


def test_a_plan_says_that_devices_compute_floats_in_their_own_way():
    model = build_model((6, 6, 2), keras.layers.LayerNormalization())
    assert "device's math library" in str(keras_qat.plan(model, target="cmsis_nn"))
    assert "device's math library" not in str(keras_qat.plan(wide(), target="cmsis_nn"))


def test_advice_to_index_before_the_model_is_for_its_inputs():
    x = keras.Input((4,), dtype="int64")
    y = layers.Activation("selu")(layers.Embedding(9, 3)(x))
    lookup, *others = map(str, keras_qat.plan(keras.Model(x, y), target="ethos_u55").problems)
    assert lookup.endswith("no kernel for int64, only for int32; index before the model")
    assert others and not any("before the model" in text for text in others)


def test_weights_with_a_scale_for_each_channel_are_named_where_they_are_slow():
    slow = keras_qat.plan(residual_net(), recipes.int8(), target="stm32_npu").problems
    names = {problem.operator for problem in slow}
    assert names == {"CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"}
    assert all("per_channel=False" in problem.change for problem in slow)
    assert keras_qat.plan(residual_net(), target="stm32_npu").problems == ()


def test_tables_differ_by_their_data():
    qat = keras_qat.quantize_model(wide())
    own = dataclasses.replace(targets.ETHOS_U55, name="other", operators=None)
    assert [problem.tensor for problem in problems(qat, "ethos_u55")] == ["up", "last"]
    assert problems(qat, own) == ()
    assert np.all([problem.elsewhere == "the CPU" for problem in problems(qat, "ethos_u55")])
