"""What of a model a target does not run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from keras_qat.config.targets.target import Target

__all__ = ["Problem", "described"]


@dataclasses.dataclass(frozen=True)
class Problem:
    """An operator of a file that a target does not run.

    Args:
        tensor: what it computes: the layer, and what the file calls a part of it.
        operator: TFLite's name of it.
        reason: why, in a few words.
        change: what helps, in a few words; "" where nothing is known.
        elsewhere: what computes it instead, None: nothing, and the file does not run.
        index: which operator of the file it is, counted from 0; inside of a loop that of the loop.
    """

    tensor: str
    operator: str
    reason: str
    change: str = ""
    elsewhere: str | None = None
    index: int = 0

    def __str__(self) -> str:
        text = f"{self.tensor}: {self.operator}, {self.reason}"
        return f"{text}; {self.change}" if self.change else text


def described(target: Target, found: Sequence[Problem]) -> list[str]:
    """What to say of a model's problems, line by line."""
    if not found:
        return [f"target {target.name}: {target.title} runs all of it"]
    what = f"left to {target.elsewhere}" if target.elsewhere else "lacking: no file with them runs"
    head = f"target {target.name}: operators {what}"
    return [head, *(f"  {each}" for each in found)]
