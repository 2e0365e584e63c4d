"""Random numbers that Python code draws while a layer is traced, as layers dropped by hand."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_qat.frontend.keras2.backend import swapped


@contextlib.contextmanager
def largest_draws() -> Iterator[None]:
    """Runs a block in which `random` and `numpy.random` draw the largest of their numbers.

    A graph has what was drawn as it was traced, for good. With the largest, `LayerDrop` leaves
    nothing out: `if training and np.random.uniform(0, 1) < self.layerdrop: continue`.
    """

    def uniform(low: float = 0.0, high: float = 1.0, size: Any = None) -> Any:
        return high if size is None else drawn(low, high, size)

    def unit(*sizes: Any, **options: Any) -> Any:
        return drawn(size=sizes or options.get("size")) if sizes or options else 1.0

    drawn = np.random.uniform
    numpy_names = "random", "rand", "random_sample"
    with (
        swapped(random, uniform=uniform, random=unit),
        swapped(np.random, uniform=uniform, **dict.fromkeys(numpy_names, unit)),
    ):
        yield
