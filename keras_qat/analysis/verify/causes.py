"""Which layer of a poor model is the weakest, and why."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from keras_qat.analysis.verify.report import TensorReport

IDEAL = 50.0
"""Signal to noise, in dB, of a tensor of 8 bits that is quantized well."""

CLIPPED = 0.02
"""Share of a tensor's values beyond its range that is more than outliers."""

COARSE = 4.0
"""Steps of a tensor's range that its values have to differ by; with 4 it has 23 dB."""

SMALL_PART = 1 / 8
"""Part of a range that is too small for a tensor's values."""


def weakest(tensors: Iterable[TensorReport], all_vary: bool) -> TensorReport | None:
    """Returns the tensor that loses most of the signal that its inputs have.

    Args:
        tensors: the tensors, in order.
        all_vary: whether all outputs vary with the examples. What is the same for all of them is
            then no fault, as positions that are added.
    """
    sqnr_of: dict[str, float | None] = {}
    losses: list[tuple[float, TensorReport]] = []
    for tensor in tensors:
        before = [sqnr_of[name] for name in tensor.reads if name in sqnr_of]
        if tensor.sqnr is None and all_vary:
            continue
        sqnr_of[tensor.name] = tensor.sqnr
        if None not in before:
            best = min([IDEAL, *filter(None, before)])
            losses.append((np.inf if tensor.sqnr is None else best - tensor.sqnr, tensor))
    return max(losses, key=lambda loss: loss[0], default=(0.0, None))[1]


def cause_in(tensor: TensorReport) -> str:
    """Says why a tensor loses so much of its signal, and what helps."""
    (low, high), (lowest, highest) = tensor.range, tensor.float_range
    ends, values = f"{low:.4g} to {high:.4g}", f"{lowest:.4g} to {highest:.4g}"
    if tensor.sqnr is None:
        return "it is the same for all examples, also in float. Check its weights and the data."
    width = high - low
    is_far = lowest < low - width or highest > high + width
    if tensor.clipped > CLIPPED or (tensor.clipped > 0 and is_far):
        advice = (
            "Calibrate on data like this, after the last change of the weights."
            if tensor.reads
            else "Scale the inputs as in training, or calibrate on data like this."
        )
        share = f"{tensor.clipped:.0%}" if tensor.clipped >= 0.01 else "less than 1%"
        return (
            f"{share} of its values are outside its range of {ends}; the float values are "
            f"{values}. {advice}"
        )
    step = (high - low) / (2**tensor.bits - 1)
    if tensor.spread > COARSE * step:
        return ""
    if tensor.bits < 8:
        return f"it has only {tensor.bits} bits. Train the quantized model, or use more bits."
    if highest - lowest < SMALL_PART * (high - low):
        advice = "Calibrate on data without outliers, scaled as in training"
        shared = ", or scale down the larger tensors that share its range" * bool(tensor.reads)
        return f"its range is {ends}, but its values are only {values}. {advice}{shared}."
    return (
        f"the steps of its range of {ends}, {step:.3g}, are too coarse for values that vary by "
        f"{tensor.spread:.3g}. Remove outliers and placeholders for missing values from the data, "
        f"or use 16 bits."
    )
