"""Quantization parameters of a resolved graph: one object for each range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.config import specs

NEXT_TO_NOTHING = 1e-6
"""Upper end of a range that holds zeros only: too small to widen a range it is joined with."""


class Ranges:
    """Finds quantization parameters; what shares a range gets the same object.

    Args:
        in_graph: whether parameters are tensors, read whenever the graph runs.
    """

    def __init__(self, in_graph: bool) -> None:
        self.in_graph = in_graph
        self.params: dict[Any, QuantParams] = {}
        """Quantizer, or another key of `fixed` -> its parameters."""

    def of(self, quantizer: Any) -> QuantParams:
        """Returns the parameters of a quantizer's present range."""
        if quantizer not in self.params:
            spec = quantizer.spec
            if self.in_graph and isinstance(spec, specs.QuantSpec):
                low, high = quantizer.observe(None, training=False)
            else:
                low, high = quantizer.current_range()
            if not self.in_graph and low == high:  # A ReLU of contrib that never was above 0.
                high = NEXT_TO_NOTHING
            self.params[quantizer] = QuantParams.from_range(low, high, spec.bits)
        return self.params[quantizer]

    def quantizer_of(self, params: QuantParams) -> Any:
        """Returns the quantizer that has these parameters, or None."""
        keys = (key for key, known in self.params.items() if known is params)
        return next((key for key in keys if hasattr(key, "observe")), None)

    def fixed(self, key: Any, make: Callable[[], QuantParams]) -> QuantParams:
        """Returns parameters that no quantizer holds, made once per `key`."""
        if key not in self.params:
            self.params[key] = make()
        return self.params[key]

    def joined(self, parts: list[QuantParams]) -> QuantParams:
        """Returns parameters for joined tensors: the ones they share, or of their common range."""
        if all(self.same(params, parts[0]) for params in parts):
            return parts[0]
        low = tf.reduce_min([part.scale * (part.lowest - part.zero_point) for part in parts])
        high = tf.reduce_max([part.scale * (part.highest - part.zero_point) for part in parts])
        if not self.in_graph:
            low, high = float(low), float(high)
        bits = max(8, *(part.bits for part in parts))
        return self.fixed(
            ("joined", *map(id, parts)), lambda: QuantParams.from_range(low, high, bits)
        )

    def same(self, one: QuantParams, other: QuantParams) -> bool:
        """Whether two parameters are known to be equal; tensors are if they are the same object."""
        return one is other or (not self.in_graph and one == other)
