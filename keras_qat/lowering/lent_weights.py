"""Layers that read the weights of others: tied embeddings, kernels that a layer masks.

The lender is opened, too, so that both read one tensor of weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Graph
from keras_qat.keras2.layers_and_models import layers_directly_in, layers_in
from keras_qat.tracing.layer_weights import weights_held_by


class LentWeights:
    """Which layers of a graph read whose weights, as far as opening them has shown."""

    def __init__(self, graph: Graph) -> None:
        self.of: dict[Any, list[Any]] = {}
        """Layer -> the layers that lend it weights."""
        self.shared: dict[int, Any] = {}
        """Id of a variable -> the layer that lends it, where that is called by others too."""
        self.outside: dict[Any, list[Any]] = {}
        """Layer -> the variables that it reads and no layer holds. They do not train in Keras."""
        self.changes = 0
        """How often these changed."""
        self._refused: set[Any] = set()
        self._top = list(dict.fromkeys(call.layer for call in graph.calls))
        self._parents: dict[Any, set[Any]] = {}
        for layer in {inner for top in self._top for inner in layers_in(top)}:
            for inner in layers_directly_in(layer):
                self._parents.setdefault(inner, set()).add(layer)

    def note(self, layer: Any, variables: Sequence[Any]) -> bool:
        """Notes that a layer reads variables of others, and returns whether it can be opened."""
        known = self.of.get(layer, [])
        owner_of = {id(v): next(self._owners(v), None) for v in variables}
        if outside := [v for v in variables if owner_of[id(v)] is None]:
            noted = self.outside.setdefault(layer, [])
            if any(variable is other for variable in outside for other in noted):
                return False
            noted.extend(outside)
            self.changes += 1
            return True
        owners = set(owner_of.values()) - {layer}
        if not owners or owners & {*known, *self._refused}:
            return False
        self.of[layer] = [*known, *owners]
        self.changes += 1
        for owner in owners:
            if self._parents.get(owner, set()) != {layer} or owner in self._top:
                own = tf.nest.flatten([list(held.values()) for _, held in weights_held_by(owner)])
                self.shared.update({id(leaf): owner for leaf in own})
        return True

    def _owners(self, variable: Any) -> Iterator[Any]:
        for layer in [*self._top, *self._parents]:
            leaves = tf.nest.flatten([list(own.values()) for _, own in weights_held_by(layer)])
            if any(leaf is variable for leaf in leaves):
                yield layer

    def apart(self) -> set[Any]:
        """Returns the layers that share weights, of which nothing is computed once for all."""
        owners = set(self.shared.values())
        return owners | {layer for layer, lenders in self.of.items() if owners & set(lenders)}

    def refuse(self, graph: Graph) -> bool:
        """Notes the layers that stayed whole in a graph, and so can't lend weights.

        Returns:
            Whether there are any.
        """
        whole = {id(weight) for call in graph.calls for weight in call.layer.weights}
        refused = {owner for variable, owner in self.shared.items() if variable in whole}
        if refused:
            self._refused |= refused
            self.of.clear()
            self.shared.clear()
        return bool(refused)
