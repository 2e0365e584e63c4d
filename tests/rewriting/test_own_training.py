"""Tests models with custom training: detectors, distillers, GANs."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.keras2.backend import keras, layers
from tests.helpers import assert_all_equal, images, observe, quantize_on, save_and_load

X = images(24)
Y = images(24, (8, 8, 3), seed=5)


class TrainsItself:
    """A weighted loss as argument of `compile`. `predict` returns classes."""

    def compile(self, pixel_loss=None, **options):
        super().compile(**options)
        self.pixel_loss = pixel_loss

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.factor * self.pixel_loss(y, self(x, training=True))
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        return self._tracked(loss)

    def test_step(self, data):
        x, y = data
        return self._tracked(self.factor * self.pixel_loss(y, self(x, training=False)))

    def _tracked(self, loss):
        self.tracker.update_state(loss)
        return {metric.name: metric.result() for metric in self.metrics}

    def predict_step(self, data):
        return tf.argmax(super().predict_step(data), -1)


@keras.saving.register_keras_serializable("tests")
class Detector(TrainsItself, keras.Model):
    """A functional model with a custom constructor, like KerasCV's models."""

    def __init__(self, classes=3, factor=2.0, **options):
        inputs = keras.Input(X.shape[1:])
        backbone = keras.Sequential(
            [layers.Conv2D(6, 3, padding="same"), layers.BatchNormalization(), layers.ReLU()],
            name="backbone",
        )
        head = layers.Conv2D(classes, 1, name="head")
        super().__init__(inputs=inputs, outputs=head(backbone(inputs)), **options)
        self.backbone, self.heads = backbone, [head]
        self.classes, self.factor = classes, factor
        self.tracker = keras.metrics.Mean(name="pixels")

    def get_config(self):
        return {"name": self.name, "classes": self.classes, "factor": self.factor}


@keras.saving.register_keras_serializable("tests")
class Subclassed(TrainsItself, keras.Model):
    """A model that computes everything in its `call`."""

    def __init__(self, factor=2.0, **options):
        super().__init__(**options)
        self.conv = layers.Conv2D(6, 3, padding="same", activation="relu")
        self.head = layers.Conv2D(3, 1)
        self.factor = factor
        self.tracker = keras.metrics.Mean(name="pixels")

    def call(self, inputs):
        return self.head(self.conv(inputs))

    def get_config(self):
        return {"name": self.name, "factor": self.factor}


@keras.saving.register_keras_serializable("tests")
class Stack(TrainsItself, keras.Sequential):
    """A Sequential model with attributes in its class, so Keras can save it."""

    factor = 2.0

    @functools.cached_property
    def tracker(self):
        return keras.metrics.Mean(name="pixels")


def detector():
    return Detector(name="detector")


def subclassed():
    model = Subclassed(name="subclassed")
    model(X)
    return model


def stack():
    return Stack([keras.Input(X.shape[1:]), layers.Conv2D(3, 3, padding="same")], name="stack")


MODELS = [detector, subclassed, stack]


def compiled(model):
    keras.utils.set_random_seed(1)
    model.compile(pixel_loss=keras.losses.MeanSquaredError(), optimizer=keras.optimizers.SGD(0.1))
    return model


@pytest.fixture(params=MODELS)
def model(request):
    keras.utils.set_random_seed(0)
    return request.param()


@pytest.mark.sample(1)
@pytest.mark.legacy
def test_the_quantized_model_trains_and_evaluates_as_the_class_says(model):
    untrained = [weight.numpy() for weight in model.trainable_weights]
    qat = compiled(keras_qat.quantize_model(model))
    history = qat.fit(X, Y, batch_size=8, epochs=3, verbose=0).history
    assert list(history) == ["pixels"]
    assert history["pixels"][-1] < history["pixels"][0]
    outputs = np.asarray(qat(X, training=False))
    evaluated = qat.evaluate(X, Y, verbose=0)
    assert evaluated == pytest.approx(2 * np.mean((outputs - Y) ** 2), rel=1e-4)
    classes = qat.predict(X, verbose=0)
    np.testing.assert_array_equal(classes, outputs.argmax(-1))
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), X).identical == 1
    assert_all_equal(untrained, model.trainable_weights)


