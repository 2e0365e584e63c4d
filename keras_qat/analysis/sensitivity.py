"""Which layers suffer from fewer bits, and how many bits to give to each: without training."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.analysis.plan import plan
from keras_qat.config import specs
from keras_qat.config.recipes import Recipe
from keras_qat.config.recipes import get as get_recipe
from keras_qat.frontend import graph as graph_lib
from keras_qat.frontend.keras2.backend import one_at_a_time, traced
from keras_qat.io.atomic_files import written
from keras_qat.io.data import batches
from keras_qat.io.progress import shown
from keras_qat.rewriting.quantize import quantize_model
from keras_qat.training.calibration.watch import infer
from keras_qat.training.layers.scheduled_layer import Phase, assuming
from keras_qat.training.layers.weight_quantizer import weight_at
from keras_qat.training.quantizers import PREFIX
from keras_qat.training.ranges.weight_limits import least_squares_limits, rounded
from keras_qat.training.schedule import scheduled_layers

__all__ = ["LayerSensitivity", "Measure", "Sensitivity", "noise", "sensitivity"]

Measure = Callable[[list[np.ndarray], list[np.ndarray]], float]
"""What quantizing costs: from the outputs in float and the outputs with a layer quantized, an array
of all examples for each output, to a number that grows as they get worse."""


@dataclasses.dataclass(frozen=True)
class LayerSensitivity:
    """What the bits of one layer's weights cost.

    Args:
        name: the layer in the float model.
        weights: how many weights it has.
        costs: bits -> what the measure says if only this layer has so few.
    """

    name: str
    weights: int
    costs: dict[int, float]


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """What `sensitivity` found. Prints as a table, the most sensitive layer first.

    Args:
        layers: in the order of computation.
    """

    layers: tuple[LayerSensitivity, ...]

    def ranked(self, bits: int | None = None) -> list[LayerSensitivity]:
        """The layers, the one that suffers most from so many bits first; by default the fewest."""
        found = [each for each in self.layers if each.costs]
        by = bits or min((min(each.costs) for each in found), default=0)
        return sorted(found, key=lambda each: -each.costs[by])

    def to_dict(self) -> dict[str, Any]:
        """What was found as JSON data."""
        return dataclasses.asdict(self)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Writes the ranking as one HTML page: a table that sorts, with bars; it needs no network.

        Args:
            path: where to write the page, or None.

        Returns:
            The page.

        Raises:
            OSError: if nothing can be written there.
        """
        from keras_qat.analysis.drawing.sensitivity import sensitivity_page

        return written(sensitivity_page(self), path)

    def __str__(self) -> str:
        ranked = self.ranked()
        bits = sorted(ranked[0].costs) if ranked else []
        width = max([5, *(len(each.name) for each in ranked)])
        lines = [f"{'layer':<{width}}  {'weights':>9}" + "".join(f"{b:>7} bits" for b in bits)]
        for each in ranked:
            cells = "".join(f"{each.costs[b]:>12.3g}" for b in bits)
            lines.append(f"{each.name:<{width}}  {each.weights:>9}{cells}")
        return "\n".join(lines)


def noise(exact: list[np.ndarray], found: list[np.ndarray]) -> float:
    """The power of the error over that of the outputs: the mean over outputs of 1/SQNR."""
    ratios = [
        np.sum((y - x) ** 2, dtype=np.float64) / max(np.sum(x**2, dtype=np.float64), 1e-30)
        for x, y in zip(exact, found, strict=True)
    ]
    return float(np.mean(ratios))


