"""Inference of a quantization-aware model, which computes its resolved graph.

Training rounds real numbers to the nearest quantized value. Kernels compute in integers and round
in ways of their own; at inference the model computes as they do, so that `predict` and `evaluate`
tell what the exported file gives. Gradients there are those of the simulation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.control_flow import cond, replace_gradient, straight_through
from keras_qat.arithmetic.kernel_families import KernelFamily
from keras_qat.graph.calls import Call, Value, flatten_values, map_values
from keras_qat.graph.missing_values import find_nan_handling
from keras_qat.graph.precision import compute_in_float32
from keras_qat.graph.read_model import read_model
from keras_qat.integer_graph.cached_inference import CachedInference, add_to_real, ones_unless
from keras_qat.integer_graph.execute import Prepared, prepare, run
from keras_qat.integer_graph.float_inference import Evaluator, evaluator
from keras_qat.integer_graph.float_nodes import compute_in_float
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.resolve import resolve, resolve_in_graph
from keras_qat.keras2 import backend
from keras_qat.keras2.layers_and_models import flat_inputs, get_nested_inputs, get_nested_outputs
from keras_qat.keras2.losses import take_losses
from keras_qat.ops.node import Node
from keras_qat.ops.registry import match
from keras_qat.training.calibration.watch import get_watch
from keras_qat.training.fake_quantization.phase import (
    Phase,
    is_exact,
)
from keras_qat.training.recurrent import (
    list_states,
    restore_states,
)
from keras_qat.training.schedule import check_process, list_scheduled_layers
from keras_qat.training.scheduled_layer import shapes_are_enough


class Inference:
    """A model's inference in integers, for as long as all of its layers quantize.

    Args:
        model: a functional quantization-aware model.
        family: whose rounding.
    """

    def __init__(self, model: Any, family: KernelFamily) -> None:
        from keras_qat.training.phase_graphs import get_phase_finder

        self.model, self.family = model, family
        self.graph = read_model(model)
        self.layers = list(list_scheduled_layers(model))
        self.look = get_phase_finder(model)
        self.states = list_states(model)
        self.with_losses = [call for call in self.graph.calls if _regularizes(call)]
        self.with_losses += self.graph.loss_only
        self.read_by_losses = self._read_by_losses()
        self.float_losses: list[Any] = []
        """The layer of each loss that is added while layers compute in float."""
        self.replaces_nan = find_nan_handling(self.graph)
        self.settled = CachedInference(
            model, self.graph, self._resolve, self._prepare, self._tensors
        )
        self.traced: tuple[int, Any] = (0, None)
        """The function of eager calls, and the version of `settled` that it was traced for."""
        self._in_float = evaluator(self.graph, flatten_values(self.graph.outputs))
        self.traced_whole = backend.make_tf_function(self._infer, reduce_retracing=True)

    def resolved(self) -> ResolvedGraph:
        """Returns what `resolve` returns, made anew only after ranges or weights have changed."""
        check_process(self.model)
        if tf.distribute.has_strategy():
            return resolve(self.model)
        self.settled.look()
        if self.settled.resolved is None:
            self.settled.resolved = resolve(self.model)
        return self.settled.resolved

    @property
    def in_float(self) -> Evaluator:
        """Computes the outputs without any quantization, as calibration has traced if it has."""
        watch = get_watch(self.model)
        return watch.outputs if watch else self._in_float

    def settle(self) -> None:
        """Takes ranges and weights as they are now, for all graphs in a phase that is known."""
        if not tf.distribute.has_strategy():
            self.settled.refresh(self.model.run_eagerly)

    @property
    def _is_settled(self) -> bool:
        """Whether what `settle` took may be read. Under a strategy it is not kept up to date."""
        return self.settled.is_ready and not tf.distribute.has_strategy()

    def _traced(self) -> Callable[..., list[Any]]:
        """Returns the function of eager calls. Making variables, workers wait for each other."""
        if tf.distribute.has_strategy():
            return self.traced_whole
        self.settled.refresh(self.model.run_eagerly)
        if self.model.run_eagerly:
            return self._infer_settled
        if self.traced[0] != self.settled.version:
            function = backend.make_tf_function(self._infer_settled, reduce_retracing=True)
            self.traced = self.settled.version, function
        return self.traced[1]

    def _infer_eagerly(self, *inputs: Any) -> list[Any]:
        """Computes in a function that reads all weights, by which a tape knows of them."""
        return self._traced()(*inputs)

    def _check(self, inputs: Sequence[Any]) -> None:
        with_nan = {value.name for value in self.replaces_nan}
        for name, x in zip(self.model.input_names, inputs, strict=True):
            if x.dtype.is_floating and name not in with_nan:
                known = tf.logical_not(tf.reduce_any(tf.math.is_nan(x)))
                tf.debugging.Assert(known, [f"Input {name} of {self.model.name} holds NaN."])

    def _resolve(self) -> ResolvedGraph:
        packing = self.family if self.model.pack_int4 else None
        return resolve_in_graph(self.graph, self.model.target, packing)

    def _prepare(self, resolved: ResolvedGraph) -> Prepared:
        return prepare(resolved, self.family)

    def _tensors(self, resolved: ResolvedGraph, numbers: Prepared, inputs: list[Any]) -> list[Any]:
        """Computes the outputs, what layers that add losses read, and losses of float layers.

        Outputs and what is read are real numbers.
        """
        losses: list[Any] = []

        def compute(node: Node, values: list[Any]) -> list[Any]:
            with take_losses(node.call.layer) as added:
                results = compute_in_float(node, values)
            if node.call not in self.with_losses:  # Those are called again.
                losses.extend(added)
            return results

        quantized = list(map(numbers.quantized, inputs, resolved.inputs.values()))
        tensors = run(resolved, quantized, self.family, compute, numbers)
        names = [
            *resolved.outputs.values(),
            *(resolved.tensors[value] for value in self.read_by_losses),
        ]
        self.float_losses = [layer for layer, _ in losses]
        real = [numbers.real(tensors[name], name) for name in names]
        return real + [loss for _, loss in losses]

    def _read_by_losses(self) -> list[Value]:
        computed = {
            value for call in self.graph.loss_only for value in flatten_values(call.outputs)
        }
        read = [value for call in self.with_losses for value in call.inputs]
        return [value for value in dict.fromkeys(read) if value not in computed]

    def _finished(self, tensors: list[Any], adds_losses: bool = True) -> list[Any]:
        """Returns the outputs among `_tensors`, after adding the losses and metrics of layers."""
        outputs = flatten_values(self.graph.outputs)
        count = len(outputs) + len(self.read_by_losses)
        read, losses = tensors[len(outputs) : count], tensors[count:]
        for layer, loss in zip(self.float_losses, losses, strict=True) if adds_losses else ():
            layer.add_loss(loss)
        real = dict(zip(self.read_by_losses, read, strict=True))
        for call in self.with_losses if adds_losses else []:
            args, kwargs = map_values(real.__getitem__, (call.args, call.kwargs))
            with compute_in_float32(call.layer):
                outputs_of_layer = call.layer(*args, **kwargs)
            if call in self.graph.loss_only:
                values = flatten_values(call.outputs)
                real.update(zip(values, tf.nest.flatten(outputs_of_layer), strict=True))
        return [
            tf.ensure_shape(tensor, [None, *value.shape[1:]] if value.shape else [])
            for tensor, value in zip(tensors, outputs, strict=False)
        ]

    def _infer_settled(self, *inputs: Any) -> list[Any]:
        """Computes as TFLite's kernels do, with ranges and weights of the last `refresh`."""
        self._check(inputs)
        return self._finished(self.settled(*inputs))

    def _infer(self, *inputs: Any, adds_losses: bool = True) -> list[Any]:
        """Computes as TFLite's kernels do, with ranges and weights as they are now."""
        self._check(inputs)
        resolved = self._resolve()
        numbers = self._prepare(resolved)
        weights = [weight for weight in self.model.weights if weight.dtype.is_floating]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(weight)) for weight in weights])
        numbers, offset = ones_unless(finite, numbers), tf.where(finite, 0.0, np.nan)
        tensors = self._tensors(resolved, numbers, list(inputs))
        return self._finished([add_to_real(offset, tensor) for tensor in tensors], adds_losses)

    def __call__(self, x: Any, training: Any, **options: Any) -> Any:
        """Computes the model's outputs.

        Args:
            x: its inputs, in whatever structure it takes.
            training: a bool, or a scalar tensor.
            options: of the model's `simulated`, what training computes.
        """
        simulated = functools.partial(self.model.simulated, **options)
        if not self.layers or training is True or shapes_are_enough() or backend.is_building():
            return simulated(x)
        applies = self._applies(training)
        if applies is False:
            return simulated(x)
        flat = flat_inputs(self.model, x)
        if applies is not True:
            with restore_states(self.states):
                y = simulated(x)
                after = [tf.identity(state) for state in self.states]
            return self._if(applies, flat, y, after)
        exact: Callable[..., list[Any]] = self._infer
        if tf.executing_eagerly():
            exact = self._infer_eagerly
        elif is_exact(self.layers[0].assumed) and self._is_settled:
            exact = self._infer_settled

        def simulate(model: Any, *inputs: Any) -> list[Any]:
            nested = tf.nest.pack_sequence_as(get_nested_inputs(model), list(inputs))
            with restore_states(list_states(model)):
                return tf.nest.flatten(model.simulated(nested, **options))

        outputs = replace_gradient(exact, self.model, simulate, flat)
        return tf.nest.pack_sequence_as(get_nested_outputs(self.model), outputs)

    def _if(self, applies: Any, flat: list[Any], y: Any, after: list[Any]) -> Any:
        """Returns what TFLite's kernels compute if `applies`, else `y`, with the gradient of `y`.

        `after` are the states that training keeps.
        """
        simulated = tf.nest.flatten(y)

        def as_trained() -> list[Any]:
            for state, value in zip(self.states, after, strict=True):
                state.assign(value)
            return [tf.identity(output) for output in simulated]

        exact = cond(applies, lambda: self._infer(*flat, adds_losses=False), as_trained)
        outputs = [
            straight_through(functools.partial(_instead, exact_output), output)
            for exact_output, output in zip(exact, simulated, strict=True)
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
            return is_exact(phase)
        conditions = [layer.step >= layer.quantize_from for layer in self.layers]
        conditions += [
            quantizer.is_calibrated() for layer in self.layers for quantizer in layer.quantizers
        ]
        if training is not False:
            conditions.append(tf.logical_not(training))
        return tf.reduce_all(tf.stack(conditions))


def _instead(value: Any, other: Any) -> Any:
    return tf.stop_gradient(value)


def _regularizes(call: Call) -> bool:
    """Whether a layer that computes nothing at run time regularizes its input."""
    if getattr(call.layer, "activity_regularizer", None) is None:
        return False
    op = match(call).op
    return op is not None and op.alias
