"""The quantization parameters of a resolved graph: one object for each range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.config import specs

NEXT_TO_NOTHING = 1e-6
"""Where a range of zeros alone ends, so that it widens none that it is joined with."""


class Ranges:
    """Finds quantization parameters; what shares a range gets the same object.

    Args:
        in_graph: whether they are tensors, read from the quantizers whenever a graph runs.
    """

    def __init__(self, in_graph: bool) -> None:
        self.in_graph = in_graph
        self.params: dict[Any, QuantParams] = {}
        """Quantizer, or what else says it -> the parameters."""

    def of(self, quantizer: Any) -> QuantParams:
        """Those of a quantizer's present range."""
        if quantizer not in self.params:
            spec = quantizer.spec
            if self.in_graph and isinstance(spec, specs.QuantSpec):
                low, high = quantizer.observe(None, training=False)
            else:
                low, high = quantizer.current_range()
            if not self.in_graph and low == high:  # Of a ReLU of contrib that is always 0.
                high = NEXT_TO_NOTHING
            self.params[quantizer] = QuantParams.of_range(low, high, spec.bits)
        return self.params[quantizer]

    def quantizer_of(self, params: QuantParams) -> Any:
        """What quantizes to these parameters, None if no quantizer does."""
        found = (each for each, known in self.params.items() if known is params)
        return next((each for each in found if hasattr(each, "observe")), None)

    def fixed(self, key: Any, make: Callable[[], QuantParams]) -> QuantParams:
        """Those that something else than a quantizer says, which `key` stands for."""
        if key not in self.params:
            self.params[key] = make()
        return self.params[key]

    def joined(self, given: list[QuantParams]) -> QuantParams:
        """Parameters for tensors that are joined: theirs, or those of the range of all."""
        if all(self.same(each, given[0]) for each in given):
            return given[0]
        low = tf.reduce_min([each.scale * (each.lowest - each.zero_point) for each in given])
        high = tf.reduce_max([each.scale * (each.highest - each.zero_point) for each in given])
        if not self.in_graph:
            low, high = float(low), float(high)
        bits = max(8, *(each.bits for each in given))
        return self.fixed(
            ("joined", *map(id, given)), lambda: QuantParams.of_range(low, high, bits)
        )

    def same(self, one: QuantParams, other: QuantParams) -> bool:
        """Whether two are known to be equal."""
        return one is other or (not self.in_graph and one == other)