@one_at_a_time
def sensitivity(
    model: Any,
    data: Any,
    steps: int | None = None,
    batch_size: int | None = None,
    *,
    bits: Iterable[int] = (2, 4, 6, 8),
    recipe: str | Recipe = "int8",
    measure: Measure = noise,
    verbose: int = 0,
) -> Sensitivity:
    """Ranks the layers of a float model by what fewer bits for their weights cost.

    One layer at a time has its weights rounded, all else being in float. Noise adds up over layers
    as long as it is small, which `search_bits` counts on.

    Args:
        model: a float model, as for `quantize_model`. It is not changed.
        data, steps, batch_size: as in `calibrate`: some 50 to 500 examples, without labels.
        bits: which to try, of 2 to 8.
        recipe: says which layers are quantized.
        measure: from the outputs in float and those with a layer quantized, lists of arrays, to a
            cost. The power of the error over that of the outputs by default; with labels at hand
            it may be a loss.
        verbose: 1 shows progress.

    Raises:
        ValueError: if the model cannot be quantized, the data is not what it takes, there are no
            bits or others than 2 to 8, or the recipe's weights have one range for the tensor.

    Example:
        >>> print(keras_qat.sensitivity(model, x_train[:128]))
    """
    tried, recipe = sorted(set(bits), reverse=True), get_recipe(recipe)
    for each in tried:
        specs.check_bits(each)
    if not tried:
        raise ValueError("No bits are given: try (2, 4, 6, 8).")
    if not recipe.weights.per_channel:
        raise ValueError(f"Recipe '{recipe.name}' has weights per tensor; use recipes.int8().")
    layers = _layers_of(model, recipe)
    qat = quantize_model(model, recipe)
    read = list(batches(qat, data, batch_size, steps, finite=True))
    outputs = _in_float(qat)

    def all_outputs() -> list[np.ndarray]:
        found = [outputs(*map(tf.constant, batch)) for batch in read]
        return [np.concatenate(each) for each in zip(*found, strict=True)]

    exact, costs = all_outputs(), {name: dict[int, float]() for name in layers}
    sizes = dict.fromkeys(layers, 0)
    for name in shown(layers, "Sensitivity", verbose, len(layers), unit="layer"):
        wrappers = [qat.get_layer(PREFIX + each) for each in layers[name]]
        kernels = [
            (weight_at(wrapper.layer, weight), quantizer.channel_axes)
            for wrapper in wrappers
            for weight, quantizer in wrapper.weight_quantizers.items()
        ]
        before = [kernel.numpy() for kernel, _ in kernels]
        sizes[name] = sum(each.size for each in before)
        for each in tried:
            for value, (kernel, axes) in zip(before, kernels, strict=True):
                kernel.assign(rounded(value, least_squares_limits(value, axes, each), each))
            costs[name][each] = measure(exact, all_outputs())
        for value, (kernel, _) in zip(before, kernels, strict=True):
            kernel.assign(value)
    return Sensitivity(
        tuple(LayerSensitivity(name, sizes[name], dict(costs[name])) for name in layers)
    )


def _layers_of(model: Any, recipe: Recipe) -> dict[str, list[str]]:
    """The layers of a user's model with quantized weights -> those that they become."""
    found: dict[str, list[str]] = {}
    planned, seen = plan(model, recipe), set()
    for group in planned.groups:
        layer = group.kernel.layer
        if planned.weights[group] is not None and group.weights and layer not in seen:
            seen.add(layer)
            found.setdefault(group.kernel.origin, []).append(group.kernel.name)
    return found


def _in_float(qat: Any) -> Callable[..., list[Any]]:
    """The outputs of a model with quantization off: traced once, weights being read each time."""
    graph, layers = graph_lib.read(qat), list(scheduled_layers(qat))
    phase = Phase(training=False, quantizing=False, frozen=True, calibrated=True)
    signature = [tf.TensorSpec([None, *each.shape[1:]], each.dtype) for each in qat.inputs]

    def outputs(*inputs: Any) -> list[Any]:
        with assuming(phase, layers):
            found = graph_lib.evaluate(graph, list(inputs), infer)
        return [tf.cast(each, tf.float32) for each in tf.nest.flatten(found)]

    return traced(outputs, input_signature=signature)
