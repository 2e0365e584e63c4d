"""The verb `sensitivity`: which layers suffer from fewer bits, measured without training."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from keras_qat.analysis.drawing.html_page import Cell, Table, page
from keras_qat.analysis.plan import plan
from keras_qat.config import specs
from keras_qat.config.arguments import answers_unknown
from keras_qat.config.recipe import Recipe
from keras_qat.config.recipes import get as get_recipe
from keras_qat.graph.calls import flatten_values
from keras_qat.graph.read_model import read_model
from keras_qat.helper_layers.computed_kernels import is_computed
from keras_qat.integer_graph.float_inference import evaluator
from keras_qat.io.atomic_files import write_contents
from keras_qat.io.data import read_batches, show_progress
from keras_qat.keras2.backend import one_at_a_time
from keras_qat.rewriting.quantize import quantize_model
from keras_qat.training.distribution import gather_workers, get_worker
from keras_qat.training.fake_quantization.weight_quantizer import get_weight
from keras_qat.training.quantizers import PREFIX
from keras_qat.training.schedule import is_quantized
from keras_qat.training.weight_limits import (
    find_least_squares_limits,
    round_weights,
)

Measure = Callable[[list[np.ndarray], list[np.ndarray]], float]
"""Computes what quantizing costs, from the outputs in float and the outputs with a layer quantized:
an array of all examples for each output. The number grows as the outputs get worse."""


@dataclasses.dataclass(frozen=True)
class LayerSensitivity:
    """The cost of fewer bits for one layer's weights.

    Args:
        name: the layer in the float model.
        weights: how many weights it has.
        costs: bits -> what the measure gives if only this layer has so few.
    """

    name: str
    weights: int
    costs: dict[int, float]


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """The result of `sensitivity`. Prints as a table, the most sensitive layer first.

    Args:
        layers: in the order of computation.
    """

    layers: tuple[LayerSensitivity, ...]

    def ranked(self, bits: int | None = None) -> list[LayerSensitivity]:
        """Sorts the layers by cost at `bits` (default: the fewest), the most sensitive first."""
        layers = [layer for layer in self.layers if layer.costs]
        by = bits or min((min(layer.costs) for layer in layers), default=0)
        return sorted(layers, key=lambda layer: -layer.costs[by])

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as JSON data."""
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
        return write_contents(_page(self), path)

    def __str__(self) -> str:
        ranked = self.ranked()
        bits = sorted(ranked[0].costs) if ranked else []
        width = max([5, *(len(layer.name) for layer in ranked)])
        lines = [f"{'layer':<{width}}  {'weights':>9}" + "".join(f"{b:>7} bits" for b in bits)]
        for layer in ranked:
            cells = "".join(f"{layer.costs[b]:>12.3g}" for b in bits)
            lines.append(f"{layer.name:<{width}}  {layer.weights:>9}{cells}")
        return "\n".join(lines)


def noise(exact: list[np.ndarray], outputs: list[np.ndarray]) -> float:
    """Returns the mean over outputs of 1/SQNR: the power of the error over the output's power."""
    ratios = [
        np.sum((y - x) ** 2, dtype=np.float64) / max(np.sum(x**2, dtype=np.float64), 1e-30)
        for x, y in zip(exact, outputs, strict=True)
    ]
    return float(np.mean(ratios))


def ascending(bits: Iterable[int]) -> list[int]:
    """Returns numbers of bits in ascending order, each once.

    Raises:
        TypeError: if it is a single number.
        ValueError: if bits are not 2 to 8.
    """
    if not isinstance(bits, Iterable):
        raise TypeError(f"bits={bits!r}: pass all widths to choose from, such as (4, 8).")
    return sorted(set(map(specs.check_bits, bits)))


