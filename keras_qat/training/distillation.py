"""Distillation: trains a quantization-aware model to match its float model, without labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_qat.config.arguments import answers_unknown
from keras_qat.keras2.backend import keras
from keras_qat.training.fake_quantization.phase import Flag
from keras_qat.training.phase_graphs import check_learned_ranges
from keras_qat.training.schedule import check_quantized
from keras_qat.training.steps.optimizers import check_optimizer

Distance = Callable[[Any, Any], Any]
"""A function (teacher's output, student's output) -> distance, a scalar."""


class Distiller(keras.Model):
    """Trains a quantization-aware model to reproduce a teacher, usually its float model.

    Call `compile` and `fit` as for any model. Without a loss in `compile` no labels are needed:
    `fit(x)`. A loss in `compile` is added to the distance. `save` and `save_weights` save the
    student, which is the model to evaluate and to export.

    Args:
        student: the model that `quantize_model` returned.
        teacher: a model with the same inputs and outputs. It is not changed.
        distance: the distance between outputs: "logits", the Kullback-Leibler divergence of class
            logits; "probabilities", the same for probabilities; "squared", the mean squared
                difference; or a function of the teacher's and the student's output.
        temperature: the divisor of the logits, at least 1. A higher temperature gives wrong classes
            more weight.
        share: the weight of the distance in the loss. The loss of `compile` has the rest.

    Raises:
        ValueError: if the student is not quantized, or another argument is unknown or out of range.

    Example:
        >>> distiller = keras_qat.Distiller(qat, model)
        >>> distiller.compile("adam")
        >>> distiller.fit(x_train, epochs=2)
        >>> keras_qat.export_tflite(qat, "model.tflite")

    Source: Hinton et al. 2015 (arXiv:1503.02531); Mishra and Marr 2017 (arXiv:1711.05852).
    """

    @answers_unknown("The teacher is the float model.")
    def __init__(
        self,
        student: keras.Model,
        teacher: keras.Model,
        *,
        distance: str | Distance = "logits",
        temperature: float = 2.0,
        share: float = 0.5,
        **kwargs: Any,
    ) -> None:
        check_quantized(student)
        if not callable(distance) and distance not in DISTANCES:
            names = ", ".join(map(repr, DISTANCES))
            raise ValueError(f"distance={distance!r}: use one of {names}, or a function.")
        if temperature < 1 or not 0 < share <= 1:
            raise ValueError(
                f"temperature={temperature}, share={share}: use a temperature of at least 1, and a "
                f"share above 0 and at most 1."
            )
        super().__init__(**kwargs)
        self.student = student
        object.__setattr__(self, "teacher", teacher)  # Keras does not track it.
        self.distance = distance if callable(distance) else DISTANCES[distance]
        self.temperature = temperature if distance == "logits" else 1.0
        self.share = share
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.distance_tracker = keras.metrics.Mean(name="distance")

    @property
    def metrics(self) -> list[Any]:
        """The metrics of `compile`, with the loss and the distance."""
        return [self.loss_tracker, self.distance_tracker, *super().metrics]

    def call(self, inputs: tf.Tensor, training: Flag | None = None) -> Any:
        """Calls the student."""
        return self.student(inputs, training=training)

    def make_train_function(self, force: bool = False) -> Any:
        """Returns the function that trains a batch, as Keras documents it."""
        check_learned_ranges(self.student)
        check_optimizer(self, self.student.trainable_variables)
        return super().make_train_function(force)

    def train_step(self, data: Any) -> dict[str, Any]:
        """Trains one batch, with labels or without."""
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        target = self.teacher(x, training=False)
        with tf.GradientTape() as tape:
            output = self.student(x, training=True)
            distance = self._distance(target, output)
            loss = distance
            if y is not None and self.compiled_loss is not None and self.loss is not None:
                rest = self.compiled_loss(y, output, weights)
                loss = self.share * distance + (1 - self.share) * rest
            loss += tf.add_n([tf.zeros([]), *(tf.cast(e, tf.float32) for e in self.student.losses)])
        self.optimizer.minimize(loss, self.student.trainable_variables, tape=tape)
        self.loss_tracker.update_state(loss)
        self.distance_tracker.update_state(distance)
        if y is not None:
            self.compiled_metrics.update_state(y, output, weights)
        return {metric.name: metric.result() for metric in self.metrics}

    def _distance(self, targets: tf.Tensor, outputs: tf.Tensor) -> Any:
        """Return the distance, averaged over the model's outputs."""
        pairs = zip(tf.nest.flatten(targets), tf.nest.flatten(outputs), strict=True)
        by = self.temperature
        parts = [
            self.distance(tf.cast(target, tf.float32) / by, tf.cast(output, tf.float32) / by)
            * by**2
            for target, output in pairs
        ]
        return tf.add_n(parts) / len(parts)

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Saves the student."""
        self.student.save(*args, **kwargs)

    def save_weights(self, *args: Any, **kwargs: Any) -> Any:
        """Saves the student's weights."""
        return self.student.save_weights(*args, **kwargs)

    def load_weights(self, *args: Any, **kwargs: Any) -> Any:
        """Loads the student's weights."""
        return self.student.load_weights(*args, **kwargs)


def _compare_logits(target: tf.Tensor, output: tf.Tensor) -> Any:
    probabilities, log = tf.nn.softmax(target), tf.nn.log_softmax
    return tf.reduce_mean(tf.reduce_sum(probabilities * (log(target) - log(output)), -1))


def _compare_probabilities(target: tf.Tensor, output: tf.Tensor) -> Any:
    target, output = (tf.clip_by_value(x, 1e-7, 1.0) for x in (target, output))
    return tf.reduce_mean(tf.reduce_sum(target * tf.math.log(target / output), -1))


DISTANCES: dict[str, Distance] = {
    "logits": _compare_logits,
    "probabilities": _compare_probabilities,
    "squared": lambda target, output: tf.reduce_mean(tf.math.squared_difference(target, output)),
}
"""Name of a distance -> the function that computes it."""
