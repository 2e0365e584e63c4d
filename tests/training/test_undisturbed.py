"""Tests that `fit`, which reads counters only after possible changes, acts as if it always did.

A wrong phase would silently train incorrectly, so each test compares with reading in each step.
"""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from benchmarks.operations import numpy_calls
from keras_qat.callbacks import FreezeBatchNorm, FreezeOscillations, FreezeRanges, QuantDelay
from keras_qat.training import phase_graphs
from keras_qat.training.schedule import list_scheduled_layers
from tests.helpers import assert_all_equal, images, keras, rng
from tests.networks.small import tiny_net

X, Y = images(48, (6, 6, 2)), rng(5).normal(size=(48, 3)).astype(np.float32)


def states(phase):
    """Returns a phase with the values of its variables."""
    return phase and [int(part) for part in phase]


def trained(fit, reads_each_step, recipe="int8", first_steps=3, **options):
    """Returns the phases in `fit(model)`, the final weights, and how often counters were read."""
    phases = []

    def assuming(phase, layers):
        phases.append(states(phase))
        return original(phase, layers)

    original = phase_graphs.assuming
    keras.utils.set_random_seed(0)
    qat = keras_qat.quantize_model(tiny_net(), recipe)
    qat.compile(keras.optimizers.SGD(0.01), "mse", **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phase_graphs, "assuming", assuming)
        patch.setattr(phase_graphs, "FIRST_STEPS", first_steps)
        if reads_each_step:
            patch.setattr(phase_graphs, "is_undisturbed", lambda *_: False)
        reads = numpy_calls(lambda: fit(qat))
    return phases, qat.get_weights(), reads


def same_as_reading_each_step(fit, **options):
    """Asserts that `fit(model)` trains the same, and returns whether it reads less often."""
    (phases, weights, reads), (others, wanted, most) = (
        trained(fit, reads_each_step, **options) for reads_each_step in (False, True)
    )
    assert phases == others
    assert any(phases[0] != phase for phase in phases)
    assert_all_equal(weights, wanted)
    return reads < most


def arguments(epochs=2, **kwargs):
    return {"batch_size": 4, "epochs": epochs, "verbose": 0, "shuffle": False, **kwargs}


SCHEDULES = {
    "none": [],
    "delay": [QuantDelay(5)],
    "norm": [FreezeBatchNorm(6)],
    "ranges": [FreezeRanges(15)],
    "all": [QuantDelay(3), FreezeBatchNorm(14), FreezeRanges(8)],
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("per_execution", [1, 4])
@pytest.mark.parametrize("recipe", ["int8", "contrib"])
@pytest.mark.parametrize("callbacks", SCHEDULES)
def test_fit_trains_as_if_it_read_each_step(callbacks, recipe, per_execution, tmp_path):
    """Over epochs, with validation, single batches, assigned weights and several calls of `fit`."""

    def fit(qat):
        options = arguments(callbacks=SCHEDULES[callbacks])
        qat.fit(X, Y, validation_data=(X[:8], Y[:8]), **options)
        qat.save_weights(str(tmp_path / "weights.h5"))
        if per_execution == 1:  # Keras reads as many batches.
            qat.train_on_batch(X[:4], Y[:4])
        qat.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(4), **arguments(batch_size=None))
        qat.load_weights(str(tmp_path / "weights.h5"))
        qat.fit(X[:12], Y[:12], **arguments(1))

    assert same_as_reading_each_step(fit, recipe=recipe, steps_per_execution=per_execution)


def delay_at(qat, step):
    """Sets the step at which quantization begins, bypassing the library."""
    for layer in list_scheduled_layers(qat):
        layer.quantize_from.assign(step)


