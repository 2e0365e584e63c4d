"""The families of kernels: whose rounding an integer computation has."""

from __future__ import annotations

from typing import Literal, get_args

__all__ = ["FAMILIES", "Family", "check_family"]

Family = Literal["xnnpack", "reference", "tflm"]
"""`xnnpack`: the kernels of phones and desktops, which multiply in float32 and round once, half to
even; where XNNPACK takes no such operator, TFLite's optimized kernel. `reference`: TFLite's
portable kernels: 31-bit multipliers, rounded twice. `tflm`: those of TFLite Micro, which began as
the portable ones and differ in some."""

FAMILIES: tuple[Family, ...] = get_args(Family)


def check_family(kernels: str) -> Family:
    """The family of that name.

    Raises:
        ValueError: if there is none.
    """
    for family in FAMILIES:
        if kernels == family:
            return family
    raise ValueError(f"kernels={kernels!r}: use one of {', '.join(map(repr, FAMILIES))}.")
