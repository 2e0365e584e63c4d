"""Layers that read weights of other layers, such as tied embeddings and masked kernels.

The owner of such a weight is traced as well, so that both read one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Graph
from keras_qat.keras2.layers_and_models import list_layers, list_sublayers
from keras_qat.tracing.layer_weights import find_weight_holders


class BorrowedWeights:
    """Which layers of a graph read whose weights, as far as tracing has shown."""

    def __init__(self, graph: Graph) -> None:
        self.lenders: dict[Any, list[Any]] = {}
        """Layer -> the layers whose weights it reads."""
        self.owners: dict[int, Any] = {}
        """Id of a variable -> the layer that owns it, if others call that layer too."""
        self.outside: dict[Any, list[Any]] = {}
        """Layer -> the variables that it reads and no layer holds. They do not train in Keras."""
        self.changes = 0
        """How often these changed."""
        self._refused: set[Any] = set()
        self._top = list(dict.fromkeys(call.layer for call in graph.calls))
        self._parents: dict[Any, set[Any]] = {}
        for layer in {inner for top in self._top for inner in list_layers(top)}:
            for inner in list_sublayers(layer):
                self._parents.setdefault(inner, set()).add(layer)

    def note(self, layer: Any, variables: Sequence[Any]) -> bool:
        """Note that a layer reads variables of others, and return whether it can be traced."""
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
                self.owners.update(dict.fromkeys(map(id, _weights_of(owner)), owner))
        return True

    def _find_owner(self, variable: Any) -> Any:
        for layer in [*self._top, *self._parents]:
            if any(leaf is variable for leaf in _weights_of(layer)):
                return layer
        return None

    def find_sharing(self) -> set[Any]:
        """Return the layers that share weights, from which nothing is computed in advance."""
        owners = set(self.owners.values())
        return owners | {layer for layer, lenders in self.lenders.items() if owners & set(lenders)}

    def refuse(self, graph: Graph) -> bool:
        """Note which owners stayed opaque in a graph, so that others cannot read their weights.

        Returns:
            Whether there are any.
        """
        opaque = {id(weight) for call in graph.calls for weight in call.layer.weights}
        refused = {owner for variable, owner in self.owners.items() if variable in opaque}
        if refused:
            self._refused |= refused
            self.lenders.clear()
            self.owners.clear()
        return bool(refused)


def _weights_of(layer: Any) -> list[Any]:
    return tf.nest.flatten([list(held.values()) for _, held in find_weight_holders(layer)])
