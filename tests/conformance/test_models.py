"""Compares the model with every recorded run, step by step.

To test other runs of the same format, set KERAS_QAT_REFERENCE to their folder.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.graph.calls import flatten_values
from keras_qat.graph.read_model import read_model
from keras_qat.keras2.backend import keras
from keras_qat.layers import QuantizeWrapper

from .reference import FOLDER, Case, case_files

TOLERANCE = 1e-5
"""Largest difference relative to max(1, largest magnitude) of the recorded array."""

MAX_FLIPS = 3
"""Number of elements of a quantized output that may be one step off because of other sums."""

case = functools.cache(Case)
CASES = case_files(operations=False)
FAITHFUL = [name for name in CASES if not case(name).is_quirk]
"""All cases, except cases that record a bug of the original, which is not reproduced."""


def assert_close(actual, expected, what, step=None, count_flips=None):
    """Fails unless values are equal within TOLERANCE. A few may differ by exactly one step."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, what
    allowed = TOLERANCE * max(1.0, float(np.max(np.abs(expected), initial=0.0)))
    difference = np.abs(actual - expected)
    off = difference > allowed
    if step is not None and 0 < off.sum() <= MAX_FLIPS:
        assert np.all(np.abs(difference[off] - step) <= allowed), f"{what}: not one step off"
        count_flips(int(off.sum()))
        return
    assert not off.any(), f"{what}: {difference.max():.2g} off, {off.sum()} elements"


def output_step(found: Case) -> float | None:
    """Returns the step of the model's output; None if it has no quantizer."""
    if not found.manifest["model_output_is_quantized"]:
        return None
    row = next(row for row in found.manifest["placement"] if "model output" in row["consumers"])
    quantizer = found.quantizers[row["id"]]
    return float(QuantParams.from_range(*quantizer.current_range(), row["num_bits"]).scale)


def without_flips(found: Case, output, k: int):
    """Returns the output with recorded values for elements that were rounded differently.

    The loss follows from the output. Gradients also depend on inner values, which are not recorded.
    If such a value was rounded differently, they differ.
    """
    step = output_step(found)
    if step is None:
        return output
    off = found.arrays["train/output"][k] - output
    return output + tf.stop_gradient(tf.where(tf.abs(off) > step / 2, off, 0.0))


def flips(found: Case, output, k: int) -> int:
    """Counts the elements of the output that were rounded differently."""
    return np.count_nonzero(without_flips(found, output, k) - output)


def train_step(found: Case, k: int):
    """Runs one recorded training step. Returns the output, the loss, and the gradients by name."""
    names = found.manifest["trainable_order"]
    variables = [found.weights[name] for name in names]
    with tf.GradientTape() as tape:
        output = found.quantized(found.arrays["train/input"][k], training=True)
        loss = found.loss(without_flips(found, output, k))
    gradients = tape.gradient(loss, variables, unconnected_gradients="zero")
    for variable, gradient in zip(variables, gradients, strict=True):
        variable.assign_sub(found.manifest["learning_rate"] * gradient)
    return output, loss, dict(zip(names, gradients, strict=True))


def test_there_are_cases():
    assert CASES or case_files(operations=True), f"no recorded runs in {FOLDER}"


OBSERVERS = {"last_value": "last_value", "moving_average": "shadowed_moving_average"}
"""The record's name for an observer -> the name in `QuantSpec`."""


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
def test_placement(name):
    result = case(name)
    consumers = consumers_of_quantizers(result)
    for row in result.manifest["placement"]:
        spec = result.quantizers[row["id"]].spec
        expected = {
            "bits": row["num_bits"],
            "narrow_range": row["narrow_range"],
            "per_channel": row["per_channel"],
            "observer": OBSERVERS[row["range_update"]],
            "symmetric": row["symmetric"],
            "initial_range": (row["init_min"], row["init_max"]),
        }
        if row["moving_avg"]:
            expected["ema_decay"] = row["ema_decay"]
        assert {key: getattr(spec, key) for key in expected} == expected, row["id"]
        if not result.is_quirk:
            assert sorted(consumers[row["id"]]) == sorted(row["consumers"]), row["id"]