class InCallback(keras.callbacks.Callback):
    """Changes a model between two steps."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            delay_at(self.model, 8)


class InEpoch(keras.callbacks.Callback):
    """Changes a model before an epoch, and perhaps after a step."""

    def __init__(self, trains):
        super().__init__()
        self.trains = trains

    def on_epoch_begin(self, epoch, logs=None):
        if self.trains:
            self.model.train_on_batch(X[:4], Y[:4], reset_metrics=False)
        delay_at(self.model, 7 if epoch else 2**62)


def by_lambda(qat):
    def change(batch, logs):
        if batch == 3:
            delay_at(qat, 8)

    return keras.callbacks.LambdaCallback(on_batch_end=change)


def by_thread_of_data(qat):
    """Returns `tf.data` that calls the library to freeze ranges while it reads the third batch."""

    def change(number):
        if number == 11:
            keras_qat.freeze_ranges(qat)
        return number

    def element(x, y, number):
        with tf.control_dependencies([tf.numpy_function(change, [number], tf.int64)]):
            return tf.identity(x), y

    return tf.data.Dataset.from_tensor_slices((X, Y, np.arange(len(X)))).map(element).batch(4)


DISTURBED = {
    "callback": lambda qat: qat.fit(X, Y, **arguments(callbacks=[InCallback()])),
    "one callback": lambda qat: qat.fit(X, Y, **arguments(callbacks=InCallback())),
    "container": lambda qat: qat.fit(
        X, Y, **arguments(callbacks=keras.callbacks.CallbackList([InCallback()], model=qat))
    ),
    "by place": lambda qat: qat.fit(X, Y, 4, 2, 0, [InCallback()], shuffle=False),
    "lambda": lambda qat: qat.fit(X, Y, **arguments(callbacks=[by_lambda(qat)])),
    "epoch": lambda qat: qat.fit(X, Y, **arguments(callbacks=[InEpoch(trains=False)])),
    "step": lambda qat: qat.fit(X, Y, **arguments(callbacks=[InEpoch(trains=True)])),
}


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", DISTURBED)
def test_changes_between_steps_count_from_the_next_step(kind):
    is_read_less = same_as_reading_each_step(DISTURBED[kind])
    assert is_read_less == (kind in ("epoch", "step"))


@pytest.mark.slow
@pytest.mark.parametrize("reads_each_step", [False, True])
def test_a_change_while_a_batch_is_read_counts_at_the_latest_from_the_next_step(reads_each_step):
    def fit(qat):
        qat.fit(by_thread_of_data(qat), **arguments(batch_size=None))

    phases, _, _ = trained(fit, reads_each_step)
    freezes = [phase[-2:] for phase in phases]  # TensorFlow may read the third batch during a step.
    assert freezes[:2] == [[0, 0]] * 2 and freezes[3:] == [[1, 1]] * (len(phases) - 3)


class Twice(keras.Model):
    """A model that counts two steps in one."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) + self(x, training=True) - y) ** 2)
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        return {"loss": loss}


class Batches(keras.utils.Sequence):
    """Data from a user's code that runs between steps."""


def test_where_code_of_a_user_runs_between_steps(tmp_path):
    def is_undisturbed(x=X, callbacks=(), model_class=keras.Model, patched=None, **options):
        qat = keras_qat.quantize_model(model_class(float_model.inputs, float_model.outputs))
        qat.compile("sgd", "mse", **options)
        if patched:
            setattr(qat, patched, lambda *args: None)
        return phase_graphs.is_undisturbed(qat, x, callbacks)

    float_model, path = tiny_net(), str(tmp_path)
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    for x in (X, tf.constant(X), {"a": X}, [X, X], batches):
        assert is_undisturbed(x)
    for x in (iter([X]), Batches(), [[1.0], [2.0]], None):
        assert not is_undisturbed(x)
    for callback in (
        keras.callbacks.ModelCheckpoint(path, save_freq=2),
        keras.callbacks.TensorBoard(path),
        keras.callbacks.LambdaCallback(on_epoch_end=print),
        QuantDelay(3),
        FreezeOscillations(),
    ):
        assert is_undisturbed(callbacks=[callback])
    assert not is_undisturbed(callbacks=[QuantDelay(3), InCallback()])
    assert not is_undisturbed(model_class=Twice)
    assert not is_undisturbed(patched="train_step")
    assert not is_undisturbed(patched="reset_metrics")
    assert not is_undisturbed(run_eagerly=True)
    assert not is_undisturbed(steps_per_execution="auto")


def test_graph_of_a_change_has_no_switch_for_an_earlier_change(monkeypatch):
    """QuantDelay shares the graph of the first steps, and FreezeBatchNorm needs another one."""
    monkeypatch.setattr(phase_graphs, "SMALL_NORMS", 0)
    monkeypatch.setattr(phase_graphs, "FIRST_STEPS", 10)
    qat, traced = keras_qat.quantize_model(tiny_net()), []
    train_step = qat.train_step
    monkeypatch.setattr(qat, "train_step", lambda data: traced.append(1) or train_step(data))
    qat.compile("sgd", "mse")
    qat.fit(X, Y, **arguments(callbacks=[QuantDelay(3), FreezeBatchNorm(6)]))
    assert len(traced) == 2
