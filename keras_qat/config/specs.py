"""How one tensor is quantized: the three kinds of specification, as plain data.

The kinds and their names are those of PyTorch's pt2e: a tensor has a range of its own
(`QuantSpec`), that of another tensor (`SharedSpec`), or one that the runtime fixes (`FixedSpec`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args

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
    """A tensor with a range of its own.

    Args:
        bits: 2 to 8; also 16, for activations with a symmetric, not narrow range.
        symmetric: whether zero lies in the middle of the range.
        narrow_range: whether the lowest code is left out, so that there are 2^bits - 1 of them.
            The runtimes want it for weights.
        per_channel: one range for each output channel instead of one for the tensor.
        observer: what the range is made of. `moving_average` of the batches' extremes, corrected
            for its start at zero; `shadowed_moving_average`, the same with TensorFlow 1's shadow
            variables; `last_value`, the extremes of the last training batch;
            `current_value`, those of the tensor at hand, with nothing stored (for weights);
            `learned`, what training makes of it, by the errors of rounding and clipping (LSQ);
            `learned_clipping`, the same by those of clipping alone (PACT).
        ema_decay: decay per step of the moving averages.
        lower_bound: what the tensor cannot fall below (0 behind a ReLU), if known. The minimum
            is then not observed.
        delayed: whether quantization waits for the layer's `quantize_from` step.
        initial_range: range before any data. By default a quantizer that has seen no data
            passes values through.
        preserve: of weights, what training keeps: "zeros", or "clusters" of equal values.
        off_ties: whether a range with numbers below zero is wider by one step than what was
            observed. Pixels as `x / 127.5 - 1` are odd multiples of a half in the 255 steps of
            their own range, and so halfway between two codes, all of them; in 254 steps none is,
            and every way of rounding gives the same codes.

    Raises:
        ValueError: on other bits, an unknown observer, or a decay outside 0 to 1.
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

    def __post_init__(self) -> None:
        if self.bits == 16 and not self.symmetric:
            raise ValueError(
                "bits=16: activations have from 2 to 8 bits, or 16 with a symmetric range, as in "
                "recipes.int16x8()."
            )
        check_bits(self.bits, wide=not (self.narrow_range or self.per_channel))
        if self.observer not in get_args(Observer):
            names = ", ".join(repr(name) for name in get_args(Observer))
            raise ValueError(f"observer={self.observer!r}: use one of {names}.")
        if self.preserve is not None and self.preserve not in get_args(Preserve):
            raise ValueError(f"preserve={self.preserve!r}: use 'zeros' or 'clusters'.")
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay={self.ema_decay}: it has to be at least 0 and below 1.")
        if self.initial_range is not None:
            check_range(*self.initial_range)

    def __str__(self) -> str:
        symmetry = "symmetric" if self.symmetric else "asymmetric"
        return f"{self.bits}-bit {symmetry} per {'channel' if self.per_channel else 'tensor'}"


@dataclasses.dataclass(frozen=True)
class FixedSpec:
    """A range that the runtime fixes, e.g. 0 to 255/256 for a softmax.

    Args:
        minimum: real value of the lowest code.
        maximum: real value of the highest code.
        bits: 2 to 8, or 16.

    Raises:
        ValueError: on other bits or an empty range.
    """

    minimum: float
    maximum: float
    bits: int = 8

    def __post_init__(self) -> None:
        check_bits(self.bits, wide=True)
        check_range(self.minimum, self.maximum)

    def __str__(self) -> str:
        return f"{self.bits}-bit fixed {self.minimum:g} to {self.maximum:g}"


@dataclasses.dataclass(frozen=True)
class SharedSpec:
    """The same range as another tensor, named by `source`.

    Args:
        source: name of the tensor whose range it is.
        rounds: whether the layer computes values between the codes (average pooling), so that
            they are rounded again, or only moves values (max pooling, reshaping).
    """

    source: str
    rounds: bool = False

    def __str__(self) -> str:
        return f"range of {self.source}"


Spec = QuantSpec | FixedSpec | SharedSpec


def check_bits(bits: int, wide: bool = False) -> None:
    """Raises a `ValueError` if `bits` is not one of 2 to 8, or 16 if it may be `wide`."""
    if wide and bits == 16 and isinstance(bits, int):
        return
    if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 8:
        raise ValueError(f"bits={bits!r}: quantization takes a whole number of bits from 2 to 8.")


def check_range(minimum: float, maximum: float) -> None:
    """Raises a `ValueError` if there is nothing between two numbers, or one is infinite or none."""
    if not minimum < maximum:
        raise ValueError(f"The range {minimum} to {maximum} is empty.")
    if not (math.isfinite(minimum) and math.isfinite(maximum)):
        raise ValueError(f"The range {minimum} to {maximum} has no end.")


def to_config(spec: QuantSpec | FixedSpec | None) -> dict[str, Any] | None:
    """`spec` as JSON data."""
    return None if spec is None else {"kind": type(spec).__name__, **dataclasses.asdict(spec)}


def from_config(config: Any) -> Any:
    """The inverse of `to_config`. A specification or None is returned as it is.

    Raises:
        ValueError: if it is no configuration that `to_config` made.
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
            f"{config!r} is no specification of quantization: the model's file is damaged, or a "
            f"later version of keras_qat wrote it."
        ) from error