def consumers_of_quantizers(found: Case) -> dict[str, list[str]]:
    """Returns id of each quantizer -> its consumers, in the terms of the record."""
    read = read_model(found.quantized)
    consumers = read.consumers()
    outputs = flatten_values(read.outputs)
    separable = {
        layer["name"] for layer in found.manifest["layers"] if layer["class"] == "SeparableConv2D"
    }

    def label(layer) -> str:
        name = layer.name.removeprefix("quant_")
        if name.removesuffix("_depthwise") in separable and name not in separable:
            return f"{name.removesuffix('_depthwise')} (depthwise stage)"
        return f"{name} (pointwise stage)" if name in separable else name

    def labels(layer) -> list[str]:
        names = [label(layer)]
        if isinstance(layer, QuantizeWrapper) and layer.batch_norm is not None:
            statistics = "batch-statistics branch"
            names.append(
                names[0].replace("stage)", f"stage, {statistics})")
                if "stage)" in names[0]
                else f"{names[0]} ({statistics})"
            )
        return names

    result: dict[str, list[str]] = {}
    for call in read.calls:
        layer = call.layer
        weights = getattr(layer, "weight_quantizers", {}).values()
        output = getattr(layer, "output_quantizer", getattr(layer, "quantizer", None))
        for identifier, quantizer in found.quantizers.items():
            if quantizer in weights:
                result[identifier] = [label(layer)]
            if quantizer is output:
                readers = [
                    name for consumer in consumers[call.output] for name in labels(consumer.layer)
                ]
                result[identifier] = readers + ["model output"] * (call.output in outputs)
    return result


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FAITHFUL)
def test_each_step_from_the_recorded_state(name, count_flips):
    result, excused = case(name), []
    for k in range(result.steps):
        result.load_state(k)
        output, loss, gradients = train_step(result, k)
        step = output_step(result)
        assert_close(output, result.arrays["train/output"][k], f"output {k}", step, count_flips)
        assert_close(loss, result.arrays["train/loss"][k], f"loss {k}")
        try:
            assert_gradients_and_state(result, k, gradients)
        except AssertionError:
            if not flips(result, output, k):
                raise
            excused.append(k)
    assert len(excused) <= 1, f"what follows from flips in steps {excused}"


def assert_gradients_and_state(found: Case, k: int, gradients) -> None:
    for weight, gradient in gradients.items():
        recorded = found.arrays[f"train/grad/{weight}"][k]
        assert_close(gradient, recorded, f"gradient {k} of {weight}")
    for variable_name, variable in found.state.items():
        recorded = found.recorded(variable_name, k + 1)
        assert_close(variable, recorded, f"{variable_name} after step {k}")


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", FAITHFUL)
def test_free_run(name, count_flips):
    result, flipped = case(name), 0
    result.load_state(0)
    for k in range(result.steps):
        output, loss, _ = train_step(result, k)
        step = output_step(result)
        assert_close(output, result.arrays["train/output"][k], f"output {k}", step, count_flips)
        assert_close(loss, result.arrays["train/loss"][k], f"loss {k}")
        flipped += flips(result, output, k)
    try:
        for variable_name, variable in result.state.items():
            assert_close(variable, result.recorded(variable_name, result.steps), variable_name)
    except AssertionError:
        if not flipped:
            raise
        pytest.skip("this CPU adds up in another order: a value inside was rounded the other way")


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", FAITHFUL)
def test_inference(name, count_flips):
    result = case(name)
    result.load_state(result.steps)
    step = output_step(result)
    for inputs, outputs in (
        (result.arrays["eval/input"], "eval/output"),
        (result.arrays["train/input"][-1], "eval/output_on_train_input_last"),
    ):
        output = result.quantized(inputs, training=False)
        assert_close(output, result.arrays[outputs], outputs, step, count_flips)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_folding_changes_nothing_without_quantization(name):
    """Output and gradients equal the float model's, even in cases that record bugs of the original.

    The first bug reads an unfolded, unquantized tensor, and loses its gradient. The second bug
    includes padding in the batch's variance. Both would fail this comparison.
    """
    result = case(name)
    result.load_state(0)
    keras_qat.set_quantization(result.quantized, False)
    try:
        model = keras.models.clone_model(result.model)
        copied = {
            f"{layer.name}/{variable.name.split('/')[-1].split(':')[0]}": variable
            for layer in model.layers
            for variable in layer.weights
        }
        for weight, variable in copied.items():
            variable.assign(result.weights[weight])
        names = result.manifest["trainable_order"]
        x = result.arrays["train/input"][0]
        results = []
        for network, variables in ((model, copied), (result.quantized, result.weights)):
            with tf.GradientTape() as tape:
                output = network(x, training=True)
                loss = result.loss(output)
            results.append((output, tape.gradient(loss, [variables[name] for name in names])))
        (expected, expected_gradients), (actual, gradients) = results
        np.testing.assert_allclose(actual, expected, atol=2e-5, rtol=2e-5)
        for weight, one, other in zip(names, expected_gradients, gradients, strict=True):
            np.testing.assert_allclose(other, one, atol=2e-5, rtol=2e-4, err_msg=weight)
    finally:
        for layer in result.quantized.layers:
            if hasattr(layer, "quantize_from"):
                layer.quantize_from.assign(
                    result.manifest["training_options"].get("quant_delay", 0)
                )
