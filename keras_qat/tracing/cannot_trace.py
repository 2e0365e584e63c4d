"""Why a layer cannot be opened, raised while its code is traced."""

from __future__ import annotations

from typing import Any

READS_OTHERS = "it reads a tensor that is none of its arguments"
"""Why a layer cannot be opened by itself that reads what an earlier call kept in an attribute."""


class CannotTrace(Exception):
    """Tells in a few words why a layer cannot be opened."""


class TooLarge(CannotTrace):
    """Raised for an operation that would be expanded if it was smaller."""


class ReadsWeights(CannotTrace):
    """Raised for a layer that reads weights of other layers in its own code."""

    def __init__(self, variables: list[Any]) -> None:
        super().__init__(f"it reads {variables[0].name}, a weight of another layer")
        self.variables = variables


class OnlyTrains(Exception):
    """Raised for a layer that passes its input on, and applies `model` to it in training."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
