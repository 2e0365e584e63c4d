"""A target is data: which operators it has, of which types and sizes, and how it rounds."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from keras_qat.arithmetic.kernel_families import Family, check_family
from keras_qat.config import recipes
from keras_qat.config.recipes import Recipe

if TYPE_CHECKING:
    from keras_qat.tflite.site import Site

__all__ = [
    "Check",
    "Kernel",
    "Target",
    "get",
    "kernels_for",
    "known",
    "register",
    "remembered",
    "settings",
    "target_of",
]

Check = Callable[["Site"], "str | None"]
"""Why an operator of a file is refused, to be read behind "which <title>"; None if it is not."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What a kernel takes.

    Args:
        types: of its tensors, e.g. "int8"; sizes and places count too.
        max_axes: of any of its tensors.
        reads: types of its first input, where they are others; None: as `types`.
        max_inputs: how many tensors it reads at most.
        checks: what else it asks for, in this order.
    """

    types: tuple[str, ...]
    max_axes: int = 99
    reads: tuple[str, ...] | None = None
    max_inputs: int = 99
    checks: tuple[Check, ...] = ()


@dataclasses.dataclass(frozen=True)
class Target:
    """A place where files run. Passed as `target=`, or registered and named.

    Args:
        name: what users call it.
        title: what its makers do.
        kernels: whose rounding it has, as of `quantize_model(kernels=...)`.
        batch_size: of files, None for any.
        operators: TFLite's name of each operator that it has -> what its kernel takes; None for
            all that files have.
        bits: of activations that it has kernels for; 8 stands for 2 to 8.
        per_channel: whether it computes weights with a scale for each channel at full speed.
            Otherwise its recipe has one for the tensor.
        elsewhere: what computes the operators that it lacks, "the CPU"; None: nothing, and files
            with one of them do not run.
        checks: what it asks of every operator.
        source: what this is known from.
    """

    name: str
    title: str
    kernels: Family
    batch_size: int | None
    operators: Mapping[str, Kernel] | None
    bits: tuple[int, ...] = (8, 16)
    per_channel: bool = True
    elsewhere: str | None = None
    checks: tuple[Check, ...] = ()
    source: str = ""

    def recipe(self) -> Recipe:
        """The recipe that it is for."""
        return recipes.int8(per_channel=self.per_channel)

    def __repr__(self) -> str:
        return f"<Target {self.name}>"


_REGISTERED: dict[str, Target] = {}


def register(target: Target) -> Callable[[], None]:
    """Makes a target known by its name, in place of one that has it already.

    A model remembers its target by this name: register it before the model is loaded.

    Returns:
        A function that takes the registration back.

    Example:
        >>> keras_qat.targets.register(dataclasses.replace(keras_qat.targets.TFLM, name="mine"))
        >>> qat = keras_qat.quantize_model(model, target="mine")
    """
    before = _REGISTERED.get(target.name)
    _REGISTERED[target.name] = target

    def undo() -> None:
        _REGISTERED.pop(target.name, None)
        if before is not None:
            _REGISTERED[target.name] = before

    return undo


def known() -> tuple[str, ...]:
    """The names of all targets."""
    return tuple(_REGISTERED)


def get(target: str | Target) -> Target:
    """A target by name, or the target itself.

    Raises:
        ValueError: on an unknown name.
    """
    if isinstance(target, Target):
        return target
    if target in _REGISTERED:
        return _REGISTERED[target]
    raise ValueError(
        f"target={target!r}: use one of {', '.join(map(repr, known()))}, a "
        f"keras_qat.targets.Target, or register yours by keras_qat.targets.register."
    )


def settings(
    recipe: str | Recipe | None, kernels: Family | None, target: str | Target | None
) -> tuple[Recipe, Family, Target | None]:
    """Recipe, rounding and target of a model, where some of them are given.

    Raises:
        ValueError: on unknown names, or if they contradict each other.
    """
    if target is None:
        return recipes.get(recipe or "int8"), check_family(kernels or "xnnpack"), None
    place = get(target)
    family = check_family(kernels or place.kernels)
    if family != place.kernels:
        raise ValueError(
            f"kernels={kernels!r}: {place.title} rounds as {place.kernels!r}. Leave kernels out, "
            f"or set the model's attribute `kernels` to compare."
        )
    found = place.recipe() if recipe is None else recipes.get(recipe)
    if (16 if found.activations.bits == 16 else 8) not in place.bits:
        raise ValueError(
            f"recipe={found.name!r}: {place.title} has no kernels for activations of "
            f"{found.activations.bits} bits. Leave the recipe out, or take another target."
        )
    return found, family, place


def remembered(name: str, model: str) -> Target | None:
    """The target of a model that is loaded; None, with a warning, if it is not known here."""
    if name not in _REGISTERED:
        warnings.warn(
            f"'{model}' is for the target {name!r}, which is not registered: call "
            f"keras_qat.targets.register and load it again, or export with target=.",
            stacklevel=3,
        )
    return _REGISTERED.get(name)


def target_of(model: Any) -> Target | None:
    """The target that a model was quantized for."""
    return getattr(model, "target", None)


def kernels_for(model: Any) -> Family:
    """Whose rounding a model's file is compared with, where nobody says."""
    target = target_of(model)
    return "xnnpack" if target is None else target.kernels