@pytest.mark.sample(1)
@pytest.mark.legacy
def test_quantization_off_it_trains_as_the_float_model(model):
    qat = compiled(keras_qat.quantize_model(model))
    keras_qat.set_quantization(qat, enabled=False)
    steps = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    quantized = qat.fit(X, Y, **steps).history["pixels"]
    assert quantized == pytest.approx(
        compiled(model).fit(X, Y, **steps).history["pixels"], rel=1e-4
    )


@pytest.mark.legacy
@pytest.mark.sample(1)
@pytest.mark.parametrize("format_", [".keras", ".h5", ""])
@pytest.mark.parametrize("make", MODELS)
def test_it_is_saved_and_loaded_with_its_training(make, format_, tmp_path):
    qat = observe(keras_qat.quantize_model(make()), X)
    path = tmp_path / f"qat{format_}"
    loaded = save_and_load(qat, path)
    assert keras_qat.export_tflite(loaded) == keras_qat.export_tflite(qat)
    steps = {"batch_size": 8, "shuffle": False, "verbose": 0}
    losses = [compiled(variant).fit(X, Y, **steps).history["pixels"] for variant in (qat, loaded)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.sample(1)
def test_a_copy_trains_the_same_way(model):
    copy = keras_qat.quantize_model(keras_qat.quantize_model(model))
    assert list(compiled(copy).fit(X, Y, verbose=0).history) == ["pixels"]


def test_attributes_with_weights_of_the_float_model_are_left_out(model):
    qat = keras_qat.quantize_model(model)
    assert not {id(w) for w in qat.trainable_weights} & {id(w) for w in model.trainable_weights}
    if isinstance(model, Detector):
        with pytest.raises(
            AttributeError, match="'heads' of Detector is a part of the float model"
        ):
            _ = qat.heads
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = qat.nothing


def test_stripping_gives_the_float_model_back(model):
    qat = keras_qat.quantize_model(model)
    plain = keras_qat.strip_quantization(qat)
    np.testing.assert_allclose(plain(X), model(X), atol=1e-5)


def test_a_class_that_is_not_known_is_said_when_it_is_loaded(tmp_path):
    class Local(TrainsItself, keras.Model):
        pass

    inputs = keras.Input((4,))
    qat = observe(keras_qat.quantize_model(Local(inputs, layers.Dense(2)(inputs))), images(8, (4,)))
    qat.save(tmp_path / "qat.keras")
    with pytest.warns(
        UserWarning, match="(?s)without train_step and other methods of Local.*Regis"
    ):
        loaded = keras.models.load_model(tmp_path / "qat.keras")
    assert keras_qat.export_tflite(loaded) == keras_qat.export_tflite(qat)
    again = keras.models.load_model(tmp_path / "qat.keras", custom_objects={"Local": Local})
    assert isinstance(again, Local)


class Distills(keras.Model):
    """Trains towards a teacher, an attribute that does not affect the model's outputs."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(data, training=True) - self.teacher(data)) ** 2)
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        return {"distance": loss}


def test_a_teacher_comes_along_and_stays_as_it_is():
    inputs = keras.Input((4,))
    student = Distills(inputs, layers.Dense(2)(inputs))
    student.teacher = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    student.teacher.trainable = False
    before = student.teacher.get_weights()
    qat = keras_qat.quantize_model(student)
    qat.compile(keras.optimizers.SGD(0.1))
    history = qat.fit(images(64, (4,)), batch_size=8, epochs=3, verbose=0).history["distance"]
    assert history[-1] < history[0]
    assert qat.teacher is student.teacher
    assert_all_equal(before, student.teacher.get_weights())


def test_a_functional_model_with_a_call_of_its_own_computes_what_that_says():
    class Doubled(keras.Model):
        def call(self, inputs, training=None):
            return 2 * super().call(inputs, training=training)

    inputs = keras.Input((4,))
    model = Doubled(inputs, layers.Dense(3)(inputs))
    x = images(64, (4,))
    qat = quantize_on(model, x)
    np.testing.assert_allclose(qat.predict(x, verbose=0), model(x), atol=0.1)
