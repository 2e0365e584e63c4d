"""Faults: cases that a target's kernels refuse or compute wrongly."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keras_qat.tflite.builder import Builder
    from keras_qat.tflite.reader import Site

Form = Callable[["Builder", "Site"], None]
"""Adds operators to a file that compute what an operator computes, and avoid a fault."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """A case that a target's kernel refuses or computes wrongly.

    Args:
        operators: TFLite's names of the operators, with spaces between.
        applies: whether one of these operators is such a case.
        reason: what happens, in a few words.
        form: how files for the target say the same in other operators; None if they do not.
        change: what helps where there is no other form, in a few words.
        knows_open_sizes: whether `applies` is also defined for tensors with open sizes, -1.
    """

    operators: str
    applies: Callable[[Site], bool]
    reason: str
    form: Form | None = None
    change: str = ""
    knows_open_sizes: bool = False

    def meets(self, site: Site) -> bool:
        """Returns whether an operator of a file is such a case; False also if sizes are open."""
        if site.operation.kernel not in self.operators.split():
            return False
        has_open_sizes = any(-1 in tensor.shape for tensor in site.tensors)
        return (self.knows_open_sizes or not has_open_sizes) and self.applies(site)
