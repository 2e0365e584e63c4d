"""The last passes: no identities before norms, and unique names."""

from __future__ import annotations

import dataclasses

from keras_qat.graph.calls import Call, Graph, flatten_values, is_batch_norm
from keras_qat.lowering.builder import LoweringContext
from keras_qat.ops.registry import find_op


def drop_identities(graph: Graph, context: LoweringContext) -> Graph:
    """Drops linear activations in front of a BatchNormalization, which would prevent folding."""
    consumers = graph.consumers()
    outputs = flatten_values(graph.outputs)
    calls = {call: call for call in graph.calls}
    for call in graph.calls:
        op = find_op(call)
        if op is None or op.name != "linear" or len(consumers[call.output]) != 1:
            continue
        producer, (reader,) = call.inputs[0].producer, consumers[call.output]
        weighted = find_op(producer) if producer is not None else None
        if producer is None or weighted is None or not weighted.folds_batch_norm:
            continue
        is_read_once = consumers[producer.output] == [call] and producer.output not in outputs
        if is_batch_norm(reader) and is_read_once:
            args, kwargs = producer.args, producer.kwargs
            calls[producer] = Call(producer.layer, args, kwargs, call.outputs, producer.name)
            del calls[call]
    return dataclasses.replace(graph, calls=list(calls.values()))


def name_apart(graph: Graph, context: LoweringContext) -> Graph:
    """Renames parts that are called as another layer is: `conv_depthwise` of `conv`."""
    owners = {call.name: call.layer for call in graph.calls if call.name == call.origin}

    def with_own_name(call: Call) -> Call:
        name = call.name
        while owners.setdefault(name, call.layer) is not call.layer:
            name += "_"
        for value in flatten_values(call.outputs):
            if name != call.name and value.name.startswith(call.name):
                value.name = name + value.name.removeprefix(call.name)
        return dataclasses.replace(call, name=name)

    return dataclasses.replace(graph, calls=list(map(with_own_name, graph.calls)))
