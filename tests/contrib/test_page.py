"""Tests the page "Coming from tf.contrib.quantize": its programs, and the names in its table."""

import inspect
import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.helpers import rng

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "coming-from-tf-contrib-quantize.md").read_text(encoding="utf-8")
CHECKLIST = (Path(__file__).parent / "checklist.md").read_text(encoding="utf-8")


PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.slow
def test_the_programs_of_the_page_run():
    page: dict = {}
    with pytest.warns(UserWarning, match="not symmetric"):  # As on the page.
        exec("\n".join(PROGRAMS), page)
    assert all(quantizer.calibrated for quantizer in keras_qat.quantizers(page["qat"]))
    report = keras_qat.verify(page["qat"], page["contents"], page["images"][1200:])
    assert report.outputs[0].argmax_agreement > 0.98


def test_a_checkpoint_of_the_original_is_loaded(tmp_path):
    page: dict = {}
    exec(PROGRAMS[0].split("qat.compile")[0] + PROGRAMS[1], page)
    shapes = {
        "conv1/weights": (3, 3, 1, 16),
        "conv1/BatchNorm/beta": (16,),
        "conv1/BatchNorm/moving_mean": (16,),
        "conv1/BatchNorm/moving_variance": (16,),
        "logits/weights": (6 * 6 * 16, 10),
        "logits/biases": (10,),
    }
    arrays = {name: rng(len(name)).uniform(0.1, 1, shape) for name, shape in shapes.items()}
    for scope, number in (("conv1", 1.5), ("logits", 2.5)):
        arrays |= {f"{scope}/weights_quant/min": -number, f"{scope}/weights_quant/max": number}
        for end in ("min", "max"):
            arrays[f"{scope}/act_quant/{end}"] = -2.0 if end == "min" else 2 * number
            for shadow in ("biased", "local_step"):
                arrays[f"{scope}/act_quant/{scope}/act_quant/{end}/{shadow}"] = 7.0
    arrays = {name: np.float32(value) for name, value in arrays.items()}
    arrays["fake_quantization_step"] = np.int64(1234)
    path = str(tmp_path / "model.ckpt")
    tf.raw_ops.SaveV2(
        prefix=path,
        tensor_names=list(arrays),
        shape_and_slices=[""] * len(arrays),
        tensors=[tf.constant(array) for array in arrays.values()],
    )

    qat = keras_qat.quantize_model(page["model"], "contrib")
    page["load_checkpoint"](qat, path)
    weights = {weight.name.split(":")[0]: weight.numpy() for weight in qat.weights}
    np.testing.assert_array_equal(weights["quant_conv1/conv1/kernel"], arrays["conv1/weights"])
    np.testing.assert_array_equal(weights["quant_logits/logits/bias"], arrays["logits/biases"])
    np.testing.assert_array_equal(
        weights["quant_conv1/conv1_bn/moving_variance"], arrays["conv1/BatchNorm/moving_variance"]
    )
    assert weights["quant_conv1/step"] == 1234
    assert weights["quant_logits/output_max_local_step"] == 7
    result = {
        quantizer.name: (quantizer.minimum, quantizer.maximum)
        for quantizer in keras_qat.quantizers(qat)
    }
    assert result == {
        "quant_conv1/kernel": (-1.5, 1.5),
        "quant_conv1/output": (-2, 3),
        "quant_logits/kernel": (-2.5, 2.5),
        "quant_logits/output": (-2, 5),
    }


def test_every_option_of_the_recipe_is_on_the_page():
    for option in inspect.signature(keras_qat.recipes.contrib).parameters:
        assert option in PAGE, option


def test_every_line_of_the_checklist_is_there_and_its_tests_exist():
    numbers = [int(number) for number in re.findall(r"^\| (\d+) \|", CHECKLIST, flags=re.MULTILINE)]
    assert numbers == list(range(1, 70))
    root = DOCS.parent
    for file, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", CHECKLIST):
        assert f"def {test}(" in (root / file).read_text(encoding="utf-8"), f"{file}::{test}"
