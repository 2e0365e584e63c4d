"""The ladder of `tune`: what it tries, in order, the cheapest first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

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
        bits: dict[int, int] = {}
        for override in self.recipe.overrides:
            if override.weight_bits is not None:
                bits[override.weight_bits] = bits.get(override.weight_bits, 0) + 1
            elif override.quantize is False:
                steps.append(f"{override.layers} in float")
        steps += [f"{count} layers with {b}-bit weights" for b, count in sorted(bits.items())]
        steps += [f"outputs={list(self.outputs)}"] if self.outputs else []
        steps.append("calibrate" if self.method == "minmax" else f"calibrate({self.method!r})")
        steps += ["bias_correction"] * self.corrects_bias
        steps += ["learn_rounding"] * self.learns_rounding
        steps += [f"fit, {self.epochs} epochs"] if self.epochs else []
        return ", ".join(steps)


@dataclasses.dataclass(frozen=True)
class Rung:
    """One step of the ladder.

    Args:
        name: its name in the table.
        find_obstacle: returns why it cannot help, or None.
        propose: yields the settings to try, given the best ones so far.
    """

    name: str
    find_obstacle: Callable[[Search], str | None]
    propose: Callable[[Search], Iterator[Settings]]


def _never(_: Search) -> None:
    return None


def _lacks_few_bits(search: Search) -> str | None:
    recipe = search.best.recipe
    bits = [recipe.weights.bits, *(override.weight_bits or 8 for override in recipe.overrides)]
    return None if min(bits) < 8 else "weights have 8 bits, which rounding cannot improve much"


def _lacks_concatenation(search: Search) -> str | None:
    if search.concatenated_tensors:
        return None
    return "no output is concatenated from different tensors"


def _lacks_float(search: Search) -> str | None:
    target = search.target
    if target is not None and not target.has_float:
        return f"{target.title} cannot compute in float"
    return None


def _lacks_int16(search: Search) -> str | None:
    target = search.target
    if search.best.recipe.name != "int8":
        return f"there is no {search.best.recipe.name} recipe with 16-bit activations"
    if target is not None and not target.has_int16:
        return f"{target.title} has no 16-bit activations"
    return None


def _lacks_training(search: Search) -> str | None:
    return None if search.trains else "train holds neither labels nor enough examples"


def _calibrate(search: Search) -> Iterator[Settings]:
    yield search.best


def _correct_bias(search: Search) -> Iterator[Settings]:
    yield dataclasses.replace(search.best, corrects_bias=True)


def _change_method(search: Search) -> Iterator[Settings]:
    methods: tuple[Method, ...] = ("mse", "percentile")
    for method in methods:
        yield dataclasses.replace(search.best, method=method)


def _end_before_outputs(search: Search) -> Iterator[Settings]:
    yield dataclasses.replace(search.best, outputs=search.concatenated_tensors)


def _spare_layers(search: Search) -> Iterator[Settings]:
    """Leave the layers in float after which the signal falls most: the first one, then all."""
    layers = list(diagnose(search.best_model, search.x_few).layers)
    for names in dict.fromkeys([tuple(layers[:1]), tuple(layers)]):
        recipe = search.best.recipe
        for name in names:
            recipe = recipe.override(name, quantize=False)
        if names:
            yield dataclasses.replace(search.best, recipe=recipe)


def _learn_rounding(search: Search) -> Iterator[Settings]:
    yield dataclasses.replace(search.best, method="mse", learns_rounding=True, corrects_bias=False)


def _train(search: Search) -> Iterator[Settings]:
    yield dataclasses.replace(search.best, epochs=EPOCHS)


def _use_16_bits(search: Search) -> Iterator[Settings]:
    recipe = dataclasses.replace(recipes.int16x8(), overrides=search.first.recipe.overrides)
    yield dataclasses.replace(search.first, recipe=recipe)


LADDER = (
    Rung("ranges from data", _never, _calibrate),
    Rung("corrected biases", _never, _correct_bias),
    Rung("other ranges", _never, _change_method),
    Rung("file ends before concatenated outputs", _lacks_concatenation, _end_before_outputs),
    Rung("learned rounding", _lacks_few_bits, _learn_rounding),
    Rung("sensitive layers in float", _lacks_float, _spare_layers),
    Rung("training", _lacks_training, _train),
    Rung("16-bit activations", _lacks_int16, _use_16_bits),
)
"""Steps towards accuracy. The last one costs speed on the device, so it comes after training."""
