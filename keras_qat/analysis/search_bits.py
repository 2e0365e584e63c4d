"""`search_bits`: chooses the bits of each layer's weights within a budget of bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np

from keras_qat.analysis.sensitivity import (
    LayerSensitivity,
    Measure,
    Sensitivity,
    noise,
    sensitivity,
    sort_bits,
)
from keras_qat.config.arguments import answers_unknown
from keras_qat.config.recipe import Recipe
from keras_qat.config.recipes import NAMED
from keras_qat.config.recipes import get as get_recipe
from keras_qat.keras2.backend import keras

_UNITS = 8192
"""Number of steps into which the budget is divided for dynamic programming."""


@dataclasses.dataclass(frozen=True)
class FoundBits:
    """The result of `search_bits`. Prints as code to paste.

    Args:
        bits: layer -> bits of its weights.
        recipe: the recipe with these bits, for `quantize_model`.
        bytes: size of all quantized weights with these bits.
        cost: the expected cost, which is the sum of the layers' costs.
        sensitivity: the measurements on which the choice is based.
    """

    bits: dict[str, int]
    recipe: Recipe
    bytes: int
    cost: float
    sensitivity: Sensitivity

    @property
    def overrides(self) -> dict[str, int]:
        """The bits of each layer that differs from the recipe, by the layer's name."""
        usual = self.recipe.weights.bits
        return {name: bits for name, bits in self.bits.items() if bits != usual}

    def __str__(self) -> str:
        base = dataclasses.replace(self.recipe, overrides=())
        if base.name in NAMED and NAMED[base.name]() == base:
            first = f"recipe = keras_qat.recipes.{base.name}()"
        else:
            first = "# recipe: the recipe passed to search_bits"
        lines = [f"# {self.bytes} bytes of weights", first]
        lines += [
            f"recipe = recipe.override({name!r}, weight_bits={bits})"
            for name, bits in self.overrides.items()
        ]
        return "\n".join(lines)


@answers_unknown("A budget of 0.5 is half of the bytes.")
def search_bits(
    model: keras.Model,
    data: Any,
    budget: float,
    steps: int | None = None,
    batch_size: int | None = None,
    *,
    bits: Iterable[int] = (4, 8),
    recipe: str | Recipe = "int8",
    measure: Measure = noise,
    known: Sensitivity | None = None,
    verbose: int = 0,
) -> FoundBits:
    """Chooses the bits of each layer's weights with the lowest cost within a budget of bytes.

    The cost is the sum of the layers' costs from `sensitivity`. Files store a 4-bit weight in half
    a byte (`qat.pack_int4 = True`), and any other weight in a byte. Other bits than 4 and 8 save
    memory only if the file is compressed, or on hardware that supports them.

    Args:
        model: a float model, as for `quantize_model`. It is not changed.
        data: 50 to 500 inputs without labels, all held in memory: an array, a list or dict of
            arrays, a `tf.data.Dataset`, a `keras.utils.Sequence`, or a generator of batches.
        budget: maximum bytes of all weights, or a share of their size in 8 bits if it is at most 1.
        steps: number of batches to read; all by default. Required for an infinite dataset.
        batch_size: examples per batch of arrays, 32 by default.
        bits: the bits to choose from, 2 to 8.
        recipe: the recipe; the search overrides its weight bits.
        measure: function that computes the cost, as in `sensitivity`.
        known: a result of `sensitivity` for these bits. Pass it to search with another budget.
        verbose: 1 shows progress.

    Returns:
        The bits and the recipe.

    Raises:
        TypeError: if the budget or `bits` have the wrong type.
        ValueError: as for `sensitivity`, and if the budget is too small even for the fewest bits.

    Example:
        >>> search = keras_qat.search_bits(model, x_train[:128], 0.6)
        >>> print(search)
        >>> qat = keras_qat.quantize_model(model, search.recipe)
    """
    if isinstance(budget, bool) or not isinstance(budget, (int, float, np.number)):
        raise TypeError(f"budget={budget!r}: pass a number of bytes, or a share such as 0.5.")
    recipe, choices = get_recipe(recipe), sort_bits(bits)
    if known is None:
        measured = partial(sensitivity, bits=choices, recipe=recipe, measure=measure)
        known = measured(model, data, steps, batch_size, verbose=verbose)
    layers = known.layers
    total = sum(layer.weights for layer in layers)
    chosen = choose_bits(layers, budget * total if budget <= 1 else budget, choices)
    for name, layer_bits in chosen.items():
        if layer_bits != recipe.weights.bits:
            recipe = recipe.override(name, weight_bits=layer_bits)
    return FoundBits(
        chosen,
        recipe,
        int(np.ceil(sum(layer.weights * chosen[layer.name] for layer in layers) / 8)),
        float(sum(layer.costs[chosen[layer.name]] for layer in layers)),
        known,
    )


def choose_bits(
    layers: Iterable[LayerSensitivity], budget: float, choices: list[int]
) -> dict[str, int]:
    """Returns layer -> bits with the smallest sum of costs within a budget of bytes.

    Dynamic programming: it finds the lowest cost of the first n layers for each number of bytes.

    Raises:
        ValueError: if the budget is too small even for the fewest bits.
    """
    layers = list(layers)
    fewest = sum(layer.weights for layer in layers) * min(choices) / 8
    if fewest > budget:
        raise ValueError(
            f"The budget is {budget:.0f} bytes, but the weights need {fewest:.0f} with "
            f"{min(choices)} bits each. Allow more bytes or fewer bits."
        )
    # Counts bytes above the smallest size, rounded up.
    unit = max((budget - fewest) / _UNITS, 1e-9)
    costs = np.zeros(_UNITS + 1)
    best_choices = []
    for layer in layers:
        extra = [layer.weights * (bits - min(choices)) / 8 for bits in choices]
        steps = [int(min(np.ceil(size / unit - 1e-9), _UNITS + 1)) for size in extra]
        tried = np.full((len(choices), _UNITS + 1), np.inf)
        for choice, (bits, step) in enumerate(zip(choices, steps, strict=True)):
            if step <= _UNITS:
                tried[choice, step:] = costs[: _UNITS + 1 - step] + layer.costs[bits]
        best_choices.append((tried.argmin(0), steps))
        costs = tried.min(0)
    remaining, backwards = _UNITS, []
    for best, steps in reversed(best_choices):
        choice = int(best[remaining])
        backwards.append(choices[choice])
        remaining -= steps[choice]
    return {layer.name: bits for layer, bits in zip(layers, reversed(backwards), strict=True)}
