"""Random calls of each built-in operator, for its tests: name of the operator -> example."""

from collections.abc import Callable

import numpy as np

from tests.ops.examples import elementwise, movement, products, weighted
from tests.ops.examples.example import Example

__all__ = ["EXAMPLES", "Example"]

EXAMPLES: dict[str, Callable[[np.random.Generator], Example]] = {
    **weighted.EXAMPLES,
    **elementwise.EXAMPLES,
    **products.EXAMPLES,
    **movement.EXAMPLES,
}
