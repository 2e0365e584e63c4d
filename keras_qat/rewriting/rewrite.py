"""Builds a quantization-aware model from cloned layers, wrappers and quantizers.

A group is a layer such as Conv2D, and the BatchNormalization and activation after it. A
`QuantizeWrapper` computes a group. All other layers are cloned.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import tensorflow as tf

from keras_qat.config import specs
from keras_qat.graph.calls import Call, Graph, Value, flatten_values
from keras_qat.graph.precision import get_policy, is_half
from keras_qat.graph.read_model import list_symbols
from keras_qat.graph.rebuild_model import InsertedCall, Replacement, copy_graph, rebuild_model
from keras_qat.keras2.backend import create_quickly, keras
from keras_qat.keras2.configurations import find_missing_config
from keras_qat.keras2.layers_and_models import (
    assign_reshaped,
    clone,
    find_custom_initializers,
    name_outputs,
)
from keras_qat.ops.registry import count_gates, is_on_request
from keras_qat.placement.fusion_groups import Group
from keras_qat.placement.plan import Plan, Range
from keras_qat.rewriting.quantized_model import QuantizedModel
from keras_qat.training.distribution import observe_alike
from keras_qat.training.fake_quantization.phase import NEVER
from keras_qat.training.layers import Quantize, QuantizeWeights, QuantizeWrapper
from keras_qat.training.quantizers import PREFIX
from keras_qat.training.schedule import ask_for_integers, leave_in_float, schedule
from keras_qat.training.scheduled_layer import shapes_only
from keras_qat.training.weight_limits import start_limits

# Keras' .h5 files contain the name of a class without the registered package.
keras.utils.get_custom_objects()["QuantizedModel"] = QuantizedModel


_NO_SCOPE = re.compile(r"^[^A-Za-z0-9.]|[^A-Za-z0-9_.\\/>-]")
"""Matches characters that TensorFlow does not allow in a name scope."""


def _make_scope_name(name: str) -> str:
    """Convert the name of a tensor, such as "lstm#2:0", to a valid name scope."""
    return _NO_SCOPE.sub(".", name.replace("#", "_call").replace(":", "_output"))


def explain_missing_config(layer: keras.layers.Layer) -> str:
    """Returns the reason why a layer cannot be copied, or "" if it can be copied."""
    try:
        _clone(layer)
    except (NotImplementedError, TypeError):
        name = type(layer).__name__
        return f"{name} has no get_config that returns the arguments of its __init__"
    return ""


def _clone(layer: keras.layers.Layer, **changes: Any) -> Any:
    """Clone a layer. Custom initializers are replaced by zeros, because weights are assigned later.

    A Normalization is cloned as float32, because its statistics need this precision.
    """
    if isinstance(layer, keras.layers.Normalization):
        changes["dtype"] = "float32"
    return clone(layer, **dict.fromkeys(find_custom_initializers(layer), "zeros"), **changes)


def rewrite(plan: Plan, float_model: keras.Model) -> QuantizedModel:
    visitor = _Visitor(plan)
    with observe_alike():
        graph = visitor.visit()
    with shapes_only(), observe_alike(), create_quickly():
        model = rebuild_model(graph, functools.partial(_make_model, plan.file_outputs))
    model.keep_recipe(plan.recipe)
    model.keep_float_model(float_model)
    name_outputs(model, graph.output_names)
    for layer, weights in visitor.sources.items():
        for new, old in zip(layer.weights, weights, strict=True):
            assign_reshaped(new, old)
        layer.finalize_state()  # Normalization computes attributes from its weights.
    start_limits(model)
    recipe = plan.recipe
    if recipe.quant_delay or recipe.freeze_bn_delay is not None:
        frozen_from = NEVER if recipe.freeze_bn_delay is None else recipe.freeze_bn_delay
        schedule(model, quantize_from=recipe.quant_delay, freeze_from=frozen_from)
    return model


def _make_model(
    file_outputs: tuple[str, ...], inputs: tf.Tensor, outputs: tf.Tensor, name: str
) -> QuantizedModel:
    """Create the model. `file_outputs` are the `outputs` passed to `quantize_model`, or ().

    With `file_outputs`, `outputs` is a pair: the model's outputs, and the outputs of the file.
    """
    if not file_outputs:
        return QuantizedModel(inputs=inputs, outputs=outputs, name=name)
    outputs, ends = outputs
    model = QuantizedModel(inputs=inputs, outputs=outputs, name=name)
    named = {id(tensor): name for name, tensor in list_symbols(model).items()}
    if lost := [name for name, end in zip(file_outputs, ends, strict=True) if id(end) not in named]:
        raise ValueError(
            f"outputs contains {lost[0]!r}, but the quantized model does not compute it. For "
            f"example, keras_qat computes log(softmax(x)) without the softmax. Name an earlier "
            f"tensor that keras_qat.plan(model) lists."
        )
    found = {output: named[id(end)] for output, end in zip(file_outputs, ends, strict=True)}
    model.set_untracked(file_outputs=found)
    return model


class _Visitor:
    """Replaces the calls of the float model by calls of quantize-aware layers."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.group_of = {call: group for group in plan.groups for call in group.calls}
        self.range_of = {
            value: shared for shared in plan.ranges for value in shared.observed + shared.rounded
        }
        self.mixed = any(is_half(value.dtype) for value in plan.graph.values())
        self.weights_only = {call.layer: weights for call, weights in plan.weights_only.items()}
        self.layers: dict[Any, Any] = {}
        self.quantizers: dict[Range, Quantize] = {}
        self.names: set[str] = set()
        self.sources: dict[Any, list[Any]] = {}
        """Maps each new layer to the weights to copy into it."""

    def visit(self) -> Graph:
        graph, replacements = self.plan.graph, {}
        for call in [*graph.calls, *graph.loss_only]:
            group = self.group_of.get(call)
            if group is None:
                replacements[call] = Replacement(self._clone(call), call)
            elif call is group.calls[-1]:
                replacements[call] = Replacement(self._wrap(group), group.kernel)
        values = flatten_values([graph.inputs, [call.outputs for call in replacements]])
        inserted = {value: self._insert_after(value) for value in values}
        # Files compute in float32, so outputs of files need no conversion.
        outputs = graph.outputs[0] if self.plan.file_outputs else graph.outputs
        ends = {
            value: self._make_cast(value, "float32")
            for value in dict.fromkeys(flatten_values(outputs))
            if is_half(value.dtype)
        }
        return copy_graph(graph, replacements, inserted, ends)

    def _insert_after(self, value: Value) -> list[InsertedCall]:
        """Return calls to insert after a tensor: a `Quantize`, a half-precision cast, or both."""
        calls = [self._make_quantizer(value)]
        if value.producer is None and is_half(value.dtype):
            calls.append(self._make_cast(value, get_policy(value.dtype)))
        return [call for call in calls if call is not None]

    def _make_cast(self, value: Value, policy: str) -> InsertedCall:
        """Return a call that casts an input to half precision, or an output to float32."""
        name = self._make_unique(f"{_make_scope_name(value.name)}_{policy}")
        return InsertedCall(keras.layers.Activation("linear", dtype=policy, name=name), name, {})

    def _clone(self, call: Call) -> Any:
        """Return the clone of a layer that is in no group. Several calls share one clone."""
        if call.layer not in self.layers:
            name = PREFIX + call.name
            if call.layer in self.weights_only:
                spec, paths = self.weights_only[call.layer]
                inner, axes = self._copy(call), dict.fromkeys(paths, ())
                layer = QuantizeWeights(inner, axes, spec, name=name, mixed=self.mixed)
            else:
                layer = inner = self._copy(call, name=name)
            if call.layer in self.plan.replaced:
                new_class = self.plan.replaced[call.layer]
                layer = inner = new_class.from_config(
                    {**layer.get_config(), **find_missing_config(layer)}
                )
            self.layers[call.layer] = layer
            self._start_from(inner, call.layer)
        if call.name in self.plan.left_in_float:
            leave_in_float(self.layers[call.layer], self.plan.left_in_float[call.name])
        elif is_on_request(call.layer):
            ask_for_integers(self.layers[call.layer])
        return self.layers[call.layer]

    def _copy(self, call: Call, **changes: Any) -> Any:
        try:
            return _clone(call.layer, **changes)
        except (NotImplementedError, TypeError) as error:
            reason = self.plan.float_layers.get(call.name, "it computes in float")
            raise ValueError(
                f"'{call.name}' cannot be copied, because {explain_missing_config(call.layer)}. "
                f"Write a get_config for its class. keras_qat cannot replace the layer by layers "
                f"of Keras either: {reason}."
            ) from error

    def _wrap(self, group: Group) -> QuantizeWrapper:
        """Return the `QuantizeWrapper` of a group. Several calls of the layer share one wrapper."""
        layer = group.kernel.layer
        if layer not in self.layers:
            is_wide = self.plan.recipe.activations.bits == 16
            norm = group.batch_norm
            inner = [call and _clone(call.layer) for call in (group.kernel, norm)]
            self.layers[layer] = QuantizeWrapper(
                inner[0],
                group.weights,
                self.plan.weights[group],
                batch_norm=inner[1],
                batch_norm_frozen=norm is not None and norm.kwargs.get("training") is False,
                fold=self.plan.recipe.fold,
                activation=group.activation and clone(group.activation.layer),
                output_spec=self._find_own_spec(group.output),
                tensor=group.output.name,
                inner_specs=self.plan.inner.get(group),
                state_bits=16 if count_gates(layer) > 1 and is_wide else 8,
                name=PREFIX + group.kernel.name,
                mixed=self.mixed,
            )
            for call, new in zip((group.kernel, norm), inner, strict=True):
                if call is not None:
                    self._start_from(new, call.layer)
        return self.layers[layer]

    def _start_from(self, new: Any, old: Any) -> None:
        self.sources[new] = self.plan.graph.weights.get(old, old.weights)

    def _find_own_spec(self, value: Value) -> specs.QuantSpec | specs.FixedSpec | None:
        """Return the spec for `value` if a `QuantizeWrapper` quantizes it. Otherwise return None.

        A tensor that shares a range with other tensors is quantized by a `Quantize` layer instead.
        """
        own = self.range_of.get(value)
        if own is None or len(own.observed + own.rounded) > 1:
            return None
        group = self.group_of.get(value.producer) if value.producer else None
        if group is None or group.shared:
            return None
        return own.spec

    def _make_unique(self, name: str) -> str:
        while name in self.names:
            name += "_"
        self.names.add(name)
        return name

    def _make_quantizer(self, value: Value) -> InsertedCall | None:
        """Return a call of the `Quantize` layer for a tensor, or None if the tensor has none."""
        shared = self.range_of.get(value)
        if shared is None or self._find_own_spec(value) is not None:
            return None
        name = self._make_unique(_make_scope_name(value.name) + "_quant")
        if shared not in self.quantizers:
            self.quantizers[shared] = Quantize(
                shared.spec,
                slots=len(shared.observed),
                tensors=tuple(tensor.name for tensor in shared.observed),
                name=name,
                rounds=shared.rounds,
                mixed=self.mixed,
            )
        slot = shared.observed.index(value) if value in shared.observed else None
        return InsertedCall(self.quantizers[shared], name, {"slot": slot})
