"""Ranges from data, without training: what post-training quantization needs."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.given import arrays_of
from keras_qat.keras2 import graph as graph_lib
from keras_qat.keras2.backend import keras, one_at_a_time, swapped
from keras_qat.keras2.graph import Call
from keras_qat.keras2.precision import computing_in_float32
from keras_qat.layers import ScheduledLayer
from keras_qat.layers.scheduled import NEVER
from keras_qat.quantize import quantizers
from keras_qat.schedule import schedule, scheduled_layers

__all__ = ["calibrate"]


@one_at_a_time
def calibrate(
    model: Any, dataset: Any, steps: int | None = None, batch_size: int | None = None
) -> None:
    """Observes the ranges of a quantization-aware model on data, without training it.

    After this the model can be exported: post-training quantization. Ranges are those of the
    float model at inference (quantization, dropout and noise are off), observed batch by batch as
    in training; ranges that training has left go on from there. No other weight changes: not
    those that train, not BatchNormalization's statistics, not the training step.

    Args:
        model: the model.
        dataset: inputs, as `model.predict` takes them: an array, a list or dict of arrays, a
            `tf.data.Dataset`, a generator or a `keras.utils.Sequence` of batches. Labels that
            come along are ignored.
        steps: how many batches to look at; all by default. A dataset that never ends needs it.
        batch_size: examples per batch of arrays, 32 by default. The moving average of batches'
            extremes depends on it: larger batches give wider ranges.

    Raises:
        ValueError: if the model is not quantized, the data is not what it takes or none, or a batch
            holds NaN or infinity.

    Example:
        >>> qat = keras_qat.quantize_model(model)
        >>> keras_qat.calibrate(qat, x_train[:512])
        >>> keras_qat.export_tflite(qat, "model.tflite")
    """
    layers = list(scheduled_layers(model))
    state = [weight for layer in layers for weight in layer.non_trainable_weights]
    before = [weight.numpy() for weight in state]
    schedule(model, quantize_from=NEVER, freeze_from=0)
    done = False
    try:
        if dataset is None or isinstance(dataset, (np.ndarray, tf.Tensor, list, tuple, dict)):
            arrays_of(model, dataset)
        _Observing(model).predict(dataset, steps=steps, batch_size=batch_size, verbose=0)
        _check_finite(model)
        done = True
    finally:
        switches = {id(weight) for layer in layers for weight in layer.switches}
        for weight, value in zip(state, before, strict=True):
            if not done or id(weight) in switches:
                weight.assign(value)


class _Observing(keras.Model):
    """Observes in `predict`, which takes every kind of data."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.observed = model
        self.calls = graph_lib.read(model)

    def predict_step(self, data: Any) -> Any:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        inputs = graph_lib.flat_inputs(self.observed, x)
        graph_lib.evaluate(self.calls, inputs, _observe)
        return tf.zeros([tf.shape(inputs[0])[0]])


def _observe(call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls a layer as at inference, but for what observes."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(computing_in_float32(call.layer))
        if isinstance(call.layer, ScheduledLayer):
            kwargs = {**kwargs, "training": True}
            stack.enter_context(swapped(call.layer, mixed=False))  # Infinity is looked for here.
        elif "training" in kwargs:
            kwargs = {**kwargs, "training": False}
        return call.layer(*args, **kwargs)


def _check_finite(model: Any) -> None:
    ends = {each.name: [each.minimum, each.maximum] for each in quantizers(model)}
    broken = [name for name, each in ends.items() if not np.isfinite(each).all()]
    if broken:
        raise ValueError(
            f"The data gives {len(broken)} quantizers a range with NaN or infinity, first "
            f"{broken[0]}. Look for NaN or infinity in the inputs and in the weights."
        )
