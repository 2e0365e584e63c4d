"""Tests files for targets that TFLite Micro emulates, with operators that TFLite Micro lacks."""

import functools

import pytest
import tensorflow as tf

import keras_qat
from tests.helpers import images, keras, observe

pytest.importorskip("tflite_micro")

pytestmark = pytest.mark.filterwarnings("ignore:.*TFLite Micro lacks too")
X = images()


@functools.cache
def quantized(function, target="ethos_u55"):
    inputs = keras.Input(X.shape[1:], name="image")
    maps = keras.layers.Conv2D(4, 3, name="conv")(inputs)
    outputs = keras.layers.Dense(3, name="logits")(function(maps))
    qat = observe(keras_qat.quantize_model(keras.Model(inputs, outputs), target=target), X)
    return qat, keras_qat.export_tflite(qat)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("function", "operator"), [(tf.nn.gelu, "GELU"), (lambda x: tf.math.top_k(x, 3)[0], "TOPK_V2")]
)
def test_another_runtime_runs_them(function, operator):
    qat, contents = quantized(function)
    report = keras_qat.verify(qat, contents, X, per_layer=True)
    assert report.kernels == "reference" and report.runtime and report.arena_size is None
    assert report.identical == 1 and report.is_good
    assert all(tensor.fed is None or tensor.fed.identical == 1 for tensor in report.tensors)
    assert report.refused == f"{operator}: no kernel"
    assert f"TFLite Micro, which emulates the target, cannot run this file ({operator}" in " ".join(
        str(report).split()
    )


def test_xnnpack_runs_what_has_no_reference_kernel_either():
    """TFLite Micro has no GELU, and TFLite has no reference kernel of ELU."""
    qat, contents = quantized(lambda x: tf.nn.elu(tf.nn.gelu(x)))
    report = keras_qat.verify(qat, contents, X, per_layer=True)
    assert report.kernels == "xnnpack" and report.identical == 1
    assert all(tensor.fed is None or tensor.fed.identical == 1 for tensor in report.tensors)
    assert report.refused == "GELU: no kernel"


def largest(x):
    return tf.argmax(x, -1, tf.int32)[..., None]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda x: tf.math.log(tf.reduce_sum(tf.abs(x), -1, keepdims=True)), "LOG"),
        (lambda x: x * tf.cast(largest(x) // 2, tf.float32), "FLOOR_DIV"),
        (lambda x: x * tf.cast(largest(x) % 3, tf.float32), "FLOOR_MOD"),
        (lambda x: tf.argmax(x, -1), "ARG_MAX"),
    ],
)
def test_another_runtime_runs_what_is_only_refused_when_it_runs(function, operator):
    qat, contents = quantized(function)
    report = keras_qat.verify(qat, contents, X)
    assert report.kernels == "reference" and report.identical == 1
    assert report.refused.startswith(f"{operator}: ")


def test_another_file_is_not_the_same():
    qat, _ = quantized(tf.nn.gelu)
    _, other = quantized(keras.activations.gelu)
    with pytest.warns(UserWarning, match="exported"):
        assert not keras_qat.verify(qat, other, X).verdict.is_same


def test_what_is_asked_for_or_is_the_target_itself_refuses():
    refusal = "TFLite Micro refuses this file: .*GELU"
    qat, contents = quantized(tf.nn.gelu)
    with pytest.raises(ValueError, match=refusal):
        keras_qat.verify(qat, contents, X, kernels="tflm")
    with pytest.warns(UserWarning, match="GELU: no kernel"):
        qat, contents = quantized(tf.nn.gelu, "tflm")
    with pytest.raises(ValueError, match=refusal):
        keras_qat.verify(qat, contents, X)


def test_all_operators_that_are_missing_are_named():
    qat, contents = quantized(lambda x: tf.nn.gelu(tf.math.top_k(x, 3)[0]))
    report = keras_qat.verify(qat, contents, X)
    assert report.refused == "TOPK_V2: no kernel, GELU: no kernel"
