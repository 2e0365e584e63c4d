"""Inference of a quantization-aware model, which runs a resolved graph in integers.

Training rounds float values to the nearest quantized value. Kernels compute in integers and round
differently. At inference the model rounds like the kernels, so `predict` and `evaluate` return the
results of the exported file. A gradient tape returns the gradients of fake quantization.
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
from keras_qat.integer_graph.cached_inference import (
    CachedInference,
    add_to_floats,
    replace_unless_finite,
)
from keras_qat.integer_graph.execute import Prepared, prepare, run
from keras_qat.integer_graph.file_inference import FileInference, InferenceRuntime
from keras_qat.integer_graph.float_inference import Evaluator, make_evaluator
from keras_qat.integer_graph.float_nodes import compute_in_float
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.resolve import resolve, resolve_in_graph
from keras_qat.keras2 import backend
from keras_qat.keras2.backend import keras
from keras_qat.keras2.layers_and_models import flatten_inputs, get_nested_inputs, get_nested_outputs
from keras_qat.keras2.losses import take_losses
from keras_qat.ops.node import Node
from keras_qat.ops.registry import match
from keras_qat.training.calibration.watch import get_watch
from keras_qat.training.fake_quantization.phase import Phase, is_exact
from keras_qat.training.recurrent import list_states, restore_states
from keras_qat.training.schedule import check_process, list_scheduled_layers
from keras_qat.training.scheduled_layer import shapes_are_enough


class Inference:
    """Computes a functional model at inference.

    It computes in integers after all layers have begun to quantize. Until then, it calls
    `model.simulated`, which computes in float or with fake quantization.
    """

    def __init__(self, model: keras.Model, family: KernelFamily) -> None:
        from keras_qat.training.phase_graphs import get_phase_finder

        self.model, self.family = model, family
        self.graph = read_model(model)
        self.layers = list(list_scheduled_layers(model))
        self.look = get_phase_finder(model)
        self.states = list_states(model)
        self.with_losses = [call for call in self.graph.calls if _regularizes(call)]
        self.with_losses += self.graph.loss_only
        self.loss_inputs = self._find_loss_inputs()
        self.float_losses: list[keras.layers.Layer] = []
        """The float layers that call `add_loss`. A layer with two losses occurs twice."""
        self.replaces_nan = find_nan_handling(self.graph)
        self.settled = CachedInference(
            model, self.graph, self._resolve, self._prepare, self._compute
        )
        self.file = FileInference(self.graph, family, functools.partial(resolve, model))
        self._is_eager = False
        """A copy of `model.run_eagerly`. The original is slow, because Keras checks every layer."""
        self.runs_file = False
        """Whether the next trace of `predict` or `evaluate` may call TFLite's interpreter."""
        self.traced: tuple[int, Any] = (0, None)
        """The value of `settled.version` in the last eager call, and the traced function."""
        self._in_float = make_evaluator(self.graph, flatten_values(self.graph.outputs))
        self.traced_whole = backend.make_tf_function(self._infer, reduce_retracing=True)

    def resolve(self) -> ResolvedGraph:
        """Returns the resolved graph. It is cached until ranges or weights change."""
        check_process(self.model)
        if tf.distribute.has_strategy():
            return resolve(self.model)
        self.settled.look()
        if self.settled.resolved is None:
            self.settled.resolved = resolve(self.model)
        return self.settled.resolved

    @property
    def in_float(self) -> Evaluator:
        """A function that computes the outputs in float."""
        watch = get_watch(self.model)
        return watch.outputs if watch else self._in_float

    def settle(self) -> None:
        """Folds the current weights. The next batches use these weights and the current ranges."""
        if not tf.distribute.has_strategy():
            self._is_eager = self.model.run_eagerly
            self.settled.refresh(self._is_eager)

    def choose(self, runtime: InferenceRuntime) -> tuple[int, bool]:
        """Chooses TensorFlow or TFLite's interpreter for the next batch. Call `settle` first.

        Returns:
            `(version, may_use_interpreter)`, a key for the traced functions of the caller. The
            version changes if earlier traced functions are out of date.
        """
        settled, model = self.settled, self.model
        self.runs_file = not (
            runtime == "tensorflow"
            or not self._is_settled
            or self._is_eager
            or model.jit_compile
            or model.file_outputs
            or self.states
            or self.with_losses
            or self.float_losses
            or self.replaces_nan
        ) and self.file.prepare(settled.weights_version, 2 * settled.seconds, runtime != "auto")
        return settled.version, self.runs_file

    def settle_if_exact(self) -> bool:
        """Calls `settle`. Returns False before quantization, or in a distribution strategy."""
        if tf.distribute.has_strategy() or not is_exact(self.look(False)):
            return False
        self.settle()
        return True

    def compute_settled(self, x: Any) -> list[tf.Tensor]:
        """Computes the outputs with the weights and ranges of the last `settle`."""
        count = len(flatten_values(self.graph.outputs))
        return self.settled(*flatten_inputs(self.model, x))[:count]

    @property
    def _is_settled(self) -> bool:
        """Whether `settle` has prepared inference. Always False in a distribution strategy."""
        return self.settled.is_ready and not tf.distribute.has_strategy()

    def _get_function(self) -> Callable[..., list[tf.Tensor]]:
        """Return the function for eager calls such as `model(x)`, with the current weights."""
        if tf.distribute.has_strategy():  # Creating a variable waits for all workers.
            return self.traced_whole
        self.settled.refresh(self.model.run_eagerly)
        if self.model.run_eagerly:
            return self._infer_settled
        if self.traced[0] != self.settled.version:
            function = backend.make_tf_function(self._infer_settled, reduce_retracing=True)
            self.traced = self.settled.version, function
        return self.traced[1]

    def _infer_eagerly(self, *inputs: tf.Tensor) -> list[tf.Tensor]:
        """Compute the outputs of an eager call. All weights are read, so a tape watches them."""
        return self._get_function()(*inputs)

    def _check_nan(self, inputs: Sequence[tf.Tensor]) -> None:
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

    def _compute(
        self, resolved: ResolvedGraph, prepared: Prepared, inputs: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Return the outputs, the values of `self.loss_inputs`, and the losses of float layers."""
        losses: list[tuple[keras.layers.Layer, tf.Tensor]] = []

        def compute(node: Node, values: list[tf.Tensor]) -> list[tf.Tensor]:
            with take_losses(node.call.layer) as added:
                results = compute_in_float(node, values)
            if node.call not in self.with_losses:  # `_finish` calls `with_losses` again.
                losses.extend(added)
            return results

        quantized = list(map(prepared.quantize, inputs, resolved.inputs.values()))
        tensors = run(resolved, quantized, self.family, compute, prepared)
        read = [*resolved.outputs.values(), *map(resolved.tensors.__getitem__, self.loss_inputs)]
        self.float_losses = [layer for layer, _ in losses]
        values = [prepared.dequantize(tensors[tensor], tensor) for tensor in read]
        return values + [loss for _, loss in losses]

    def _find_loss_inputs(self) -> list[Value]:
        computed = {
            value for call in self.graph.loss_only for value in flatten_values(call.outputs)
        }
        read = [value for call in self.with_losses for value in call.inputs]
        return [value for value in dict.fromkeys(read) if value not in computed]

    def _finish(self, tensors: list[tf.Tensor], adds_losses: bool = True) -> list[tf.Tensor]:
        """Add the losses and metrics of layers to the model, and return the outputs."""
        outputs = flatten_values(self.graph.outputs)
        count = len(outputs) + len(self.loss_inputs)
        read, losses = tensors[len(outputs) : count], tensors[count:]
        for layer, loss in zip(self.float_losses, losses, strict=True) if adds_losses else ():
            layer.add_loss(loss)
        values = dict(zip(self.loss_inputs, read, strict=True))
        for call in self.with_losses if adds_losses else []:
            args, kwargs = map_values(values.__getitem__, (call.args, call.kwargs))
            with compute_in_float32(call.layer):
                outputs_of_layer = call.layer(*args, **kwargs)
            if call in self.graph.loss_only:
                results = tf.nest.flatten(outputs_of_layer)
                values.update(zip(flatten_values(call.outputs), results, strict=True))
        return [
            tf.ensure_shape(tensor, [None, *value.shape[1:]] if value.shape else [])
            for tensor, value in zip(tensors, outputs, strict=False)
        ]

    def _infer_settled(self, *inputs: tf.Tensor) -> list[tf.Tensor]:
        """Compute in integers, with the weights and ranges of the last `settle`."""
        self._check_nan(inputs)
        return self._finish(self.settled(*inputs))

    def _infer_with_file(self, *inputs: tf.Tensor) -> list[tf.Tensor]:
        """Compute in integers in TFLite's interpreter, or in TensorFlow until a file exists."""
        self._check_nan(inputs)
        return self._finish(self.file(inputs, self.settled))

    def _infer(self, *inputs: tf.Tensor, adds_losses: bool = True) -> list[tf.Tensor]:
        """Compute in integers, with the current ranges and weights."""
        self._check_nan(inputs)
        resolved = self._resolve()
        prepared = self._prepare(resolved)
        weights = [weight for weight in self.model.weights if weight.dtype.is_floating]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(weight)) for weight in weights])
        prepared, offset = replace_unless_finite(finite, prepared), tf.where(finite, 0.0, np.nan)
        tensors = self._compute(resolved, prepared, list(inputs))
        return self._finish([add_to_floats(offset, tensor) for tensor in tensors], adds_losses)

    def __call__(self, x: Any, training: bool | tf.Tensor, **options: Any) -> Any:
        """Computes the outputs in integers, or calls `model.simulated(x, **options)`.

        `model.simulated` computes in float or with fake quantization, for example in training.
        """
        simulated = functools.partial(self.model.simulated, **options)
        if not self.layers or training is True or shapes_are_enough() or backend.is_building():
            return simulated(x)
        applies = self._is_exact(training)
        if applies is False:
            return simulated(x)
        flat = flatten_inputs(self.model, x)
        if applies is not True:
            with restore_states(self.states):
                y = simulated(x)
                after = [tf.identity(state) for state in self.states]
            return self._choose(applies, flat, y, after)
        exact: Callable[..., list[Any]] = self._infer
        if tf.executing_eagerly():
            exact = self._infer_eagerly
        elif is_exact(self.layers[0].assumed) and self._is_settled:
            exact = self._infer_with_file if self.runs_file else self._infer_settled

        def simulate(model: keras.Model, *inputs: tf.Tensor) -> list[tf.Tensor]:
            nested = tf.nest.pack_sequence_as(get_nested_inputs(model), list(inputs))
            with restore_states(list_states(model)):
                return tf.nest.flatten(model.simulated(nested, **options))

        outputs = replace_gradient(exact, self.model, simulate, flat)
        return tf.nest.pack_sequence_as(get_nested_outputs(self.model), outputs)

    def _choose(
        self, applies: tf.Tensor, flat: list[tf.Tensor], y: Any, after: list[tf.Tensor]
    ) -> Any:
        """Return integer results if the scalar tensor `applies` is true. Otherwise return `y`.

        `y` is the result of `model.simulated`. The gradients are always those of `y`. `after`
        contains the states of recurrent layers after `model.simulated`.
        """
        simulated = tf.nest.flatten(y)

        def restore() -> list[tf.Tensor]:
            for state, value in zip(self.states, after, strict=True):
                state.assign(value)
            return [tf.identity(output) for output in simulated]

        def attach_gradient(exact: tf.Tensor, output: tf.Tensor) -> tf.Tensor:
            return straight_through(lambda _: tf.stop_gradient(exact), output)

        exact = cond(applies, lambda: self._infer(*flat, adds_losses=False), restore)
        return tf.nest.pack_sequence_as(y, list(map(attach_gradient, exact, simulated)))

    def _is_exact(self, training: bool | tf.Tensor) -> bool | tf.Tensor:
        """Return whether to compute in integers.

        In a traced function, the result may be a tensor that depends on the training step.
        """
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


def _regularizes(call: Call) -> bool:
    """Return whether a layer only adds a regularization loss, like ActivityRegularization."""
    if getattr(call.layer, "activity_regularizer", None) is None:
        return False
    op = match(call).op
    return op is not None and op.alias
