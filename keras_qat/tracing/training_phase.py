"""What a layer computes in training and at inference: two traces of its code become one."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import map_values
from keras_qat.graph.operations import draws_random_numbers, get_kind
from keras_qat.graph.rebuild_model import copy_with_all_arguments
from keras_qat.helper_layers.operations import TrainingOnly
from keras_qat.keras2.backend import is_symbolic
from keras_qat.keras2.layers_and_models import bind_options
from keras_qat.messages import KNOWN, get_package
from keras_qat.tracing.cannot_trace import CannotTrace, OnlyTrains
from keras_qat.tracing.check_trace import random_inputs
from keras_qat.tracing.compare_traces import NOISE, equal, identity, in_order, numbered
from keras_qat.tracing.inner_calls import MustTraceInline
from keras_qat.tracing.training_sections import Sections

PHASE = "keras_qat: the phase"
"""Replaces a `training` argument that follows the model's phase."""


def follow_training(trained: Any, tested: Any) -> None:
    """Makes inner layers follow the model's phase where the layer passes its phase on.

    Raises:
        CannotTrace, OnlyTrains: if the layer computes differently in training.
        MustTraceInline: for an inner layer that is told the phase by another name than `training`.
    """
    does_nothing = _passes_on(tested) and not trained.weights
    refusal: Exception = CannotTrace("it computes differently in training")
    if does_nothing and len(trained.inputs) == 1 and _varies_alike(trained):
        refusal = OnlyTrains(copy_with_all_arguments(trained.model))
    nodes, of_test, noise = in_order(trained), in_order(tested), set[Any]()
    expected = list(map(identity, of_test))
    if list(map(identity, nodes)) != expected:  # As in `if training: x = self.dropout(x)`.
        in_test = {id(node.layer) for node in of_test}
        noise = {n for n in nodes if type(n.layer) in NOISE and id(n.layer) not in in_test}
        nodes = [node for node in nodes if node not in noise]
    known = [numbered(trained, noise), numbered(tested, set())]
    results = [
        [numbers.get(id(tensor)) for tensor in tf.nest.flatten(trace.outputs)]
        for numbers, trace in zip(known, (trained, tested), strict=True)
    ]
    if list(map(identity, nodes)) != expected or results[0] != results[1]:
        raise refusal

    def common(a: Any, b: Any) -> Any:
        if a is True and b is False:
            return PHASE
        if known[0].get(id(a)) != known[1].get(id(b)) or (
            id(a) not in known[0] and not equal(a, b)
        ):
            raise refusal
        return a

    for node in noise:
        node.call_args, node.call_kwargs = node.call_args[:1], {}
    for node, tested_node in zip(nodes, of_test, strict=True):
        arguments = [
            bind_options(n.layer, n.call_args, dict(n.call_kwargs)) for n in (node, tested_node)
        ]
        try:
            args, kwargs = tf.nest.map_structure(common, *arguments)
        except (ValueError, TypeError) as error:
            raise refusal from error
        named = [arg for name, arg in kwargs.items() if name != "training"]
        if any(arg is PHASE for arg in (*args, *named)):  # As in `self.block(x, is_training)`.
            raise refusal if get_package(type(node.layer)) in KNOWN else MustTraceInline(node.layer)
        node.call_args = args
        node.call_kwargs = {key: None if arg is PHASE else arg for key, arg in kwargs.items()}


def with_both_phases(trained: Any, tested: Any, refusal: CannotTrace) -> Any:
    """Returns a trace with what training computes instead, which stays in float.

    That may be parts, as stochastic depth, or all of a layer without weights, such as those that
    add noise where others round.

    Raises:
        CannotTrace: the refusal, for other layers.
    """
    if not _varies_alike(trained):
        raise refusal
    inputs, ends = trained.model.inputs, [tf.nest.flatten(x.outputs) for x in (trained, tested)]
    if (joined := Sections(trained, tested).joined()) is not None:
        trained.outputs = joined
        trained.model = trained.model_of(inputs, joined)
        return trained
    kinds = [[(tensor.shape.as_list(), tensor.dtype) for tensor in tensors] for tensors in ends]
    has_state = any(x.weights or x.model.weights or x.masks for x in (trained, tested))
    if has_state or len(ends[0]) > 1 or kinds[0] != kinds[1]:
        raise refusal
    layer = TrainingOnly(copy_with_all_arguments(trained.model), name="in_training")
    tested.outputs = layer(ends[1][0], given=list(tested.inputs.values()))
    tested.model = tested.model_of(list(tested.inputs.values()), tested.outputs)
    return tested


def _passes_on(trace: Any) -> bool:
    """Returns whether a trace returns its input, possibly through `tf.identity`."""
    kinds = {get_kind(node.layer) for node in trace.nodes}
    return kinds <= {"identity"} and is_symbolic(trace.outputs)


def _varies_alike(trained: Any) -> bool:
    """Returns whether a trace is random in training exactly if its layer is."""
    if any(draws_random_numbers(node.layer) for node in trained.nodes):
        return True  # Runs may still be equal, if it drops one example of a thousand.
    if trained.weights or trained.model.weights:
        return False  # A run may change them, as moving statistics.
    drawn, call = random_inputs(trained), trained.call
    numbers = dict(zip(trained.inputs, drawn, strict=False))
    args, kwargs = map_values(numbers.__getitem__, (call.args, dict(call.kwargs)))
    runs: Any = (
        lambda: trained.layer(*args, **{**kwargs, "training": True}),
        lambda: trained.model(drawn, training=True),
    )
    return len({all(np.all(run() == run()) for _ in range(8)) for run in runs}) == 1
