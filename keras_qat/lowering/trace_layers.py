"""Traces custom layers: replaces each call by the calls of known layers inside it.

These are Lambdas, custom layers and functions that a user passes as activations. A layer that
cannot be traced stays opaque and computes in float.

All calls of a layer share its weights, so they must agree on how it is traced. What one call needs
is often known only after another was traced. So all layers are traced in attempts, each with what
earlier ones found out, until nothing changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from keras_qat.graph.calls import Call, Graph, flatten_values
from keras_qat.graph.sizes import set_shapes_in_order
from keras_qat.helper_layers.operations import TrainingOnly
from keras_qat.keras2.backend import keras, layers
from keras_qat.lowering.activations import split_activation
from keras_qat.lowering.attention import split_masked_attention
from keras_qat.lowering.borrowed_weights import BorrowedWeights
from keras_qat.lowering.builder import LoweringContext, PartsBuilder
from keras_qat.lowering.custom_batch_norm import replace_custom_batch_norm
from keras_qat.lowering.custom_code import ATTENTION, has_custom_activation, runs_custom_code
from keras_qat.lowering.early_expansions import expand_operation, find_traceable
from keras_qat.lowering.expansions.keras_layers import list_owners
from keras_qat.lowering.inline_trace import Inliner, TracedCall
from keras_qat.lowering.mask_tensors import MaskTensors, is_recurrent, reads_mask
from keras_qat.lowering.masking import finds_number, reads_floats, split_masking
from keras_qat.lowering.normalizing import normalizing
from keras_qat.lowering.recurrent import given_mask
from keras_qat.lowering.unrolling import in_few_operations, refused_cells
from keras_qat.tracing.attention_dropout import trace_attention_dropout
from keras_qat.tracing.cannot_trace import (
    READS_OTHERS,
    CannotTrace,
    OnlyTrains,
    ReadsWeights,
    TooLarge,
)
from keras_qat.tracing.whole_graph import as_one_call


def trace_layers(graph: Graph, context: LoweringContext) -> Graph:
    """Trace every layer that no row lists.

    If one reads a tensor that another one kept in an attribute, all layers are traced as one.
    """
    traced = _trace_until_stable(graph, context)
    if READS_OTHERS not in traced.opaque.values() or graph.loss_only:
        return traced
    with contextlib.suppress(ValueError):
        together = _trace_until_stable(as_one_call(graph), context)
        if READS_OTHERS not in together.opaque.values():
            return together
    return _trace_until_stable(graph, context)


def _trace_until_stable(graph: Graph, context: LoweringContext) -> Graph:
    agreed = _Agreement(BorrowedWeights(graph))
    while True:
        context.clear()
        attempt = _Attempt(graph, context, agreed)
        traced = attempt.run()
        if not agreed.update(attempt, traced):
            return traced


@dataclasses.dataclass
class _Agreement:
    """What earlier attempts found out about the layers, for all calls of each."""

    borrowed: BorrowedWeights
    opaque: dict[Any, str] = dataclasses.field(default_factory=dict)
    """Layer that stays opaque -> the reason."""
    unrolled: set[Any] = dataclasses.field(default_factory=set)
    """Recurrent layers that are unrolled in every call."""
    apart: set[Any] = dataclasses.field(default_factory=set)
    """Layers whose calls compute different tensors of one weight, which stays a tensor."""

    def update(self, attempt: _Attempt, traced: Graph) -> bool:
        """Note where calls of a layer disagree, and return whether another attempt is needed."""
        layers_traced = attempt.inliner.counts.keys()
        opaque = {x: attempt.refused[x] for x in layers_traced & attempt.refused}
        opaque |= refused_cells(layers_traced, attempt.refused)
        partly = {call.layer for call in traced.calls if is_recurrent(call.layer)} & layers_traced
        opaque |= dict.fromkeys(partly & self.unrolled, "its calls differ")
        split = attempt.context.split_weights() - self.apart
        self.opaque |= opaque
        self.unrolled |= partly
        self.apart |= split
        has_borrowed = self.borrowed.changes != attempt.changes_before
        return bool(opaque or partly or split or has_borrowed) or self.borrowed.refuse(traced)


class _Attempt:
    """One attempt to trace all layers of a graph."""

    def __init__(self, read: Graph, context: LoweringContext, agreed: _Agreement) -> None:
        # Copies, because values know which call computes them, and masks change arguments.
        calls, losses = (list(map(dataclasses.replace, x)) for x in (read.calls, read.loss_only))
        self.graph = dataclasses.replace(read, calls=calls, loss_only=losses)
        self.context, self.agreed, self.masks = context, agreed, MaskTensors(context)
        self.changes_before = agreed.borrowed.changes
        self.owners = set(agreed.borrowed.owners.values())
        self.apart = agreed.apart | agreed.borrowed.find_sharing()
        self.inliner = Inliner(context, flatten_values(read.inputs)[0], agreed.borrowed.owners)
        self.opaque: dict[str, str] = {}
        """Name of a call that stays opaque -> the reason."""
        self.refused: dict[Any, str] = {}
        """Layer that stays opaque in one of its calls -> the reason."""
        self._readers, self._outputs = (
            self.graph.consumers(),
            set(flatten_values(self.graph.outputs)),
        )
        self._masked = {call.layer for call in calls if reads_mask(call)}

    def run(self) -> Graph:
        """Trace all layers."""
        calls = [
            new for call in set_shapes_in_order(self.graph.calls) for new in self._replace(call)
        ]
        losses = [*self.graph.loss_only, *self.inliner.losses]
        return self.masks.carried(
            dataclasses.replace(self.graph, calls=calls, opaque=self.opaque, loss_only=losses)
        )

    def _replace(self, call: Call, siblings: Sequence[Call] = ()) -> list[Call]:
        """Return the calls that replace a call, or the call itself.

        Args:
            call: the call.
            siblings: the other calls inside the layers around it, whose names are taken.
        """
        self.masks.note(call)
        if self.context.may_open(call) is False:
            return [call]
        replaced = (choice(self, call, siblings) for choice in CHOICES)
        parts = next((parts for parts in replaced if parts is not None), [])
        siblings = [*siblings, *parts]
        return [
            new for part in set_shapes_in_order(parts) for new in self._replace(part, siblings)
        ] or [call]

    def split_custom_activation(self, call: Call, _: Any) -> list[Call] | None:
        """Split a custom activation, a function or a layer, off a Keras layer."""
        if type(call.layer) is layers.Activation or not has_custom_activation(call.layer):
            return None
        parts, inner = split_activation(call, self.context), call.layer.activation
        if getattr(inner, "weights", ()):  # A copy of the layer would not be built.
            parts[-1] = dataclasses.replace(parts[-1], layer=inner)
        return self._with_masks_of(parts, call)

    def replace_batch_norm(self, call: Call, _: Any) -> list[Call] | None:
        """Replace another class of BatchNormalization by Keras' own."""
        return self._with_masks_of(replace_custom_batch_norm(call, self.context), call)

    def _with_masks_of(self, parts: list[Call], call: Call) -> list[Call] | None:
        """Let the masks of a call's outputs come from the calls that replace it, if any do."""
        if parts:
            self.masks.hand_over(flatten_values(call.outputs))
        return parts or None

    def expand_operation(self, call: Call, _: Any) -> list[Call] | None:
        """Expand an operation to simpler ones."""
        is_forced = self.context.may_open(call) is True
        return self._with_masks_of(expand_operation(call, self.context, is_forced), call)

    def split_attention(self, call: Call, _: Any) -> list[Call] | None:
        """Split a MultiHeadAttention that reads masks."""
        if type(call.layer) is not layers.MultiHeadAttention:
            return None
        return split_masked_attention(call, self.context, self.masks)

    def pass_mask(self, call: Call, _: Any) -> list[Call] | None:
        """Pass the mask of a sequence to a recurrent layer as an argument."""
        if (
            not is_recurrent(call.layer)
            or not self._reads_masks(call)
            or self._find_traceable(call)
        ):
            return None
        with contextlib.suppress(CannotTrace):
            return given_mask(call, self.masks)
        return []

    def split_masking(self, call: Call, _: Any) -> list[Call] | None:
        """Split a Masking of another value than 0, unless it can compute on float inputs."""
        if not finds_number(call):
            return None
        if not self.context.may_open(call) and reads_floats(call, self._readers, self._outputs):
            return None
        with contextlib.suppress(CannotTrace):
            return split_masking(call, self.context, self.masks)
        return []

    def trace(self, call: Call, siblings: Sequence[Call]) -> list[Call] | None:
        """Trace a layer, or the function that a Keras layer is expanded to."""
        layer, expansion = call.layer, self._find_traceable(call)
        is_traced = runs_custom_code(layer) or self._reads_masks(call) or layer in self.owners
        if not (expansion or is_traced):
            return None
        try:
            return self._inline(call, expansion, siblings)
        except OnlyTrains as error:
            parts, weights = PartsBuilder(call, self.context), error.model.weights
            return parts.end(
                parts.new("", TrainingOnly, error.model, weights=weights), call.inputs[0]
            )
        except CannotTrace as error:
            self._note_refusal(call, expansion, error)
            return []

    def _inline(self, call: Call, expansion: Call | None, siblings: Sequence[Call]) -> list[Call]:
        """Return the calls inside a layer.

        Raises:
            CannotTrace, OnlyTrains: if it cannot be traced.
        """
        layer, borrowed = call.layer, self.agreed.borrowed
        if layer in self.agreed.opaque:
            raise CannotTrace(self.agreed.opaque[layer])
        lenders = [*borrowed.lenders.get(layer, ()), *list_owners(layer)]
        lenders += borrowed.outside.get(layer, [])
        with in_few_operations(layer), trace_attention_dropout(layer):
            trace, read = self.masks.trace(call, expansion, lenders)
        traced = TracedCall(call, trace, read, keeps_weights=layer in self.apart)
        is_model = self._is_entire_model(call)
        symbol = normalizing(traced.graph, traced.of_weights)
        if symbol and not (is_model or self.context.may_open(call)):
            raise CannotTrace(f"it normalizes (tf.{symbol}), which takes more than 8 bits")
        prefix = "" if is_model else f"{call.name}/"
        taken = {other.name.removeprefix(prefix) for other in siblings}
        calls = self.inliner.inline(traced, prefix, taken)
        return [*self.masks.take_calls(), *calls]

    def _note_refusal(self, call: Call, expansion: Call | None, error: CannotTrace) -> None:
        layer = call.layer
        if isinstance(error, ReadsWeights) and self.agreed.borrowed.note(layer, error.variables):
            return  # The next attempt traces the layer with the owners of these weights.
        if self._is_entire_model(call):
            raise ValueError(
                f"The subclassed model '{call.name}' cannot be opened: {error}. Express "
                f"it in the functional style, keras.Model(inputs, outputs), or quantize "
                f"the functional models inside it one by one."
            ) from error
        is_of_keras = expansion is not None and type(layer) is not layers.RNN
        has_other_reason = is_of_keras or type(layer) in ATTENTION or layer in self._masked
        if not has_other_reason or isinstance(error, TooLarge):
            self.opaque[call.name] = self.refused[layer] = str(error)

    def _find_traceable(self, call: Call) -> Call | None:
        """Return the call of a function that computes the same as a Keras layer, or None."""
        is_unrolled = call.layer in self.agreed.unrolled
        return find_traceable(call, self.context.may_open(call) is True, is_unrolled)

    def _reads_masks(self, call: Call) -> bool:
        """Return whether any call of a layer reads a mask: all become the same."""
        self._masked.update([call.layer] if reads_mask(call) else ())
        return call.layer in self._masked

    def _is_entire_model(self, call: Call) -> bool:
        """Return whether a call is a subclassed model. Layers inside it keep their names."""
        return self.graph.calls == [call] and isinstance(call.layer, keras.Model)


CHOICES: tuple[Callable[[_Attempt, Call, Sequence[Call]], list[Call] | None], ...] = (
    _Attempt.split_custom_activation,
    _Attempt.replace_batch_norm,
    _Attempt.expand_operation,
    _Attempt.split_attention,
    _Attempt.pass_mask,
    _Attempt.split_masking,
    _Attempt.trace,
)
"""What may replace a call. The first that does not return None decides; [] keeps the call."""
