"""Targets as data: the operators that they run, their types and sizes, rounding, and faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from keras_qat.arithmetic.kernel_families import XNNPACK, KernelFamily, kernel_family
from keras_qat.config import recipes
from keras_qat.config.recipe import Recipe
from keras_qat.keras2.backend import keras
from keras_qat.messages import suggest, warn_caller
from keras_qat.tflite.builder import Builder
from keras_qat.tflite.reader import Site

Check = Callable[[Site], str | None]
"""A function that returns why a target refuses an operator of a file, or None."""

Form = Callable[[Builder, Site], None]
"""A function that adds operators to a file in place of an operator with a fault."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """A case that a target's kernel refuses or computes wrongly.

    Args:
        operators: TFLite's names of the operators, separated by spaces.
        applies: function that returns whether the fault affects one of these operators.
        reason: the effect, in a few words.
        form: how files for the target replace the operator: a function, or a name in
            `export/target_rewrites.py`; None if it cannot be replaced.
        change: advice if there is no rewrite, in a few words.
        knows_open_sizes: whether `applies` also supports tensors with unknown sizes (-1).
    """

    operators: str
    applies: Callable[[Site], bool]
    reason: str
    form: Form | str | None = None
    change: str = ""
    knows_open_sizes: bool = False

    def meets(self, site: Site) -> bool:
        """Returns whether the fault affects an operator of a file; False if sizes are unknown."""
        if site.operation.kernel not in self.operators.split():
            return False
        has_open_sizes = any(-1 in tensor.shape for tensor in site.tensors)
        return (self.knows_open_sizes or not has_open_sizes) and self.applies(site)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Requirements of a target's kernel for one operator.

    Args:
        types: types of its tensors, e.g. "int8", including tensors of sizes and indices.
        max_axes: the maximum number of axes of a tensor.
        reads: types of the first input, if they differ from `types`.
        max_inputs: the maximum number of inputs.
        checks: functions that check further requirements, one after the other.
    """

    types: tuple[str, ...]
    max_axes: int = 99
    reads: tuple[str, ...] | None = None
    max_inputs: int = 99
    checks: tuple[Check, ...] = ()


def operators(*rows: tuple[str, Kernel]) -> dict[str, Kernel]:
    """Returns a dict operator -> kernel, given pairs (operators separated by spaces, kernel)."""
    return {name: kernel for names, kernel in rows for name in names.split()}


@dataclasses.dataclass(frozen=True)
class Target:
    """A runtime or device for files. Pass it as `target=`, or register it and pass its name.

    Args:
        name: the name that users pass.
        title: the name in messages.
        kernels: the kernel family that rounds like the target, as in `quantize_model(kernels=...)`.
        batch_size: batch size of files; None for any.
        operators: TFLite's name of each available operator -> its kernel; None for all operators.
        bits: supported bits of activations; 8 stands for 2 to 8.
        per_channel: whether weights with a scale per channel run at full speed. Otherwise the
            target's recipe has one scale per tensor.
        elsewhere: the processor that runs operators that the target lacks, e.g. "the CPU"; None if
            files with such operators do not run.
        checks: functions that check requirements of every operator.
        source: the source of this data.
        faults: cases that the kernels refuse or compute incorrectly. The first fault that applies
            is used.
        has_float: whether it supports float. Otherwise normalization layers compute in integers.
        channel_bytes: TFLite's name of an operator -> bytes of memory per output channel for
            weights with a scale per channel.
        host: the runtime that computes operators that the target lacks; None if nothing else does.
    """

    name: str
    title: str
    kernels: str
    batch_size: int | None
    operators: Mapping[str, Kernel] | None
    bits: tuple[int, ...] = (8, 16)
    per_channel: bool = True
    elsewhere: str | None = None
    checks: tuple[Check, ...] = ()
    source: str = ""
    faults: tuple[Fault, ...] = ()
    has_float: bool = True
    channel_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    host: Target | None = None

    @property
    def has_int16(self) -> bool:
        """Whether it supports 16-bit activations."""
        return 16 in self.bits

    def recipe(self) -> Recipe:
        """Returns the default recipe for the target."""
        return recipes.int8(per_channel=self.per_channel)

    def fault(self, site: Site) -> Fault | None:
        """Returns the first fault that affects an operator, or None."""
        faults = (fault for fault in self.faults if fault.meets(site))
        return next(faults, None)

    def __repr__(self) -> str:
        return f"<Target {self.name}>"


_REGISTERED: dict[str, Target] = {}


