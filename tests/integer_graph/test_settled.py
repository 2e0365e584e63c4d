"""Tests that inference uses the current ranges and weights, however they changed."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.integer_graph import cached_inference
from keras_qat.integer_graph.cached_inference import DECIDES
from keras_qat.layers import Quantize
from tests.helpers import images, keras, observe, scramble
from tests.networks.small import functional, layers

X = images(32, (8, 8, 3))


def network(x):
    x = layers.ReLU(6.0)(layers.BatchNormalization()(layers.Conv2D(8, 3, use_bias=False)(x)))
    x = layers.Add()([x, layers.Conv2D(8, 1)(x)])
    return layers.Dense(5, activation="softmax")(layers.GlobalAveragePooling2D()(x))


@pytest.fixture
def qat():
    return observe(keras_qat.quantize_model(scramble(functional((8, 8, 3), build=network))), X)


def train(qat):
    qat.compile("sgd", "sparse_categorical_crossentropy")
    qat.train_on_batch(X, np.arange(32) % 5)


def narrow_a_range(qat):
    (first, *_) = [layer for layer in qat.layers if isinstance(layer, Quantize)]
    first.quantizer.observers[0].maximum.assign(0.3)


CHANGES = {
    "training": train,
    "set_weights": lambda qat: qat.set_weights([0.9 * array for array in qat.get_weights()]),
    "a weight": lambda qat: qat.trainable_weights[0].assign_add(
        0.01 * tf.ones_like(qat.trainable_weights[0])
    ),
    "a range": narrow_a_range,
}

CALLS = {
    "predict": lambda qat: qat.predict(X, verbose=0),
    "predict_on_batch": lambda qat: qat.predict_on_batch(X),
    "call": lambda qat: qat(X, training=False).numpy(),
}


def of_the_file(qat, x=X):
    return keras_qat.simulate(qat, x).outputs[qat.output_names[0]].values


@pytest.mark.sample(1)
@pytest.mark.legacy
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("change", CHANGES)
def test_changes_count(qat, change, call):
    before = CALLS[call](qat)
    np.testing.assert_array_equal(before, of_the_file(qat))
    for _ in range(2):
        CHANGES[change](qat)
        after = CALLS[call](qat)
        np.testing.assert_array_equal(after, of_the_file(qat))
    assert np.any(before != after)


@pytest.mark.slow
def test_what_verify_keeps_follows_the_model(qat):
    """Each report of `verify` is about the current weights, phases and kernels."""

    def notes(file):
        first, second = (keras_qat.verify(qat, file, X) for _ in range(2))
        assert first.to_dict() == second.to_dict()
        assert str(qat.exact_inference().resolve()) == str(keras_qat.resolve(qat))
        return second.notes

    file = keras_qat.export_tflite(qat)
    assert notes(file) == ()
    CHANGES["a weight"](qat)
    with pytest.warns(UserWarning, match="other weights or ranges"):
        assert len(notes(file)) == 1
    keras_qat.set_quantization(qat, enabled=False)
    with pytest.warns(UserWarning, match="quantization is switched off"):
        assert len(notes(file)) == 2
    keras_qat.set_quantization(qat)
    assert notes(keras_qat.export_tflite(qat)) == ()
    qat.kernels = "reference"
    assert qat.exact_inference().resolve().origin.family.name == "reference"


def test_training_between_batches_of_a_loop_counts(qat):
    """Training loops may keep the function that Keras creates."""
    qat.compile("sgd", "sparse_categorical_crossentropy")
    predict = qat.make_predict_function()
    batches = iter(tf.data.Dataset.from_tensors((X,)).repeat())
    before = predict(batches)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(qat(X, training=True)[:, 0])
    variables = qat.trainable_variables
    keras.optimizers.SGD(0.1).apply_gradients(
        zip(tape.gradient(loss, variables), variables, strict=True)
    )
    np.testing.assert_array_equal(predict(batches), of_the_file(qat))
    assert np.any(before != of_the_file(qat))


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_branches_that_numbers_choose_change_with_them(qat, call):
    """If an input's scale is far larger than the sum's, kernels add in another scale."""
    (quantize,) = [layer for layer in qat.layers if layer.name.startswith("add")]
    observer = quantize.quantizer.observers[0]
    ends = observer.minimum.numpy(), observer.maximum.numpy()
    before = CALLS[call](qat)
    for factor in (1e-4, 1.0, 1e-4, 1.0, 1e-4, 1.0):
        observer.minimum.assign(factor * ends[0])
        observer.maximum.assign(factor * ends[1])
        np.testing.assert_array_equal(CALLS[call](qat), of_the_file(qat))
    np.testing.assert_array_equal(CALLS[call](qat), before)
    assert qat._inference.settled.version == DECIDES + 1


def test_what_follows_from_ranges_alone_is_not_traced(qat):
    qat.predict(X, verbose=0)
    operations = qat._inference.settled._traced.graph.get_operations()
    kinds = {operation.type for operation in operations}
    assert not kinds & {"If", "StatelessIf", "PartitionedCall", "Bitcast"}
    assert len([operation for operation in operations if operation.type != "Placeholder"]) < 110


def test_calls_share_what_was_traced(qat):
    functions = []
    for _ in range(2):
        qat(X, training=False)
        functions.append(qat._inference.traced[1])
    assert functions[0] is functions[1]


def test_a_change_of_a_large_table_counts(monkeypatch):
    monkeypatch.setattr(cached_inference, "LARGE", 64)
    ids = np.arange(32).reshape(8, 4) % 9
    model = functional((4,), build=lambda x: layers.Dense(3)(layers.Embedding(9, 6)(x)))
    qat = observe(keras_qat.quantize_model(model), ids)
    before = qat.predict(ids, verbose=0)
    (table,) = [weight for weight in qat.weights if weight.shape == (9, 6)]
    table.assign(tf.reverse(table, [0]))
    after = qat.predict(ids, verbose=0)
    np.testing.assert_array_equal(after, of_the_file(qat, ids))
    assert np.any(before != after)
