"""Traces custom layers: replaces each call of a layer by the calls inside the layer.

Custom layers include Lambdas and users' activation functions. A layer that cannot be traced stays
opaque: it computes in float.

All calls of a layer share its weights, so they must be treated alike. If one of them cannot be
traced, for example, the others must stay opaque too. Therefore, all layers are traced again with
this decision, until no new decision is necessary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, flatten_values
from keras_qat.graph.sizes import set_shapes_in_order
from keras_qat.helper_layers.operations import TrainingOnly
from keras_qat.keras2.backend import keras, layers
from keras_qat.keras2.layers_and_models import list_layers, list_sublayers
from keras_qat.lowering.activations import split_activation
from keras_qat.lowering.attention import split_masked_attention
from keras_qat.lowering.builder import LoweringContext, PartsBuilder
from keras_qat.lowering.custom_batch_norm import replace_custom_batch_norm
from keras_qat.lowering.custom_code import (
    ATTENTION,
    expand_operation,
    find_normalization,
    find_traceable,
    has_custom_activation,
    runs_custom_code,
)
from keras_qat.lowering.expansions.keras_layers import list_owners
from keras_qat.lowering.inline_trace import Inliner, TracedCall
from keras_qat.lowering.mask_tensors import (
    MaskTensors,
    is_recurrent,
    masks_nonzero,
    reads_floats,
    reads_mask,
    split_masking,
)
from keras_qat.lowering.recurrent import pass_mask
from keras_qat.lowering.unrolling import combine_gates, find_refused_cells
from keras_qat.tracing.cannot_trace import CannotTrace, OnlyTrains, ReadsWeights, TooLarge
from keras_qat.tracing.inner_calls import trace_attention_dropout
from keras_qat.tracing.layer_weights import find_weight_holders


class BorrowedWeights:
    """Records which layers read weights that other layers own, such as tied embeddings.

    The owner is traced as well. Both layers then read the same tensor.
    """

    def __init__(self, graph: Graph) -> None:
        self.lenders: dict[layers.Layer, list[layers.Layer]] = {}
        """Maps a layer to the owners of the weights that it borrows."""
        self.owners: dict[int, layers.Layer] = {}
        """Maps the id of a shared variable to the layer that owns the variable."""
        self.outside: dict[layers.Layer, list[tf.Variable]] = {}
        """Maps a layer to variables that belong to no layer. Keras does not train them."""
        self.changes = 0
        self._refused: set[layers.Layer] = set()
        self._top = list(dict.fromkeys(call.layer for call in graph.calls))
        self._parents: dict[layers.Layer, set[layers.Layer]] = {}
        for layer in {inner for top in self._top for inner in list_layers(top)}:
            for inner in list_sublayers(layer):
                self._parents.setdefault(inner, set()).add(layer)

    def note(self, layer: layers.Layer, variables: Sequence[tf.Variable]) -> bool:
        """Record that a layer borrows variables. Return True if anything new was recorded."""
        owner_of = {id(variable): self._find_owner(variable) for variable in variables}
        if outside := [v for v in variables if owner_of[id(v)] is None]:
            noted = self.outside.setdefault(layer, [])
            if any(variable is other for variable in outside for other in noted):
                return False
            noted.extend(outside)
            self.changes += 1
            return True
        owners, known = set(owner_of.values()) - {layer}, self.lenders.get(layer, [])
        if not owners or owners & {*known, *self._refused}:
            return False
        self.lenders[layer] = [*known, *owners]
        self.changes += 1
        for owner in owners:
            if self._parents.get(owner, set()) != {layer} or owner in self._top:
                self.owners.update(dict.fromkeys(map(id, _list_weights(owner)), owner))
        return True

    def _find_owner(self, variable: tf.Variable) -> layers.Layer | None:
        for layer in [*self._top, *self._parents]:
            if any(leaf is variable for leaf in _list_weights(layer)):
                return layer
        return None

    def find_sharing(self) -> set[layers.Layer]:
        """Return borrowers and owners of weights. `_Attempt` adds them to `_Agreement.apart`."""
        owners = set(self.owners.values())
        return owners | {layer for layer, lenders in self.lenders.items() if owners & set(lenders)}

    def refuse(self, graph: Graph) -> bool:
        """Forget all borrowers and owners if an owner stayed opaque. Return True in this case.

        Weights of opaque layers cannot be borrowed. The next attempt records all others again.
        """
        opaque = {id(weight) for call in graph.calls for weight in call.layer.weights}
        refused = {owner for variable, owner in self.owners.items() if variable in opaque}
        if refused:
            self._refused |= refused
            self.lenders.clear()
            self.owners.clear()
        return bool(refused)


def _list_weights(layer: layers.Layer) -> list[tf.Variable]:
    return tf.nest.flatten([list(held.values()) for _, held in find_weight_holders(layer)])


def trace_layers(graph: Graph, context: LoweringContext) -> Graph:
    """Trace all custom layers. Repeat until all calls of each layer are treated alike."""
    agreed = _Agreement(BorrowedWeights(graph))
    while True:
        context.clear()
        attempt = _Attempt(graph, context, agreed)
        traced = attempt.run()
        if not agreed.update(attempt, traced):
            return traced


@dataclasses.dataclass
class _Agreement:
    """The decisions of earlier attempts. They apply to all calls of a layer."""

    borrowed: BorrowedWeights
    opaque: dict[layers.Layer, str] = dataclasses.field(default_factory=dict)
    """Maps a layer that must stay opaque to the reason."""
    unrolled: set[layers.Layer] = dataclasses.field(default_factory=set)
    """Recurrent layers to unroll in every call."""
    apart: set[layers.Layer] = dataclasses.field(default_factory=set)
    """Layers that quantize `kernel` itself. Other layers may quantize `kernel * 2.0` instead."""

    def update(self, attempt: _Attempt, traced: Graph) -> bool:
        """Record the layers that need new decisions. Return True to try again."""
        layers_traced = attempt.inliner.counts.keys()
        opaque = {x: attempt.refused[x] for x in layers_traced & attempt.refused}
        opaque |= find_refused_cells(layers_traced, attempt.refused)
        partly = {call.layer for call in traced.calls if is_recurrent(call.layer)} & layers_traced
        opaque |= dict.fromkeys(partly & self.unrolled, "its calls differ")
        split = attempt.context.find_split_layers() - self.apart
        self.opaque |= opaque
        self.unrolled |= partly
        self.apart |= split
        has_borrowed = self.borrowed.changes != attempt.changes_before
        return bool(opaque or partly or split or has_borrowed) or self.borrowed.refuse(traced)


class _Attempt:
    def __init__(self, read: Graph, context: LoweringContext, agreed: _Agreement) -> None:
        # The calls are copied, because an attempt changes producers of values and arguments.
        calls, losses = (list(map(dataclasses.replace, x)) for x in (read.calls, read.loss_only))
        self.graph = dataclasses.replace(read, calls=calls, loss_only=losses)
        self.context, self.agreed, self.masks = context, agreed, MaskTensors(context)
        self.changes_before = agreed.borrowed.changes
        self.owners = set(agreed.borrowed.owners.values())
        self.apart = agreed.apart | agreed.borrowed.find_sharing()
        self.inliner = Inliner(context, flatten_values(read.inputs)[0], agreed.borrowed.owners)
        self.opaque: dict[str, str] = {}
        """Maps the name of a call that could not be traced to the reason."""
        self.refused: dict[layers.Layer, str] = {}
        """Maps a layer with an opaque call to the reason."""
        self._readers = self.graph.consumers()
        self._outputs = set(flatten_values(self.graph.outputs))
        self._masked = {call.layer for call in calls if reads_mask(call)}

    def run(self) -> Graph:
        calls = [
            new for call in set_shapes_in_order(self.graph.calls) for new in self._replace(call)
        ]
        losses = [*self.graph.loss_only, *self.inliner.losses]
        return self.masks.attach(
            dataclasses.replace(self.graph, calls=calls, opaque=self.opaque, loss_only=losses)
        )

    def _replace(self, call: Call, siblings: Sequence[Call] = ()) -> list[Call]:
        """Return the calls that replace a call, or the call itself.

        If the call is inside a traced layer, `siblings` are all calls in this layer. New calls
        get other names.
        """
        self.masks.note(call)
        if self.context.may_trace(call) is False:
            return [call]
        parts = self._find_replacement(call, siblings)
        siblings = [*siblings, *parts]
        new = [new for part in set_shapes_in_order(parts) for new in self._replace(part, siblings)]
        return new or [call]

    def _find_replacement(self, call: Call, siblings: Sequence[Call]) -> list[Call]:
        layer, context, may_trace = call.layer, self.context, self.context.may_trace(call)
        parts = (
            self._split_custom_activation(call)
            or replace_custom_batch_norm(call, context)
            or expand_operation(call, context, forced=may_trace is True)
        )
        if parts:
            self.masks.hand_over(flatten_values(call.outputs))
            return parts
        forced = may_trace is True or not context.has_spectra
        expansion = find_traceable(call, forced, layer in self.agreed.unrolled)
        try:
            if type(layer) is layers.MultiHeadAttention:
                return split_masked_attention(call, context, self.masks)
            if is_recurrent(layer) and self._reads_masks(call) and not expansion:
                return pass_mask(call, self.masks)
            if masks_nonzero(call):
                is_float = not may_trace and reads_floats(call, self._readers, self._outputs)
                return [] if is_float else split_masking(call, context, self.masks)
        except CannotTrace:
            return []
        is_traced = runs_custom_code(layer) or self._reads_masks(call) or layer in self.owners
        if not (expansion or is_traced):
            return []
        try:
            return self._inline(call, expansion, siblings)
        except OnlyTrains as error:
            builder, weights = PartsBuilder(call, context), error.model.weights
            layer = builder.new("", TrainingOnly, error.model, weights=weights)
            return builder.end(layer, call.inputs[0])
        except CannotTrace as error:
            self._note_refusal(call, expansion, error)
            return []

    def _split_custom_activation(self, call: Call) -> list[Call]:
        if type(call.layer) is layers.Activation or not has_custom_activation(call.layer):
            return []
        parts, inner = split_activation(call, self.context), call.layer.activation
        if getattr(inner, "weights", ()):  # A copy would have no weights yet.
            parts[-1] = dataclasses.replace(parts[-1], layer=inner)
        return parts

    def _inline(self, call: Call, expansion: Call | None, siblings: Sequence[Call]) -> list[Call]:
        """Trace a layer, and return the calls inside. Trace `expansion` instead if it is given.

        Raises:
            CannotTrace: if the layer cannot be traced.
            OnlyTrains: if the layer changes its input only in training.
        """
        layer, borrowed = call.layer, self.agreed.borrowed
        if layer in self.agreed.opaque:
            raise CannotTrace(self.agreed.opaque[layer])
        lenders = [*borrowed.lenders.get(layer, ()), *list_owners(layer)]
        lenders += borrowed.outside.get(layer, [])
        with combine_gates(layer), trace_attention_dropout(layer):
            trace, read = self.masks.trace(call, expansion, lenders)
        traced = TracedCall(call, trace, read, keeps_weights=layer in self.apart)
        is_model = self._is_entire_model(call)
        symbol = find_normalization(traced.graph, traced.of_weights)
        if symbol and not (is_model or self.context.may_trace(call)):
            raise CannotTrace(f"it normalizes (tf.{symbol}), which needs more than 8 bits")
        prefix = "" if is_model else f"{call.name}/"
        taken = {other.name.removeprefix(prefix) for other in siblings}
        calls = self.inliner.inline(traced, prefix, taken)
        return [*self.masks.take_calls(), *calls]

    def _note_refusal(self, call: Call, expansion: Call | None, error: CannotTrace) -> None:
        layer = call.layer
        if isinstance(error, ReadsWeights) and self.agreed.borrowed.note(layer, error.variables):
            return  # The next attempt traces the layer together with the owners of these weights.
        if self._is_entire_model(call):
            raise ValueError(
                f"The subclassed model '{call.name}' cannot be traced: {error}. Express "
                f"it in the functional style, keras.Model(inputs, outputs), or quantize "
                f"the functional models inside it one by one."
            ) from error
        is_of_keras = expansion is not None and type(layer) is not layers.RNN
        has_other_reason = is_of_keras or type(layer) in ATTENTION or layer in self._masked
        if not has_other_reason or isinstance(error, TooLarge):
            self.opaque[call.name] = self.refused[layer] = str(error)

    def _reads_masks(self, call: Call) -> bool:
        self._masked.update([call.layer] if reads_mask(call) else ())
        return call.layer in self._masked

    def _is_entire_model(self, call: Call) -> bool:
        return self.graph.calls == [call] and isinstance(call.layer, keras.Model)
