"""One pass through a quantization-aware model, layer by layer: all examples at once.

Each layer is computed as in float and as quantized. In between its weights may be changed, so that
the layers behind it see what has become of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_qat.data import batches
from keras_qat.keras2 import graph as graph_lib
from keras_qat.keras2.graph import Call, Value, map_values, values_in
from keras_qat.layers import QuantizeWrapper, ScheduledLayer, folding
from keras_qat.layers.scheduled import Phase, assuming
from keras_qat.progress import shown
from keras_qat.ranges.observed import infer
from keras_qat.schedule import check_quantized, scheduled_layers

__all__ = ["IN_FLOAT", "QUANTIZED", "Visit", "before_activation", "check_calibrated", "sweep"]

IN_FLOAT = Phase(training=False, quantizing=False, frozen=True, calibrated=True)
QUANTIZED = IN_FLOAT._replace(quantizing=True)

Visit = Callable[[QuantizeWrapper, list[Any], list[Any]], None]
"""Gets a wrapper and batches of its input: as the float model has them, and as quantized so far."""


def check_calibrated(model: Any) -> None:
    """Raises a `ValueError` if a model is not quantized, or has quantizers without a range."""
    check_quantized(model, ": call keras_qat.quantize_model(model) first.")
    layers = scheduled_layers(model)
    blind = [each for layer in layers for each in layer.quantizers if not each.is_calibrated()]
    if blind:
        raise ValueError(
            f"{len(blind)} quantizers of '{model.name}' have seen no data yet: call "
            f"keras_qat.calibrate(model, data) first."
        )


def before_activation(wrapper: Any, x: Any, phase: Phase) -> Any:
    """What a wrapper computes in front of its activation, BatchNormalization included."""
    return folding.FOLDS[wrapper.fold](wrapper, x, phase)


def sweep(
    model: Any,
    data: Any,
    visit: Visit,
    what: str,
    *,
    steps: int | None = None,
    batch_size: int | None = None,
    verbose: int = 0,
) -> None:
    """Goes through a model and lets `visit` change the weights of each wrapper that is called once.

    Args:
        model: a calibrated quantization-aware model.
        data, steps, batch_size: as in `calibrate`. All of it is held in memory, layer by layer.
        visit: what is done with a wrapper before it is computed as quantized.
        what: what that is, in a word or two, for progress.
        verbose: 1 shows progress.

    Raises:
        ValueError: if the model is not quantized, or has no ranges.
    """
    check_calibrated(model)
    graph = graph_lib.read(model)
    inputs, counts = values_in(graph.inputs), graph.call_counts()
    read = [
        [tf.constant(each, tensor.dtype) for each, tensor in zip(batch, model.inputs, strict=True)]
        for batch in batches(model, data, batch_size, steps, finite=True)
    ]
    in_float = [dict(zip(inputs, batch, strict=True)) for batch in read]
    quantized = [dict(batch) for batch in in_float]
    last = {value: call for call in graph.calls for value in call.inputs}
    for call in shown(graph.calls, what, verbose, unit="layer"):
        _compute(call, in_float, IN_FLOAT)
        wrapper = call.layer
        if isinstance(wrapper, QuantizeWrapper) and counts[wrapper] == 1:
            visit(wrapper, *([each[call.inputs[0]] for each in x] for x in (in_float, quantized)))
        _compute(call, quantized, QUANTIZED)
        done = [value for value in dict.fromkeys(call.inputs) if last[value] is call]
        for tensors in (*in_float, *quantized):
            for value in done:
                del tensors[value]


def _compute(call: Call, batches: list[dict[Value, Any]], phase: Phase) -> None:
    """Adds what a call computes to the tensors of each batch."""
    layers = [call.layer] if isinstance(call.layer, ScheduledLayer) else []
    with assuming(phase, layers):
        for tensors in batches:
            args, kwargs = map_values(tensors.__getitem__, (call.args, call.kwargs))
            found = infer(call, args, kwargs)
            made = zip(values_in(call.outputs), tf.nest.flatten(found), strict=True)
            tensors.update(made)
