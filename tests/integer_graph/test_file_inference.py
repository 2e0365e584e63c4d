"""Tests that `predict` and `evaluate` return the same in TFLite's interpreter and TensorFlow."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.integer_graph import file_inference
from keras_qat.tflite.interpreter import FileInterpreter
from tests.helpers import images, keras, observe, quantize_on, scramble
from tests.networks.small import functional, layers

X, Y = images(40, (8, 8, 3)), np.arange(40) % 5


def network(x):
    x = layers.Conv2D(8, 3, activation="relu")(x)
    return layers.Dense(5, activation="softmax")(layers.GlobalAveragePooling2D()(x))


@pytest.fixture
def runs(monkeypatch):
    """Records the number of examples in each run of the interpreter."""
    sizes, run_once = [], FileInterpreter.run_once

    def count(self, inputs):
        sizes.append(len(next(iter(inputs.values()))))
        return run_once(self, inputs)

    monkeypatch.setattr(FileInterpreter, "run_once", count)
    return sizes


def quantize(build=network, recipe="int8", **options):
    model = scramble(functional((8, 8, 3), build=build))
    qat = observe(keras_qat.quantize_model(model, recipe), X)
    qat.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"], **options)
    return qat


def run_both(qat, call):
    """Returns the results of a call without and with the interpreter."""
    results = []
    for runtime in ("tensorflow", "interpreter"):
        qat.runtime = runtime
        results.append(call(qat))
    return results


DATA = {
    "array": lambda: {"x": X, "batch_size": 16},
    "dataset": lambda: {"x": tf.data.Dataset.from_tensor_slices(X).batch(16)},
    "steps": lambda: {"x": tf.data.Dataset.from_tensor_slices(X).batch(8).repeat(), "steps": 5},
    "generator": lambda: {"x": (X[i : i + 10] for i in range(0, 40, 10))},
}


@pytest.mark.sample(2)
@pytest.mark.legacy
@pytest.mark.parametrize("data", DATA)
def test_predicts_the_same(runs, data):
    one, other = run_both(quantize(), lambda qat: qat.predict(**DATA[data](), verbose=0))
    np.testing.assert_array_equal(one, other, strict=True)
    assert sum(runs) >= 40


@pytest.mark.legacy
def test_evaluates_and_validates_the_same(runs):
    def train(qat):
        evaluated = qat.evaluate(X, Y, batch_size=16, verbose=0, sample_weight=Y)
        weights = qat.get_weights()
        history = qat.fit(X, Y, epochs=2, validation_data=(X, Y), shuffle=False, verbose=0).history
        qat.set_weights(weights)
        return evaluated, history

    one, other = run_both(quantize(), train)
    assert one == other
    assert len(runs) == 3 + 2 * 2  # The last batch of each has fewer examples.


def test_runs_the_file_of_new_weights(runs):
    qat = quantize()
    qat.runtime = "interpreter"
    before = qat.predict(X, verbose=0)
    qat.set_weights([0.9 * weight for weight in qat.get_weights()])
    after = qat.predict(X, verbose=0)
    expected = keras_qat.simulate(qat, X).outputs[qat.output_names[0]].values
    np.testing.assert_array_equal(after, expected)
    assert np.any(before != after) and runs == [32, 8, 32, 8]


def test_verify_computes_without_the_interpreter(runs, monkeypatch):
    """Otherwise a file would be compared with itself, and always be identical."""
    qat = quantize()
    contents = keras_qat.export_tflite(qat)
    qat.runtime = "interpreter"
    with monkeypatch.context() as patch:
        patch.setattr(file_inference.FileInference, "prepare", pytest.fail)
        assert keras_qat.verify(qat, contents, X).identical == 1
    assert qat.runtime == "interpreter"


@pytest.mark.parametrize("extra", [-50.0, 500.0], ids=["fast", "slow"])
def test_auto_compares_times(runs, monkeypatch, extra):
    """Each look at the clock takes 100 seconds, and the interpreter takes `extra` seconds more."""
    now, run_once = [0.0], FileInterpreter.run_once

    def look():
        now[0] += 100.0
        return now[0]

    def run(self, inputs):
        now[0] += extra
        return run_once(self, inputs)

    monkeypatch.setattr(FileInterpreter, "run_once", run)
    monkeypatch.setattr(file_inference, "perf_counter", look)
    qat = quantize()
    predicted = qat.predict(X, batch_size=4, verbose=0)
    assert len(runs) == (8 if extra < 0 else file_inference.TRIALS)  # After two of ten batches.
    qat.runtime = "tensorflow"
    np.testing.assert_array_equal(predicted, qat.predict(X, batch_size=4, verbose=0))


def test_calls_callbacks_and_executes_several_steps():
    class Count(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.batches = []

        def on_predict_batch_end(self, batch, logs=None):
            self.batches.append((batch, logs["outputs"].shape))

    def predict(qat):
        callback = Count()
        return qat.predict(X, batch_size=10, callbacks=[callback], verbose=0), callback.batches

    one, other = run_both(quantize(steps_per_execution=2), predict)
    np.testing.assert_array_equal(one[0], other[0])
    assert one[1] == other[1]


def test_returns_structures_of_several_inputs(runs):
    a, b = keras.Input((8, 8, 3), name="a"), keras.Input((4,), dtype="int32", name="b")
    x = layers.GlobalAveragePooling2D()(layers.Conv2D(6, 3)(a))
    y = layers.Flatten()(layers.Embedding(9, 6)(b))
    model = keras.Model({"a": a, "b": b}, {"sum": layers.Dense(6)(x), "ids": layers.Dense(3)(y)})
    ids = np.arange(160).reshape(40, 4) % 9
    data = {"a": X, "b": ids.astype(np.int32)}
    qat = quantize_on(model, data)
    one, other = run_both(qat, lambda qat: qat.predict(data, verbose=0))
    assert runs and one.keys() == other.keys()
    for name, values in one.items():
        np.testing.assert_array_equal(values, other[name], strict=True)


def test_differing_values_are_named_and_not_returned(monkeypatch):
    qat = quantize()
    expected = qat.predict(X, verbose=0)
    run_once = FileInterpreter.run_once

    def disturb(self, inputs):
        return {name: y[::-1] for name, y in run_once(self, inputs).items()}

    monkeypatch.setattr(FileInterpreter, "run_once", disturb)
    qat.runtime = "interpreter"
    with pytest.warns(UserWarning, match=f"other values for output '{qat.output_names[0]}'"):
        found = qat.predict(X, verbose=0)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(qat.predict(X, verbose=0), expected)


class WithGradients(keras.Model):
    def test_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(self(x, training=False) ** 2)
        return {"slope": tf.reduce_max(tf.abs(tape.gradient(loss, x)))}


def test_gradients_pass():
    float_model = WithGradients(*(lambda x: (x, network(x)))(keras.Input((8, 8, 3))))
    qat = observe(keras_qat.quantize_model(float_model), X)
    qat.compile()
    one, other = run_both(qat, lambda qat: qat.evaluate(X, Y, verbose=0))
    assert one == other > 0


FALLS_BACK = {
    "eagerly": lambda: quantize(run_eagerly=True),
    "float layer": lambda: quantize(
        recipe=keras_qat.recipes.int8().override("Dense", quantize=False)
    ),
    "regularized": lambda: quantize(lambda x: layers.ActivityRegularization(0.1)(network(x))),
    "TFLite Micro": lambda: quantize(),
    "without quantization": lambda: quantize(),
    "tensorflow": lambda: quantize(),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", FALLS_BACK)
def test_falls_back(runs, case, recwarn):
    qat = FALLS_BACK[case]()
    if case == "TFLite Micro":
        qat.kernels = "tflm"
    keras_qat.set_quantization(qat, enabled=case != "without quantization")
    expected = qat.predict(X, verbose=0)
    qat.runtime = "tensorflow" if case == "tensorflow" else "interpreter"
    np.testing.assert_array_equal(qat.predict(X, verbose=0), expected)
    assert not runs and not [w for w in recwarn if "interpreter" in str(w.message)]


def test_unknown_runtime_is_refused():
    with pytest.raises(ValueError, match="runtime='gpu': use one of 'auto', 'tensorflow'"):
        quantize().runtime = "gpu"
