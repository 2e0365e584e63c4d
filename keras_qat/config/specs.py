"""Specifications of how a tensor is quantized, as plain data.

There are three kinds, as in PyTorch's pt2e. A tensor has its own range (`QuantSpec`), another
tensor's range (`SharedSpec`), or a range that the runtime's kernels require (`FixedSpec`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args

from keras_qat.io.counts import as_integer

__all__ = ["FixedSpec", "QuantSpec", "SharedSpec", "Spec"]

Observer = Literal[
    "moving_average",
    "shadowed_moving_average",
    "last_value",
    "current_value",
    "learned",
    "learned_clipping",
]

Preserve = Literal["zeros", "clusters"]


@dataclasses.dataclass(frozen=True)
class QuantSpec:
    """Specification of a tensor with its own range.

    Args:
        bits: 2 to 8. Or 16 for activations, if `symmetric` is True and `narrow_range` is False.
        symmetric: whether the range is symmetric around zero.
        narrow_range: whether the lowest quantized value is unused. TFLite expects this for weights.
        per_channel: whether each output channel has a range. Otherwise, the tensor has one range.
        observer: how the range is found. `moving_average` averages the extremes (minimum and
            maximum) of batches. Early averages cover only about the last tenth of all batches so
            far. `shadowed_moving_average` uses the same operations and variables as TensorFlow 1,
            to continue from checkpoints. `last_value` uses the extremes of the last training batch.
            `current_value` uses the extremes of the current weights. `learned` trains the range by
            LSQ, whose gradients include rounding errors. `learned_clipping` trains it by PACT,
            without rounding errors.
        ema_decay: decay per step of the moving averages.
        lower_bound: a known lower bound of the tensor, e.g. 0 after a ReLU. It replaces the
            observed minimum.
        delayed: whether the tensor stays float until the step set by `callbacks.QuantDelay`.
        initial_range: range before the first batch. By default, the tensor stays float until a
            batch was observed.
        preserve: property of weights that training preserves: "zeros", or "clusters" of equal
            values.
        off_ties: whether to widen the observed range by 1/1019, or by up to 1 % in `calibrate`.
            Kernels differ in how they round values halfway between two quantized values. Without
            widening, all pixels scaled by `x / 127.5 - 1` are such values.
        power_of_two: whether scales are powers of two, for chips that rescale with shifts. Scales
            are rounded up to avoid clipping.

    Raises:
        ValueError: on other bits, an unknown observer, or a decay outside 0 to 1. `power_of_two`
            requires a range that is symmetric, per tensor and not learned.
    """

    bits: int = 8
    symmetric: bool = False
    narrow_range: bool = False
    per_channel: bool = False
    observer: Observer = "moving_average"
    ema_decay: float = 0.999
    lower_bound: float | None = None
    delayed: bool = True
    initial_range: tuple[float, float] | None = None
    preserve: Preserve | None = None
    off_ties: bool = False
    power_of_two: bool = False

    def __post_init__(self) -> None:
        if self.bits == 16 and not self.symmetric:
            raise ValueError(
                "bits=16 needs a symmetric range, as in recipes.int16x8(). Other ranges have from "
                "2 to 8 bits."
            )
        is_wide = not (self.narrow_range or self.per_channel)
        object.__setattr__(self, "bits", check_bits(self.bits, wide=is_wide))
        if self.observer not in get_args(Observer):
            names = ", ".join(repr(name) for name in get_args(Observer))
            raise ValueError(f"observer={self.observer!r}: use one of {names}.")
        if self.preserve is not None and self.preserve not in get_args(Preserve):
            raise ValueError(f"preserve={self.preserve!r}: use 'zeros' or 'clusters'.")
        is_learned = self.observer.startswith("learned")
        if self.power_of_two and (not self.symmetric or self.per_channel or is_learned):
            raise ValueError(
                "power_of_two=True needs one symmetric range per tensor. The observer must not "
                "learn the range. recipes.power_of_two() has such specs."
            )
        if not 0 <= self.ema_decay < 1:
            raise ValueError(
                f"ema_decay={self.ema_decay}: pass a number of at least 0 and below 1."
            )
        if self.initial_range is not None:
            check_range(*self.initial_range)

    def __str__(self) -> str:
        symmetry = "symmetric" if self.symmetric else "asymmetric"
        return f"{self.bits}-bit {symmetry} per {'channel' if self.per_channel else 'tensor'}"


@dataclasses.dataclass(frozen=True)
class FixedSpec:
    """Specification of a range that kernels require, e.g. 0 to 255/256 for a softmax in TFLite.

    Args:
        minimum: float value of the lowest quantized value.
        maximum: float value of the highest quantized value.
        bits: 2 to 8, or 16.

    Raises:
        ValueError: on other bits or an empty range.
    """

    minimum: float
    maximum: float
    bits: int = 8

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", check_bits(self.bits, wide=True))
        check_range(self.minimum, self.maximum)

    def __str__(self) -> str:
        return f"{self.bits}-bit fixed {self.minimum:g} to {self.maximum:g}"


@dataclasses.dataclass(frozen=True)
class SharedSpec:
    """Specification of a tensor that has the range of another tensor.

    Args:
        source: name of the tensor with the range.
        rounds: True if the operator rounds its results, like average pooling. False if it only
            copies values, like max pooling or a reshape.
    """

    source: str
    rounds: bool = False

    def __str__(self) -> str:
        return f"range of {self.source}"


Spec = QuantSpec | FixedSpec | SharedSpec


def check_bits(bits: Any, wide: bool = False) -> int:
    """Returns `bits` as an `int`. Raises a `ValueError` unless it is 2 to 8, or 16 if `wide`."""
    number = as_integer(bits)
    if number is None or not (2 <= number <= 8 or (wide and number == 16)):
        raise ValueError(f"bits={bits!r}: quantization needs an integer from 2 to 8.")
    return number


def check_range(minimum: float, maximum: float) -> None:
    if not minimum < maximum:
        raise ValueError(f"The range {minimum} to {maximum} is empty.")
    if not (math.isfinite(minimum) and math.isfinite(maximum)):
        raise ValueError(f"The range {minimum} to {maximum} is not finite.")


def to_config(spec: QuantSpec | FixedSpec | None) -> dict[str, Any] | None:
    return None if spec is None else {"kind": type(spec).__name__, **dataclasses.asdict(spec)}


def from_config(config: Any) -> Any:
    """Creates a specification from the result of `to_config`. Returns specifications unchanged.

    Raises:
        ValueError: if the data is not from `to_config`.
    """
    if config is None or isinstance(config, (QuantSpec, FixedSpec)):
        return config
    try:
        fields = {**config}
        kind = {"QuantSpec": QuantSpec, "FixedSpec": FixedSpec}[fields.pop("kind")]
        if fields.get("initial_range") is not None:
            fields["initial_range"] = tuple(fields["initial_range"])
        return kind(**fields)
    except (TypeError, LookupError) as error:
        raise ValueError(
            f"{config!r} is not a quantization spec. The model's file is damaged, or a later "
            f"version of keras_qat wrote it."
        ) from error
