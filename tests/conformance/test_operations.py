"""Compares observers and fake quantization with every recorded run of a single quantizer."""

import json

import numpy as np
import pytest
import tensorflow as tf

from keras_qat.arithmetic import fake_quant
from keras_qat.keras2.backend import keras
from keras_qat.specs import QuantSpec
from keras_qat.training.fake_quantization import observers

from .reference import FOLDER, case_files

OBSERVERS = {"LastValueQuantize": "last_value", "MovingAvgQuantize": "shadowed_moving_average"}


def assert_equal_to_one_ulp(actual, expected, what):
    actual, expected = np.asarray(actual, np.float32), np.asarray(expected, np.float32)
    assert actual.shape == expected.shape, what
    allowed = np.spacing(np.maximum(np.abs(actual), np.abs(expected)))
    assert np.all(np.abs(actual - expected) <= allowed), what


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", case_files(operations=True))
def test_quantizers(name):
    manifest = json.loads((FOLDER / f"{name}.json").read_text())
    arrays = np.load(FOLDER / f"{name}.npz")
    for config in manifest["configs"]:
        if not config["per_channel"]:  # Observers have one range for the tensor.
            check_configuration(arrays, config)


def check_configuration(arrays, config):
    key, batches = config["key"], arrays[f"input/order{config['order']}"]
    spec = QuantSpec(
        bits=config["num_bits"],
        symmetric=config["symmetric"],
        narrow_range=config["narrow_range"],
        observer=OBSERVERS[config["op"]],
        ema_decay=config["ema_decay"] or 0.0,
        initial_range=(config["init_min"], config["init_max"]),
    )
    observer = observers.make_observer(spec, keras.layers.Layer(), "x")
    variables = {"min": observer.minimum, "max": observer.maximum}
    for end, (biased, local_step) in getattr(observer, "shadows", {}).items():
        variables |= {f"{end}_biased": biased, f"{end}_local_step": local_step}

    def run(x, limits):
        x = tf.constant(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            output = fake_quant.fake_quantize(x, *limits(x), spec.bits, spec.narrow_range)
            target = tf.reduce_sum(output * arrays["projection"])
        return output, tape.gradient(target, x)

    for index, batch in enumerate(batches):
        for variable_name, variable in variables.items():
            recorded = arrays[f"{key}/{variable_name}"][index]
            assert_equal_to_one_ulp(variable, recorded, f"{key} {variable_name} {index}")
        output, gradient = run(batch, observer.update)
        assert_equal_to_one_ulp(output, arrays[f"{key}/output"][index], f"{key} output {index}")
        assert_equal_to_one_ulp(gradient, arrays[f"{key}/grad"][index], f"{key} grad {index}")
    for variable_name, variable in variables.items():
        assert_equal_to_one_ulp(variable, arrays[f"{key}/{variable_name}"][-1], variable_name)
    output, gradient = run(arrays["eval_input"], observer.range)
    assert_equal_to_one_ulp(output, arrays[f"{key}/eval_output"], f"{key} eval output")
    assert_equal_to_one_ulp(gradient, arrays[f"{key}/eval_grad"], f"{key} eval grad")
