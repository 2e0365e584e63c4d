"""Problems: operators of a model that a target does not run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from keras_qat.config.targets.target import Target


@dataclasses.dataclass(frozen=True)
class Problem:
    """An operator of a file that a target does not run.

    Args:
        tensor: the operator's output: the name of its layer, and the file's name for a part of it.
        operator: TFLite's name of the operator.
        reason: the reason, in a few words: "no kernel for int16", "strides up to 3 only, not 4".
        change: a change that helps, in a few words; "" if none is known.
        elsewhere: what computes the operator instead; None if the file does not run.
        index: index of the operator in the file, or of the loop that it is in.
    """

    tensor: str
    operator: str
    reason: str
    change: str = ""
    elsewhere: str | None = None
    index: int = 0

    def __str__(self) -> str:
        text = f"{self.tensor}: {self.operator}: {self.reason}"
        return f"{text}; {self.change}" if self.change else text


def described(target: Target, problems: Sequence[Problem]) -> list[str]:
    """Returns lines that list the problems of a model on a target."""
    if not problems:
        return [f"target {target.name}: {target.title} runs all of it"]
    effect = (
        f"left to {target.elsewhere}"
        if target.elsewhere
        else "lacking or not exact: files with them do not give what the model gives"
    )
    head = f"target {target.name}: operators {effect}"
    return [head, *(f"  {problem}" for problem in problems)]
