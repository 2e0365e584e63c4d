"""Targets as data: the operators that they run, with types, sizes, rounding and faults."""

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
"""A function that returns why a target refuses an operator. None means that the operator runs."""

Form = Callable[[Builder, Site], None]
"""A function that writes a replacement for an operator with a fault."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """A case that a target's kernel refuses or computes wrongly.

    Args:
        operators: TFLite's names of the operators, separated by spaces.
        applies: function that returns whether the fault affects a given operator of a file.
        reason: what the kernel does wrong, in a few words: "ignores groups of int16".
        form: function that writes equivalent operators into files for the target. Or the name of
            such a function in `export/target_rewrites.py`. None means no replacement.
        change: advice for users whose file has the fault, in a few words.
        knows_open_sizes: whether `applies` supports tensors with unknown sizes (-1). Otherwise, the
            fault is ignored for these tensors.
    """

    operators: str
    applies: Callable[[Site], bool]
    reason: str
    form: Form | str | None = None
    change: str = ""
    knows_open_sizes: bool = False

    def meets(self, site: Site) -> bool:
        """Returns True if the fault affects a given operator of a file."""
        if site.operation.kernel not in self.operators.split():
            return False
        has_open_sizes = any(-1 in tensor.shape for tensor in site.tensors)
        return (self.knows_open_sizes or not has_open_sizes) and self.applies(site)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Requirements of a target's kernel for one operator.

    Args:
        types: types that tensors may have, e.g. "int8". Include the types of sizes and indices.
        max_axes: the maximum number of axes of a tensor.
        reads: supported types of the first input. None means `types`.
        max_inputs: the maximum number of inputs.
        checks: functions that check further requirements, one after the other.
    """

    types: tuple[str, ...]
    max_axes: int = 99
    reads: tuple[str, ...] | None = None
    max_inputs: int = 99
    checks: tuple[Check, ...] = ()


def operators(*rows: tuple[str, Kernel]) -> dict[str, Kernel]:
    """Returns a dict from operators to kernels. A row is for example `("ADD SUB", kernel)`."""
    return {name: kernel for names, kernel in rows for name in names.split()}


@dataclasses.dataclass(frozen=True)
class Target:
    """A runtime or device that runs files. Pass it as `target=`, or register it and pass its name.

    Args:
        name: the name that users pass.
        title: the name in messages.
        kernels: the kernel family that rounds like the target, as in `quantize_model(kernels=...)`.
        batch_size: batch size of files. None means any.
        operators: a dict that maps TFLite's names of operators to `Kernel`s. Operators without an
            entry have no kernel. None means that all operators have kernels.
        bits: supported bits of activations. 8 stands for 2 to 8.
        per_channel: whether weights with a scale per channel run at full speed. Otherwise, the
            target's recipe has one scale per tensor.
        elsewhere: the processor that runs operators without a kernel, e.g. "the CPU". None means
            that files with such operators do not run.
        checks: functions that check requirements of every operator.
        source: how the operators and limits were found, e.g. in the documentation of the device.
        faults: cases that the kernels refuse or compute incorrectly. The first fault that applies
            is used.
        has_float: whether the target supports float. Otherwise, normalization layers compute with
            integers.
        channel_bytes: a dict from TFLite's names of operators to bytes per output channel. If
            weights have a scale per channel, the kernel needs this additional memory.
        host: the target whose kernels run on `elsewhere`. None means that all operators run there.
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
        """Whether the target supports 16-bit activations."""
        return 16 in self.bits

    @property
    def has_spectra(self) -> bool:
        """Whether float Fourier transforms run, on the target or on `elsewhere`."""
        device = self if self.elsewhere is None else self.host
        return device is None or device.operators is None or "RFFT2D" in device.operators

    def recipe(self) -> Recipe:
        """Returns the default recipe for the target."""
        return recipes.int8(per_channel=self.per_channel)

    def fault(self, site: Site) -> Fault | None:
        """Returns the first fault that affects an operator, or None."""
        return next((fault for fault in self.faults if fault.meets(site)), None)

    def __repr__(self) -> str:
        return f"<Target {self.name}>"


_REGISTERED: dict[str, Target] = {}


def register(target: Target) -> Callable[[], None]:
    """Registers a target by its name. It replaces a target with the same name.

    A saved model contains only the target's name. Register the target before you load the model.

    Args:
        target: the target. Pass its `name` to `quantize_model(target=...)`.

    Returns:
        A function that undoes the registration.

    Raises:
        TypeError: if `target` is not a `Target`.

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
        f"target={target!r}: use one of {', '.join(map(repr, known()))}, or a "
        f"keras_qat.targets.Target.{suggest(target, known())} keras_qat.targets.register adds "
        f"names of your own targets."
    )


def settings(
    recipe: str | Recipe | None, kernels: str | None, target: str | Target | None
) -> tuple[Recipe, KernelFamily, Target | None]:
    """Returns the recipe, kernel family and target for a model. None stands for a default.

    Raises:
        ValueError: on unknown names, or if the arguments contradict each other.
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
            f"kernels={kernels!r}: {chosen_target.title} has the kernels "
            f"{chosen_target.kernels!r}. Leave kernels out. To compare kernels, set the model's "
            f"attribute `kernels`."
        )
    chosen = chosen_target.recipe() if recipe is None else recipes.get(recipe)
    if (16 if chosen.activations.bits == 16 else 8) not in chosen_target.bits:
        raise ValueError(
            f"recipe={chosen.name!r}: {chosen_target.title} has no kernels for activations of "
            f"{chosen.activations.bits} bits. Leave the recipe out, or choose another target."
        )
    return chosen, family, chosen_target


def find_or_warn(name: str, model: str) -> Target | None:
    """Returns the target of a loaded model. Warns and returns None if `name` is not registered."""
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
        change: a change that helps, in a few words. It is "" if none is known.
        elsewhere: the processor that computes the operator instead. None if the file does not run.
        index: index of the operator in the file. Operators in a loop have the index of the loop.
        is_fault: whether the target has a kernel, but it is faulty or inexact.
    """

    tensor: str
    operator: str
    reason: str
    change: str = ""
    elsewhere: str | None = None
    index: int = 0
    is_fault: bool = False

    def __str__(self) -> str:
        text = f"{self.tensor}: {self.operator}: {self.reason}"
        return f"{text}; {self.change}" if self.change else text


def describe_problems(target: Target, problems: Sequence[Problem]) -> list[str]:
    if not problems:
        return [f"target {target.name}: {target.title} runs all of it"]
    lacking = "missing" if target.host is None else f"that {target.host.title} lacks too"
    found: dict[str, list[str]] = {}
    for problem in problems:
        effect = f"{lacking}, so files with them do not run"
        if problem.elsewhere:
            effect = f"left to {problem.elsewhere}"
        elif problem.is_fault:
            effect = "faulty or inexact, so files with them return other values or stop"
        found.setdefault(f"target {target.name}: operators {effect}", []).append(f"  {problem}")
    return [line for heading, lines in found.items() for line in (heading, *lines)]
