"""The ladder of `tune`: what it tries, in order, the cheapest first."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from keras_qat.analysis.diagnose import diagnose
from keras_qat.config import recipes
from keras_qat.config.recipe import Recipe
from keras_qat.training.calibration.histogram import Method

if TYPE_CHECKING:
    from keras_qat.analysis.tune.search import Search

EPOCHS = 5
"""Epochs of training."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What makes a quantized model of a float one.

    Args:
        recipe: the recipe, with overrides for single layers.
        method: the method of `calibrate`.
        corrects_bias: whether `bias_correction` follows.
        learns_rounding: whether `learn_rounding` follows, which corrects biases itself.
        outputs: tensors at which the file ends; none for the model's outputs.
        packs: whether files hold two weights of 4 bits in a byte.
        epochs: epochs of training after that.
    """

    recipe: Recipe
    method: Method = "minmax"
    corrects_bias: bool = False
    learns_rounding: bool = False
    outputs: tuple[str, ...] = ()
    packs: bool = False
    epochs: int = 0

    def describe(self) -> str:
        """Return the settings as calls."""
        steps = [] if self.recipe.name == "int8" else [self.recipe.name]
        overrides = self.recipe.overrides
        steps += [f"{one.layers} in float" for one in overrides if one.quantize is False]
        bits = Counter(one.weight_bits for one in overrides if one.weight_bits is not None)
        steps += [f"{count} layers with {b}-bit weights" for b, count in sorted(bits.items())]
        steps += [f"outputs={list(self.outputs)}"] if self.outputs else []
        steps.append("calibrate" if self.method == "minmax" else f"calibrate({self.method!r})")
        steps += ["bias_correction"] * self.corrects_bias
        steps += ["learn_rounding"] * self.learns_rounding
        steps += [f"fit, {self.epochs} epochs"] if self.epochs else []
        return ", ".join(steps)


Propose = Callable[["Search"], Iterable[Settings]]


@dataclasses.dataclass(frozen=True)
class Rung:
    """One step of the ladder.

    Args:
        name: its name in the table.
        propose: returns the settings to try, given the best ones so far.
        find_obstacle: returns why it cannot help, or "".
    """

    name: str
    propose: Propose
    find_obstacle: Callable[[Search], str] = lambda _: ""


def _change(*changes: dict[str, Any]) -> Propose:
    """Return a function that proposes the best settings with each of the changes."""
    return lambda search: [dataclasses.replace(search.best, **change) for change in changes]


def _explain_rounding(search: Search) -> str:
    recipe = search.best.recipe
    bits = [recipe.weights.bits, *(override.weight_bits or 8 for override in recipe.overrides)]
    return "" if min(bits) < 8 else "weights have 8 bits, which rounding cannot improve much"


def _explain_float(search: Search) -> str:
    target = search.target
    return f"{target.title} cannot compute in float" if target and not target.has_float else ""


def _explain_16_bits(search: Search) -> str:
    target, name = search.target, search.best.recipe.name
    if name != "int8":
        return f"there is no {name} recipe with 16-bit activations"
    return f"{target.title} has no 16-bit activations" if target and not target.has_int16 else ""


def _end_before_outputs(search: Search) -> list[Settings]:
    return [dataclasses.replace(search.best, outputs=search.concatenated_tensors)]


def _spare_layers(search: Search) -> Iterator[Settings]:
    """Leave the layers in float after which the signal falls most: the first one, then all."""
    layers = list(diagnose(search.load(search.best_attempt), search.x_few).layers)
    for count in sorted({1, len(layers)}) if layers else ():
        recipe = search.best.recipe
        for name in layers[:count]:
            recipe = recipe.override(name, quantize=False)
        yield dataclasses.replace(search.best, recipe=recipe)


def _use_16_bits(search: Search) -> list[Settings]:
    recipe = dataclasses.replace(recipes.int16x8(), overrides=search.first.recipe.overrides)
    return [dataclasses.replace(search.first, recipe=recipe)]


ROUNDED = {"method": "mse", "learns_rounding": True, "corrects_bias": False}
"""Changes of settings for learned rounding."""

LADDER = (
    Rung("ranges from data", _change({})),
    Rung("corrected biases", _change({"corrects_bias": True})),
    Rung("other ranges", _change({"method": "mse"}, {"method": "percentile"})),
    Rung(
        "file ends before concatenated outputs",
        _end_before_outputs,
        lambda search: (
            "no output is concatenated from different tensors"
            if not search.concatenated_tensors
            else ""
        ),
    ),
    Rung("learned rounding", _change(ROUNDED), _explain_rounding),
    Rung("sensitive layers in float", _spare_layers, _explain_float),
    Rung(
        "training",
        _change({"epochs": EPOCHS}),
        lambda search: "" if search.trains else "train holds neither labels nor enough examples",
    ),
    Rung("16-bit activations", _use_16_bits, _explain_16_bits),
)
"""Steps towards accuracy. The last one costs speed on the device, so it comes after training."""
