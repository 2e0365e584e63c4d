"""Whether a model can be exported, and what to do if not."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_qat.config import specs
from keras_qat.training.quantizers import activation_quantizers
from keras_qat.training.schedule import check_process, check_quantized

__all__ = ["check_exportable", "some"]


def check_exportable(model: Any) -> None:
    """Raises a `ValueError` if a model is not quantized, or a quantizer has no usable range."""
    check_quantized(
        model,
        ". Call keras_qat.quantize_model(model), train or calibrate what it returns, pass that.",
    )
    check_process(model)
    found = [
        each for each in activation_quantizers(model) if isinstance(each.spec, specs.QuantSpec)
    ]
    unusable = [each for each in found if not np.all(np.isfinite([each.minimum, each.maximum]))]
    broken = [each.name for each in unusable]
    given = [each for each in model.input_names if any(each in q.quantizes for q in unusable)]
    if given:
        raise ValueError(
            f"The data for {some(list(map(repr, given)))} held NaN or infinity in training, and so "
            f"do the ranges of {len(broken)} quantizers. Take such examples out, and train anew "
            f"from a checkpoint from before."
        )
    if broken:
        raise ValueError(
            f"{len(broken)} quantizers have a range with NaN or infinity: {some(broken)}. The "
            f"training diverged; go back to a checkpoint from before and lower the learning rate."
        )
    broken = [weight.name for weight in model.weights if not _is_finite(weight)]
    if broken:
        raise ValueError(
            f"{len(broken)} weights hold NaN or infinity: {some(broken)}. The training diverged; "
            f"go back to a checkpoint from before and lower the learning rate."
        )
    blind = [each.name for each in found if not each.calibrated]
    if blind:
        raise ValueError(
            f"{len(blind)} quantizers have seen no data yet: {some(blind)}. Train the model "
            f"(fit, or calls with training=True) so that ranges are observed, or take them from "
            f"examples with keras_qat.calibrate(model, data); then export."
        )


def _is_finite(weight: Any) -> bool:
    """Whether a weight holds numbers. Its sum does, unless there are very large ones in it."""
    if not weight.dtype.is_floating:
        return True
    values = np.asarray(weight.value())  # Not copied.
    with np.errstate(all="ignore"):
        return bool(np.isfinite(np.sum(values)) or np.all(np.isfinite(values)))


def some(names: list[str]) -> str:
    """The first of some names, for a message."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
