"""What a quantization-aware model computes at inference: its resolved graph.

Training rounds real numbers to the nearest quantized value. Kernels compute in integers and round
in ways of their own; at inference the model computes as they do, so that `predict` and `evaluate`
tell what the exported file gives. Gradients there are those of the simulation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_qat.arithmetic.families import Family
from keras_qat.branching import cond, straight_through, with_gradient_of
from keras_qat.keras2 import backend
from keras_qat.keras2 import graph as graph_lib
from keras_qat.keras2.graph import Call, Graph, Value
from keras_qat.layers.scheduled import Phase, shapes_are_enough
from keras_qat.ops.registry import match
from keras_qat.resolved.graph import ResolvedGraph, Tensor
from keras_qat.resolved.in_float import compute_in_float
from keras_qat.resolved.resolve import resolve
from keras_qat.resolved.run import dequantized, quantized_input, run

__all__ = ["Inference", "infer"]


class Inference:
    """A model's inference in integers, for as long as all of its layers quantize.

    Args:
        model: a functional quantization-aware model.
        family: whose rounding.
    """

    def __init__(self, model: Any, family: Family) -> None:
        from keras_qat.keras2.phases import phase_finder
        from keras_qat.schedule import scheduled_layers

        self.model, self.family = model, family
        self.graph = graph_lib.read(model)
        self.layers = list(scheduled_layers(model))
        self.look = phase_finder(model)
        self.traced = tf.function(self._infer, autograph=False)

    def _infer(self, *inputs: Any) -> list[Any]:
        for name, x in zip(self.model.input_names, inputs, strict=True):
            if x.dtype.is_floating:
                known = tf.logical_not(tf.reduce_any(tf.math.is_nan(x)))
                tf.debugging.Assert(known, [f"Input {name} of {self.model.name} holds NaN."])
        return infer(self.graph, list(inputs), self.family)

    def __call__(self, x: Any, simulated: Callable[[Any], Any], training: Any) -> Any:
        """The model's outputs.

        Args:
            x: its inputs, in whatever structure it takes.
            simulated: what training computes from them.
            training: a bool, or a scalar tensor.
        """
        if not self.layers or training is True or shapes_are_enough() or backend.is_building():
            return simulated(x)
        applies = self._applies(training)
        if applies is False:
            return simulated(x)
        flat = graph_lib.flat_inputs(self.model, x)
        if applies is not True:
            return self._if(applies, flat, simulated(x))
        exact = self.traced if tf.executing_eagerly() else self._infer

        def again(*inputs: Any) -> list[Any]:
            given = tf.nest.pack_sequence_as(graph_lib.nested_inputs(self.model), list(inputs))
            return tf.nest.flatten(simulated(given))

        outputs = with_gradient_of(exact, again, flat)
        return tf.nest.pack_sequence_as(graph_lib.nested_outputs(self.model), outputs)

    def _if(self, applies: Any, flat: list[Any], y: Any) -> Any:
        """What kernels compute if that applies, else `y`, what training computes. Its gradient."""
        given = tf.nest.flatten(y)
        exact = cond(
            applies,
            lambda: infer(self.graph, flat, self.family, adds_losses=False),
            lambda: [tf.identity(each) for each in given],
        )
        outputs = [
            straight_through(functools.partial(_instead, one), each)
            for one, each in zip(exact, given, strict=True)
        ]
        return tf.nest.pack_sequence_as(y, outputs)

    def _applies(self, training: Any) -> Any:
        """Whether all layers quantize, to ranges that they have: a bool, or a scalar tensor."""
        phase: Phase | None = self.layers[0].assumed
        if phase is None and tf.executing_eagerly() and training is False:
            phase = self.look(False)
            if phase is None:
                return False
        if phase is not None and phase.training is training:
            return phase.quantizing is True and phase.calibrated
        conditions = [layer.step >= layer.quantize_from for layer in self.layers]
        conditions += [each.is_calibrated() for layer in self.layers for each in layer.quantizers]
        if training is not False:
            conditions.append(tf.logical_not(training))
        return tf.reduce_all(tf.stack(conditions))


def _instead(value: Any, other: Any) -> Any:
    return tf.stop_gradient(value)


def infer(graph: Graph, inputs: list[Any], family: Family, adds_losses: bool = True) -> list[Any]:
    """The real values of a model's outputs, as kernels of a family compute them.

    Args:
        graph: the quantization-aware model; its ranges and weights are read whenever this runs.
        inputs: real numbers, one tensor for each input.
        family: whose rounding.
        adds_losses: whether layers add to the model's losses and metrics.
    """
    resolved = resolve(None, in_graph=True, graph=graph)
    given = [
        x if tensor.params is None else quantized_input(x, tensor.params)
        for x, tensor in zip(inputs, resolved.inputs.values(), strict=True)
    ]
    tensors = run(resolved, given, family, compute_in_float)
    if adds_losses:
        _add_losses(graph, resolved, tensors)
    return [
        tf.ensure_shape(_real(tensors, tensor), tensor.shape)
        for tensor in resolved.outputs.values()
    ]


def _real(tensors: dict[Tensor, Any], tensor: Tensor) -> Any:
    values = tensors[tensor]
    return values if tensor.params is None else dequantized(values, tensor.params)


def _add_losses(graph: Graph, resolved: ResolvedGraph, tensors: dict[Tensor, Any]) -> None:
    """Computes what layers add to the model's loss and metrics, and no output depends on."""
    real: dict[Value, Any] = {}

    def value_of(value: Value) -> Any:
        if value not in real:
            real[value] = _real(tensors, resolved.tensors[value])
        return real[value]

    regularized = [call for call in graph.calls if _regularizes(call)]
    for call in [*regularized, *graph.aside]:
        args, kwargs = graph_lib.map_values(value_of, (call.args, call.kwargs))
        outputs = call.layer(*args, **kwargs)
        if call in graph.aside:
            made = zip(graph_lib.values_in(call.outputs), tf.nest.flatten(outputs), strict=True)
            real.update(made)


def _regularizes(call: Call) -> bool:
    """Whether a layer that computes nothing at run time regularizes its input."""
    if getattr(call.layer, "activity_regularizer", None) is None:
        return False
    op = match(call).op
    return op is not None and op.alias
