"""Visits each part of a quantization-aware model, to change its weights.

A part is the call of one layer, or a block such as a residual block. First, the part is computed in
float for all examples. Then a function may change the part's weights. Then the part is computed
again with quantization, because later parts also read the quantized outputs.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, flatten_values, map_values
from keras_qat.graph.read_model import read_model
from keras_qat.io.data import read_batches, show_progress
from keras_qat.keras2.backend import keras
from keras_qat.messages import pluralize
from keras_qat.ops.registry import relu_maximum
from keras_qat.training.calibration.watch import infer
from keras_qat.training.fake_quantization.phase import IN_FLOAT, QUANTIZED, Phase
from keras_qat.training.layers import QuantizeWrapper
from keras_qat.training.schedule import check_process, check_quantized, list_quantizers
from keras_qat.training.scheduled_layer import ScheduledLayer, assuming

Tensors = dict[Value, tf.Tensor]


class Part(NamedTuple):
    """The call of one layer, or the calls of a block.

    Args:
        calls: the calls, in order.
        reads: the inputs of the part.
        outputs: the tensors that later parts read, and outputs of the model.
        alone: the calls of `QuantizeWrapper` layers that the model calls only once. Only these
            layers change.
    """

    calls: list[Call]
    reads: list[Value]
    outputs: list[Value]
    alone: list[Call]


Visit = Callable[[Part, list[Tensors], list[Tensors]], None]
"""A function `(part, in_float, quantized)` that may change the weights of a part.

The lists have an entry for each batch. `in_float` has the part's inputs and outputs in float.
`quantized` has the quantized inputs."""


def check_calibrated(model: keras.Model) -> None:
    """Raises a `ValueError` if a model is not quantized, or has quantizers without a range."""
    check_quantized(model)
    check_process(model)
    blind = [quantizer for quantizer in list_quantizers(model) if not quantizer.is_calibrated()]
    if blind:
        raise ValueError(
            f"{pluralize(len(blind), 'quantizer has', 'quantizers have')} seen no data yet in "
            f"'{model.name}': call keras_qat.calibrate(model, data) first."
        )


def sweep(
    model: keras.Model,
    data: object,
    visit: Visit,
    title: str,
    steps: int | None = None,
    batch_size: int | None = None,
    verbose: int = 0,
    *,
    blocks: bool = False,
) -> None:
    """Calls `visit`, which may change weights, for each part of a model.

    Weights are restored if `visit` fails or is interrupted.

    Args:
        model: a calibrated quantization-aware model.
        data, steps, batch_size: as in `calibrate`. All batches are held in memory.
        visit: function that may change the weights of a part.
        title: the title of the progress bar.
        verbose: 1 shows progress.
        blocks: True to visit blocks, such as a residual block with the ReLU after it. False to
            visit each call.
    """
    check_calibrated(model)
    graph = read_model(model)
    inputs = flatten_values(graph.inputs)
    read = [
        [tf.constant(x, tensor.dtype) for x, tensor in zip(batch, model.inputs, strict=True)]
        for batch in read_batches(model, data, batch_size, steps, finite=True)
    ]
    in_float = [dict(zip(inputs, batch, strict=True)) for batch in read]
    quantized = [dict(batch) for batch in in_float]
    parts = _split_graph(graph, blocks)
    last = {value: part for part in parts for value in part.reads}
    with restore_if_it_fails(model):
        for part in show_progress(parts, title, verbose, unit="block" if blocks else "layer"):
            _add_outputs(part, in_float, IN_FLOAT)
            visit(part, in_float, quantized)
            _add_outputs(part, quantized, QUANTIZED)
            done = [value for value in part.reads if last[value] is part]
            for tensors in (*in_float, *quantized):
                for value in done:
                    del tensors[value]


@contextlib.contextmanager
def restore_if_it_fails(model: keras.Model) -> Iterator[None]:
    before = model.get_weights()
    try:
        yield
    except BaseException:
        model.set_weights(before)
        raise


def _split_graph(graph: Graph, blocks: bool) -> list[Part]:
    """Split a graph into calls or blocks. A block ends where later calls read only one tensor."""
    counts, outputs = graph.count_calls(), set(flatten_values(graph.outputs))
    unread = Counter(value for call in graph.calls for value in dict.fromkeys(call.inputs))
    waiting = {value for value in flatten_values(graph.inputs) if unread[value]}
    parts: list[Part] = []
    calls: list[Call] = []
    for call, following in zip(graph.calls, [*graph.calls[1:], None], strict=True):
        calls.append(call)
        unread.subtract(dict.fromkeys(call.inputs, 1))
        waiting = {value for value in (*waiting, *flatten_values(call.outputs)) if unread[value]}
        if blocks and (len(waiting) > 1 or _is_relu(following)):
            continue
        computed = dict.fromkeys(
            value for member in calls for value in flatten_values(member.outputs)
        )
        read = dict.fromkeys(value for member in calls for value in member.inputs)
        wrappers = [member for member in calls if isinstance(member.layer, QuantizeWrapper)]
        parts.append(
            Part(
                calls,
                reads=[value for value in read if value not in computed],
                outputs=[value for value in computed if value in waiting or value in outputs],
                alone=[member for member in wrappers if counts[member.layer] == 1],
            )
        )
        calls = []
    return parts


def _is_relu(call: Call | None) -> bool:
    if call is None or len(call.inputs) != 1:
        return False
    layer = call.layer.layer if isinstance(call.layer, QuantizeWrapper) else call.layer
    return not layer.weights and relu_maximum(layer) is not None


def walk(part: Part, inputs: list[Tensors], phase: Phase) -> Iterator[tuple[Call, list[Tensors]]]:
    """Yields each call of a part, and the tensors computed so far (a dict for each batch).

    The caller may change the weights of a yielded call, which is computed after that. The last call
    is not computed.
    """
    batches = [{value: tensors[value] for value in part.reads} for tensors in inputs]
    last = {value: call for call in part.calls for value in call.inputs}
    for call in part.calls[:-1]:
        yield call, batches
        done = [value for value in call.inputs if last[value] is call and value not in part.outputs]
        for tensors in batches:
            tensors |= compute_call(call, tensors, phase)
            for value in dict.fromkeys(done):
                del tensors[value]
    yield part.calls[-1], batches


def _add_outputs(part: Part, batches: list[Tensors], phase: Phase) -> None:
    *_, (call, walked) = walk(part, batches, phase)
    for tensors, inner in zip(batches, walked, strict=True):
        inner |= compute_call(call, inner, phase)
        tensors |= {value: inner[value] for value in part.outputs}


def compute_call(call: Call, tensors: Tensors, phase: Phase) -> Tensors:
    layers = [call.layer] if isinstance(call.layer, ScheduledLayer) else []
    with assuming(phase, layers):
        args, kwargs = map_values(tensors.__getitem__, (call.args, call.kwargs))
        outputs = infer(call, args, kwargs)
    return dict(zip(flatten_values(call.outputs), tf.nest.flatten(outputs), strict=True))
