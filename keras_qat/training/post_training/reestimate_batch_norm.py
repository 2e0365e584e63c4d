"""Re-estimation of BatchNormalization's statistics from data, with quantized weights."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.config.arguments import answers_unknown
from keras_qat.graph.calls import Call
from keras_qat.graph.precision import compute_in_float32
from keras_qat.graph.read_model import read_model
from keras_qat.graph.rebuild_model import evaluate_graph
from keras_qat.keras2.backend import keras, make_tf_function, one_at_a_time, swap_attributes
from keras_qat.keras2.layers_and_models import list_layers
from keras_qat.training.calibration.watch import infer, show_batches
from keras_qat.training.fake_quantization.phase import Phase
from keras_qat.training.layers import QuantizeWrapper
from keras_qat.training.post_training.sweep import check_calibrated
from keras_qat.training.recurrent import restore_states
from keras_qat.training.schedule import list_scheduled_layers
from keras_qat.training.scheduled_layer import assuming

_LEARNING = Phase(training=True, quantizing=True, frozen=False, calibrated=True, fixed=True)


@answers_unknown()
@one_at_a_time
def reestimate_batch_norm(
    model: keras.Model,
    data: object,
    steps: int | None = None,
    batch_size: int | None = None,
    *,
    verbose: int = 0,
) -> None:
    """Re-estimates the moving statistics of BatchNormalization as the average of some batches.

    Moving averages lag behind training, and low-bit weights change in large steps, so the
    statistics may not fit the final weights. Call it before `evaluate` and the export. About 50
    batches without labels are enough. Depthwise networks gain most. Only these statistics change.
    BatchNormalization that is frozen, in the float model or by `freeze_bn_delay`, is only
    re-estimated if it uses the batch's statistics in training.

    Args:
        model: a calibrated or trained quantization-aware model.
        data: inputs without labels: an array, a list or dict of arrays, a `tf.data.Dataset`,
            a `keras.utils.Sequence`, or a generator of batches.
        steps: number of batches to read; all by default. Required for an infinite dataset.
        batch_size: examples per batch of arrays, 32 by default. Use the batch size of training.
        verbose: 1 shows progress.

    Raises:
        ValueError: if the model is not quantized or calibrated, or the data does not fit it.

    Example:
        >>> keras_qat.reestimate_batch_norm(qat, x_train, steps=50, batch_size=64)

    Source: Nagel et al. 2022 (arXiv:2203.11086).
    """
    check_calibrated(model)
    layers = list(list_scheduled_layers(model))
    norms = [
        layer for layer in list_layers(model) if isinstance(layer, keras.layers.BatchNormalization)
    ]
    statistics = [weight for norm in norms for weight in (norm.moving_mean, norm.moving_variance)]
    graph = read_model(model)

    def observe(*inputs: Any) -> None:
        with assuming(_LEARNING, layers):
            evaluate_graph(graph, list(inputs), _observe)

    watch = make_tf_function(observe)
    dtypes = [x.dtype for x in model.inputs]
    sums, count = [0.0] * len(statistics), 0
    with restore_states(model.weights), contextlib.ExitStack() as stack:
        for norm in norms:  # The moving statistics become those of the last batch.
            stack.enter_context(swap_attributes(norm, momentum=0.0))
        for batch in show_batches(model, data, steps, batch_size, "BatchNormalization", verbose):
            watch(*map(tf.constant, batch, dtypes))
            sums = [total + weight.numpy() for total, weight in zip(sums, statistics, strict=True)]
            count += 1
    for weight, total in zip(statistics, sums, strict=True) if count else ():
        weight.assign(np.asarray(total) / count)


def _observe(call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a layer at inference, except BatchNormalization, which uses the batch's statistics."""
    layer = call.layer
    learns = isinstance(layer, (QuantizeWrapper, keras.layers.BatchNormalization))
    if not learns or kwargs.get("training") is False:
        return infer(call, args, kwargs)
    with compute_in_float32(layer):
        return layer(*args, **{**kwargs, "training": True})
