"""Tests that files compute the same after compiled, eager, custom and partial training."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.helpers import assert_all_equal, export_exact, images, keras, rng, train, values
from tests.networks.small import tiny_net

X = images(shape=(6, 6, 2))
LABELS = rng().integers(0, 3, len(X))
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def slow(parameter):
    return pytest.param(parameter, marks=pytest.mark.slow)


@pytest.fixture(params=["float32", slow("mixed_float16"), slow("mixed_bfloat16")])
def policy(request):
    keras.mixed_precision.set_global_policy(request.param)
    yield request.param
    keras.mixed_precision.set_global_policy("float32")


@pytest.fixture
def qat(policy):
    return keras_qat.quantize_model(tiny_net())


def assert_file_is_exact(qat) -> None:
    before = qat.predict(X, verbose=0)
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), X)
    assert (report.max_difference, report.identical) == (0, 1.0)
    np.testing.assert_array_equal(qat(X), before)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options",
    [slow({"jit_compile": True}), {"run_eagerly": True}, {"steps_per_execution": 2}],
    ids=lambda options: next(iter(options)),
)
def test_options_of_compile(qat, options):
    qat.compile("adam", LOSS, **options)
    weights = values(qat.trainable_weights)
    qat.fit(X, LABELS, batch_size=8, verbose=0)
    for old, new in zip(weights, qat.trainable_weights, strict=True):
        assert np.any(old != new)
    assert {int(layer.step) for layer in qat.layers if hasattr(layer, "step")} == {4}
    losses = qat.evaluate(X, LABELS, verbose=0), float(LOSS(LABELS, qat.predict(X, verbose=0)))
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert_file_is_exact(qat)


def loss_scale(policy):
    optimizer = keras.optimizers.SGD(0.05)
    return keras.mixed_precision.LossScaleOptimizer(optimizer) if "float16" in policy else optimizer


def gradients(qat, optimizer, x, labels):
    with tf.GradientTape() as tape:
        loss = LOSS(labels, qat(x, training=True))
        scale = getattr(optimizer, "get_scaled_loss", lambda loss: loss)
        loss = scale(loss)
    result = tape.gradient(loss, qat.trainable_variables)
    return getattr(optimizer, "get_unscaled_gradients", lambda gradients: gradients)(result)


def test_gradients_of_several_batches_are_accumulated(qat, policy):
    optimizer, total = loss_scale(policy), None
    for part in np.split(np.arange(len(X)), 4):
        result = gradients(qat, optimizer, X[part], LABELS[part])
        assert all(item.dtype == tf.float32 for item in result)
        total = result if total is None else [a + b for a, b in zip(total, result, strict=True)]
    optimizer.apply_gradients(zip(total, qat.trainable_variables, strict=True))
    quantizer = qat.get_layer("quant_conv").output_quantizer
    assert int(quantizer.observers[0].batches) == 4, "every batch is observed"
    assert_file_is_exact(qat)


@pytest.mark.sample(1)
@pytest.mark.parametrize("names", [["conv"], ["bn"], ["conv", "bn", "relu", "flatten", "logits"]])
def test_layers_that_did_not_train_before(policy, names):
    model = tiny_net()
    for name in names:
        model.get_layer(name).trainable = False
    qat = keras_qat.quantize_model(model)
    wrapper, logits = qat.get_layer("quant_conv"), qat.get_layer("quant_logits")
    inside = {"conv": wrapper.layer, "bn": wrapper.batch_norm, "logits": logits.layer}
    before = {name: values(layer.weights) for name, layer in inside.items()}
    train(qat, X, 1)
    for name, layer in inside.items():
        same = [np.all(o == n) for o, n in zip(before[name], layer.weights, strict=True)]
        assert all(same) if name in names else not any(same), name
    assert_file_is_exact(qat)


@pytest.mark.legacy
@pytest.mark.parametrize("name", ["set_quantization", "freeze_batch_norm", "freeze_ranges"])
def test_switch_that_is_no_bool(name):
    qat = keras_qat.quantize_model(tiny_net())
    before = qat.get_weights()
    with pytest.raises(TypeError, match="='off': pass True or False"):
        getattr(keras_qat, name)(qat, "off")
    assert_all_equal(qat.get_weights(), before)


@pytest.mark.slow
def test_float64_as_the_type_of_keras():
    """Models are quantized in float32 nevertheless."""
    keras.backend.set_floatx("float64")
    try:
        qat = train(keras_qat.quantize_model(tiny_net()), X)
        export_exact(qat, X)
    finally:
        keras.backend.set_floatx("float32")


class Batches(keras.utils.Sequence):
    """Batches with sizes that Keras only knows after it reads them."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        x = rng(index).normal(size=(4, 5, 3)).astype(np.float32)
        return {"steps": x}, x[:, 0, :1]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["GRU", "SimpleRNN"])
def test_recurrent_layers_train_on_data_of_unknown_sizes(kind):
    """The layers are unrolled by the number of steps of the model's input."""
    x = keras.Input((5, 3), name="steps")
    hidden = getattr(keras.layers, kind)(2)(x)
    qat = keras_qat.quantize_model(keras.Model({"steps": x}, keras.layers.Dense(1)(hidden)))
    qat.compile("sgd", "mse")
    generated = (Batches()[index] for index in range(2))
    for data in (Batches(), generated):
        before = qat.get_weights()
        qat.fit(data, verbose=0)
        assert any(map(np.any, map(np.not_equal, before, qat.get_weights())))
    assert np.isfinite(qat.evaluate(Batches(), verbose=0))
