"""Ranges from data, without training: what post-training quantization needs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.data import batches
from keras_qat.keras2 import graph as graph_lib
from keras_qat.keras2.backend import one_at_a_time, swapped, traced
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
        dataset: inputs, as `model.predict` or TFLite's converter take them: an array, a list or
            dict of arrays, a `tf.data.Dataset`, batched or not, a `keras.utils.Sequence`, a
            generator of batches or the function that makes one, a list of images. Labels that come
            along are ignored.
        steps: how many batches to look at; all by default. A dataset that never ends needs it.
        batch_size: examples per batch of arrays and single examples, 32 by default. The moving
            average of batches' extremes depends on it: larger batches give wider ranges.

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
        observe = _observing(model)
        for batch in batches(model, dataset, batch_size, steps, finite=True):
            observe(batch)
        _check_finite(model)
        done = True
    finally:
        switches = {id(weight) for layer in layers for weight in layer.switches}
        for weight, value in zip(state, before, strict=True):
            if not done or id(weight) in switches:
                weight.assign(value)


def _observing(model: Any) -> Callable[[list[np.ndarray]], None]:
    """A function that lets the quantizers see a batch; every replica sees all of it."""
    graph = graph_lib.read(model)
    strategy = model.distribute_strategy
    specs = [tf.TensorSpec([None, *each.shape[1:]], each.dtype) for each in model.inputs]

    def step(*inputs: Any) -> None:
        graph_lib.evaluate(graph, list(inputs), _observe)

    observe = traced(lambda *inputs: strategy.run(step, inputs), input_signature=specs)

    def convert(array: np.ndarray, spec: Any) -> Any:
        return tf.constant(np.asarray(array, spec.dtype.as_numpy_dtype))

    return lambda batch: observe(*map(convert, batch, specs))


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
            f"{broken[0]}. It holds none itself: look for them in the weights, and for numbers "
            f"in the data that are too large."
        )
