"""Tokens that come as float values, as `keras.Input((steps,))` without a type has them."""

import pytest

import keras_qat
from tests.helpers import build_model, layers, quantize_on
from tests.networks.forms.indices import TOKENS, pooled


@pytest.mark.slow
def test_files_take_them_as_the_model_does_unless_the_target_has_no_float():
    model = build_model((5,), pooled)
    for target, dtype in ((None, "float32"), ("ethos_u55", "int32")):
        qat = quantize_on(model, TOKENS, target=target)
        (details,) = keras_qat.TFLiteModel(keras_qat.export_tflite(qat)).inputs.values()
        assert details.dtype == dtype
    assert keras_qat.export_tflite(qat, input_dtype="float32") != keras_qat.export_tflite(qat)


def test_what_computes_with_them_keeps_float_values():
    model = build_model((5,), lambda x: layers.Embedding(9, 4)(x) * x[..., None])
    assert "Indices" not in str(keras_qat.plan(model))
