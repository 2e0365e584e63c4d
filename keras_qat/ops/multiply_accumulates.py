"""Counts the multiply-accumulates of calls, given only the shapes of tensors and weights."""

from __future__ import annotations

import math
from collections.abc import Iterable

from keras_qat.graph.calls import Call, multiply_sizes
from keras_qat.graph.operations import is_operation
from keras_qat.ops.registry import find_row, find_rows, match


def count_products(call: Call) -> int | None:
    """Returns a call's multiply-accumulates for one example. Returns None if sizes are unknown.

    For a layer without an `Op`, the function assumes that all weights are multiplied once at each
    position of the output, as in a Dense layer.
    """
    layer = call.layer
    if row := match(call).op or next(iter(find_rows(call)), None) or find_row(layer):
        return row.products(call)
    shapes = [] if is_operation(layer) else [weight.shape for weight in layer.weights]
    sizes = sum(math.prod(shape) for shape in shapes if len(shape) > 1)
    return multiply_sizes((sizes, *call.output.shape[1:-1])) if sizes else 0


def integer_share(counts: Iterable[tuple[bool, int | None]]) -> float | None:
    """Returns the share of multiply-accumulates in integers, 0 to 1.

    Returns None if a count is unknown, or if there are no multiply-accumulates.

    Args:
        counts: a pair (computes in integers, multiply-accumulates) for each call.
    """
    totals = {True: 0, False: 0}
    for is_integer, count in counts:
        if count is None:
            return None
        totals[is_integer] += count
    total = sum(totals.values())
    return totals[True] / total if total else None


def describe_share(counts: Iterable[tuple[bool, int | None]], bits: int) -> str:
    """Describes an `integer_share`, as in "; 97 % of the arithmetic in int8", or returns "".

    If float calls have no count, such as Fourier transforms, it is "of the counted arithmetic". The
    percentage is rounded down, so only 1 becomes 100 %. Fewer than 8 `bits` are int8, as in files.
    """
    counts = list(counts)
    if (share := integer_share(counts)) is None:
        return ""
    counted = "" if all(count for is_integer, count in counts if not is_integer) else "counted "
    return f"; {math.floor(1000 * share) / 10:g} % of the {counted}arithmetic in int{max(bits, 8)}"
