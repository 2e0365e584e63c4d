"""Names for the calls inside an opened layer."""

from __future__ import annotations

from typing import Any

from keras_qat.frontend.graph import Call
from keras_qat.frontend.keras2.layer_names import names_of_calls
from keras_qat.frontend.tf_operations import is_operation


class InnerNames:
    """Gives unique names to the calls inside a layer.

    Args:
        call: the call of the layer.
        prefix: what names begin with.
        named: name -> what it names, in all calls of the layer.
        taken: names that others have already, without the prefix.
    """

    def __init__(self, call: Call, prefix: str, named: dict[str, Any], taken: set[str]) -> None:
        self.call, self.prefix, self.taken, self.named = call, prefix, taken, named
        self.inside = names_of_calls(call.layer)
        self.of_layer: dict[Any, str] = {}
        self.gave_output = False

    def name(self, inner: Call, gives_output: bool) -> str:
        """Returns the name of an inner call, which is the layer's own if it gives its output."""
        layer = inner.layer
        if is_operation(layer):
            symbol = str(layer.symbol)
            is_first = gives_output and not self.gave_output
            if is_first and self.named.setdefault("", symbol) == symbol:
                self.gave_output = True
                return self.call.name
            return self.unique(symbol.rsplit(".", 1)[-1], symbol)
        if layer not in self.of_layer:
            base = self.inside.get(id(layer), inner.name)
            self.of_layer[layer] = self.unique(base, id(layer))
        return self.of_layer[layer]

    def unique(self, base: str, named: Any) -> str:
        """Returns a name that is new in this call, and names the same in the layer's other calls.

        Args:
            base: how it should begin.
            named: the symbol of an operation, or what tells a layer or a weight from others.
        """
        name, count = base, 1
        while name in self.taken or self.named.setdefault(name, named) != named:
            name, count = f"{base}_{count}", count + 1
        self.taken.add(name)
        return self.prefix + name