@answers_unknown()
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

    In a cluster (a model under `MultiWorkerMirroredStrategy`) all workers have to call it with the
    same data. Each measures its share of the layers, and all get the whole result.

    Args:
        model: a float model, as for `quantize_model`. It is not changed.
        data: 50 to 500 inputs without labels, all held in memory: an array, a list or dict of
            arrays, a `tf.data.Dataset`, a `keras.utils.Sequence`, or a generator of batches.
        steps: how many batches to read; all by default. An endless dataset needs it.
        batch_size: examples per batch of arrays, 32 by default.
        bits: the numbers of bits to try, 2 to 8.
        recipe: the recipe, which decides which layers are quantized.
        measure: function from the float outputs and the outputs with one layer quantized, lists of
            arrays, to a cost. By default the power of the error over that of the outputs; it may
            be a loss where there are labels.
        verbose: 1 shows progress.

    Raises:
        ValueError: if the model cannot be quantized, the data is not what it takes, `bits` is
            empty or holds others than 2 to 8, or the recipe's weights have one range per tensor.

    Example:
        >>> print(keras_qat.sensitivity(model, x_train[:128]))
    """
    tried, recipe = ascending(bits)[::-1], get_recipe(recipe)
    if not tried:
        raise ValueError("No bits were passed. Try bits=(2, 4, 6, 8).")
    if not recipe.weights.per_channel:
        raise ValueError(
            f"Recipe '{recipe.name}' has weights per tensor, which sensitivity does not support. "
            f"Use recipes.int8()."
        )
    if is_quantized(model):
        raise ValueError(f"'{model.name}' is already quantized. Pass the float model.")
    layers = _layers_of(model, recipe)
    qat = quantize_model(model, recipe)
    read = list(read_batches(qat, data, batch_size, steps, finite=True))
    graph = read_model(qat)
    outputs = evaluator(graph, flatten_values(graph.outputs), untraced_runs=0)

    def all_outputs() -> list[np.ndarray]:
        by_batch = map(outputs, read)
        return [np.concatenate(output, dtype=np.float32) for output in zip(*by_batch, strict=True)]

    exact, costs = all_outputs(), {name: dict[int, float]() for name in layers}
    sizes = dict.fromkeys(layers, 0)
    index, workers = get_worker(qat.distribute_strategy)
    own = list(layers)[index::workers]
    for name in show_progress(own, "Sensitivity", verbose, len(own), unit="layer"):
        wrappers = [qat.get_layer(PREFIX + part) for part in layers[name]]
        kernels = [
            (get_weight(wrapper.layer, weight), quantizer.channel_axes)
            for wrapper in wrappers
            for weight, quantizer in wrapper.weight_quantizers.items()
        ]
        before = [kernel.numpy() for kernel, _ in kernels]
        sizes[name] = sum(weight.size for weight in before)
        for count in tried:
            for value, (kernel, axes) in zip(before, kernels, strict=True):
                kernel.assign(
                    round_weights(value, find_least_squares_limits(value, axes, count), count)
                )
            costs[name][count] = measure(exact, all_outputs())
        for value, (kernel, _) in zip(before, kernels, strict=True):
            kernel.assign(value)
    table = [[sizes[name], *(costs[name].get(count, 0.0) for count in tried)] for name in layers]
    total = gather_workers(qat, np.array(table, np.float64)).sum(0)
    return Sensitivity(
        tuple(
            LayerSensitivity(name, int(size), dict(zip(tried, map(float, measured), strict=True)))
            for name, (size, *measured) in zip(layers, total.tolist(), strict=True)
        )
    )


def _layers_of(model: Any, recipe: Recipe) -> dict[str, list[str]]:
    """Maps each layer with quantized weights to the layers that it becomes."""
    parts: dict[str, list[str]] = {}
    planned, seen = plan(model, recipe), set()
    for group in planned.groups:
        layer = group.kernel.layer
        is_variable = bool(group.weights) and not is_computed(layer)
        if planned.weights[group] is not None and is_variable and layer not in seen:
            seen.add(layer)
            parts.setdefault(group.kernel.origin, []).append(group.kernel.name)
    return parts


def _page(result: Sensitivity) -> str:
    """Writes the ranking as a table with a column for each number of bits."""
    ranked = result.ranked()
    tried = sorted({bits for layer in ranked for bits in layer.costs})
    facts = {"layers": str(len(ranked)), "bits": ", ".join(map(str, tried))}
    facts["weights"] = str(sum(layer.weights for layer in ranked))
    verdict = "No layer has weights to quantize"
    if ranked:
        verdict = f"'{ranked[0].name}' is the most sensitive to weights of {tried[0]} bits"
    most = {bits: max(layer.costs[bits] for layer in ranked) or 1.0 for bits in tried}
    columns = {"layer": "Name in the float model", "weights": "Number of weights"}
    columns |= {f"{bits} bits": f"Cost if only this layer has {bits} bits" for bits in tried}
    rows = [
        [
            Cell(layer.name),
            Cell(str(layer.weights), layer.weights),
            *(
                Cell(f"{cost:.3g}", cost, bar=max(cost / most[bits], 0.0), color="noise")
                for bits, cost in sorted(layer.costs.items())
            ),
        ]
        for layer in ranked
    ]
    note = "The cost if only this layer's weights are quantized and everything else is float."
    return page(
        "Sensitivity of layers", verdict, "good", facts, [], [Table("Layers", columns, rows, note)]
    )
