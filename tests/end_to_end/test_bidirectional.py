"""Bidirectional as two recurrent layers and a merge: files, predictions and simulation."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import keras_qat
from keras_qat.keras2.backend import keras
from keras_qat.lowering.recurrent import MERGES
from tests.end_to_end.exact import assert_exact_everywhere
from tests.helpers import images, observe, scramble, train
from tests.networks.small import functional

layers = keras.layers

SHAPE = (3, 4)


def lstm(**options: Any) -> Any:
    return layers.LSTM(3, **options)


def all_merges(x: Any) -> Any:
    """Each merge, of last steps and of sequences, and one that gives both tensors."""
    result = []
    for merge in MERGES:
        for sequences in (False, True):
            y = layers.Bidirectional(lstm(return_sequences=sequences), merge_mode=merge)(x)
            result.append(layers.Flatten()(y))
    first, second = layers.Bidirectional(lstm(return_sequences=True), merge_mode=None)(x)
    other = layers.Bidirectional(
        lstm(go_backwards=True), backward_layer=lstm(use_bias=False), name="turned"
    )
    return layers.Concatenate()([*result, layers.Flatten()(first), other(second)])


@functools.cache
def quantized() -> Any:
    model = scramble(functional(SHAPE, build=all_merges))
    return observe(keras_qat.quantize_model(model), images(24, SHAPE))


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["xnnpack", "reference", "tflm"])
def test_files_give_what_the_model_predicts(kernels):
    assert_exact_everywhere(quantized(), images(24, SHAPE), kernels)


def test_names_are_those_of_the_layer_and_nothing_stays_in_float():
    plan = keras_qat.plan(functional(SHAPE, build=layers.Bidirectional(lstm(), name="both")))
    assert not plan.float_layers
    names = {row.tensor for row in plan.rows if row.role == "activation"}
    assert names == {"both_forward", "both_backward", "both"}


@pytest.mark.slow
def test_models_train_are_saved_and_stripped(tmp_path):
    x = images(24, SHAPE)
    build = lambda x: layers.Dense(3)(layers.Bidirectional(lstm())(x))  # noqa: E731
    qat = train(keras_qat.quantize_model(functional(SHAPE, build=build)), x)
    qat.save(tmp_path / "qat.keras")
    again = keras.models.load_model(tmp_path / "qat.keras")
    np.testing.assert_array_equal(again.predict(x, verbose=0), qat.predict(x, verbose=0))
    plain = keras_qat.strip_quantization(qat)
    keras_qat.set_quantization(qat, False)
    expected = qat.predict(x, verbose=0)
    np.testing.assert_allclose(plain.predict(x, verbose=0), expected, atol=1e-5)


STAYS = {
    "its states are read": lambda x: layers.Bidirectional(lstm(return_state=True))(x)[0],
    "its activations are not tanh and sigmoid": lambda x: layers.Bidirectional(
        lstm(activation="relu")
    )(x),
}


@pytest.mark.parametrize("reason", STAYS)
def test_the_plan_says_why_one_stays_in_float(reason):
    steps = 40  # With up to 32, it is opened step by step.
    plan = keras_qat.plan(functional((steps, *SHAPE[1:]), build=STAYS[reason]))
    (result,) = [reason for reason in plan.float_layers.values() if "Bidirectional" in reason]
    assert reason in result