def register(target: Target) -> Callable[[], None]:
    """Registers a target by its name. It replaces a target with the same name.

    A saved model contains only the target's name, so register the target before loading it.

    Args:
        target: the target; pass its `name` to `quantize_model(target=...)`.

    Returns:
        A function that undoes the registration.

    Raises:
        TypeError: if it is not a `Target`.

    Example:
        >>> keras_qat.targets.register(dataclasses.replace(keras_qat.targets.TFLM, name="mine"))
        >>> qat = keras_qat.quantize_model(model, target="mine")
    """
    if not isinstance(target, Target):
        raise TypeError(f"register() needs a keras_qat.targets.Target, not {target!r}.")
    replaced = _REGISTERED.get(target.name)
    _REGISTERED[target.name] = target

    def undo() -> None:
        _REGISTERED.pop(target.name, None)
        if replaced is not None:
            _REGISTERED[target.name] = replaced

    return undo


def known() -> tuple[str, ...]:
    """Returns the names of all targets."""
    return tuple(_REGISTERED)


def get(target: str | Target) -> Target:
    """Returns a target by name, or the target itself.

    Args:
        target: a name of `known()`, or a target.

    Raises:
        ValueError: on an unknown name.
    """
    if isinstance(target, Target):
        return target
    if target in _REGISTERED:
        return _REGISTERED[target]
    raise ValueError(
        f"target={target!r}: use one of {', '.join(map(repr, known()))}, a "
        f"keras_qat.targets.Target, or register your own with keras_qat.targets.register."
        f"{suggest(target, known())}"
    )


def settings(
    recipe: str | Recipe | None, kernels: str | None, target: str | Target | None
) -> tuple[Recipe, KernelFamily, Target | None]:
    """Returns the recipe, kernel family and target for a model. None stands for a default.

    Raises:
        ValueError: on unknown names, or if they contradict each other.
    """
    if target is None:
        return (
            recipes.get("int8" if recipe is None else recipe),
            kernel_family(kernels or XNNPACK.name),
            None,
        )
    chosen_target = get(target)
    family = kernel_family(kernels or chosen_target.kernels)
    if family != kernel_family(chosen_target.kernels):
        raise ValueError(
            f"kernels={kernels!r}: {chosen_target.title} rounds as {chosen_target.kernels!r}. "
            f"Leave kernels out. To compare kernels, set the model's attribute `kernels`."
        )
    chosen = chosen_target.recipe() if recipe is None else recipes.get(recipe)
    if (16 if chosen.activations.bits == 16 else 8) not in chosen_target.bits:
        raise ValueError(
            f"recipe={chosen.name!r}: {chosen_target.title} has no kernels for activations of "
            f"{chosen.activations.bits} bits. Leave the recipe out, or choose another target."
        )
    return chosen, family, chosen_target


def find_or_warn(name: str, model: str) -> Target | None:
    """Returns the target of a loaded model; None, with a warning, if its name is not registered."""
    if name not in _REGISTERED:
        warn_caller(
            f"'{model}' is for the target {name!r}, which is not registered: call "
            f"keras_qat.targets.register and load it again, or export with target=."
        )
    return _REGISTERED.get(name)


def get_target(model: keras.Model) -> Target | None:
    """Returns the target that a model was quantized for, or None."""
    return getattr(model, "target", None)


@dataclasses.dataclass(frozen=True)
class Problem:
    """An operator in a file that a target does not run.

    Args:
        tensor: the output of the operator: the layer's name, or the tensor's name in the file.
        operator: TFLite's name of the operator.
        reason: the reason, in a few words: "no kernel for int16", "strides up to 3 only, not 4".
        change: a change that helps, in a few words; "" if none is known.
        elsewhere: the processor that computes it instead; None if the file does not run.
        index: index of the operator in the file, or of the loop that contains it.
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


def describe_problems(target: Target, problems: Sequence[Problem]) -> list[str]:
    """Returns lines that list the problems of a model on a target."""
    if not problems:
        return [f"target {target.name}: {target.title} runs all of it"]
    inexact = "missing or inexact, so files with them return other values than the model"
    if target.host is not None:
        inexact = f"that {target.host.title} lacks too, so files with them do not run"
    lines = []
    for elsewhere in dict.fromkeys(problem.elsewhere for problem in problems):
        effect = f"left to {elsewhere}" if elsewhere else inexact
        lines.append(f"target {target.name}: operators {effect}")
        lines += [f"  {problem}" for problem in problems if problem.elsewhere == elsewhere]
    return lines
