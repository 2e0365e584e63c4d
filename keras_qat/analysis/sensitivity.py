"""`sensitivity`: measures the cost of fewer bits for each layer's weights, without training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_qat.analysis.plan import plan
from keras_qat.config import specs
from keras_qat.config.arguments import answers_unknown
from keras_qat.config.recipe import Recipe
from keras_qat.config.recipes import get as get_recipe
from keras_qat.graph.calls import flatten_values
from keras_qat.graph.read_model import read_model
from keras_qat.helper_layers.keras_variants import has_computed_kernel
from keras_qat.integer_graph.float_inference import make_evaluator
from keras_qat.io.data import read_batches, show_progress
from keras_qat.keras2.backend import keras, one_at_a_time
from keras_qat.rewriting.quantize import quantize_model
from keras_qat.training.distribution import gather_workers, get_worker
from keras_qat.training.fake_quantization.weight_quantizer import get_weight
from keras_qat.training.quantizers import PREFIX
from keras_qat.training.recurrent import restore_states
from keras_qat.training.schedule import is_quantized
from keras_qat.training.weight_limits import find_least_squares_limits, round_weights

Measure = Callable[[list[NDArray], list[NDArray]], float]
"""A function (float outputs, outputs with one layer quantized) -> cost. Both are lists with one
array of all examples for each output. A higher cost is worse."""


@dataclasses.dataclass(frozen=True)
class LayerSensitivity:
    """The cost of fewer bits for one layer's weights.

    Args:
        name: the layer in the float model.
        weights: number of its weights.
        costs: bits -> the cost if this layer has these bits, and all other layers are in float.
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
        """Returns the layers sorted by cost, the most sensitive first.

        Args:
            bits: sort by the cost of these bits, by default the fewest.
        """
        layers = [layer for layer in self.layers if layer.costs]
        by = bits or min((min(layer.costs) for layer in layers), default=0)
        return sorted(layers, key=lambda layer: -layer.costs[by])

    def to_dict(self) -> dict[str, object]:
        """Returns the result as JSON data."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        ranked = self.ranked()
        bits = sorted(ranked[0].costs) if ranked else []
        width = max([5, *(len(layer.name) for layer in ranked)])
        lines = [f"{'layer':<{width}}  {'weights':>9}" + "".join(f"{b:>7} bits" for b in bits)]
        for layer in ranked:
            cells = "".join(f"{layer.costs[b]:>12.3g}" for b in bits)
            lines.append(f"{layer.name:<{width}}  {layer.weights:>9}{cells}")
        return "\n".join(lines)


def noise(exact: list[NDArray], outputs: list[NDArray]) -> float:
    """Returns the power of the error relative to the power of the output, averaged over outputs."""
    ratios = [
        np.sum((y - x) ** 2, dtype=np.float64) / max(np.sum(x**2, dtype=np.float64), 1e-30)
        for x, y in zip(exact, outputs, strict=True)
    ]
    return float(np.mean(ratios))


def sort_bits(bits: Iterable[int]) -> list[int]:
    """Returns the bits in ascending order, without duplicates.

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
    model: keras.Model,
    data: Any,
    steps: int | None = None,
    batch_size: int | None = None,
    *,
    bits: Iterable[int] = (2, 4, 6, 8),
    recipe: str | Recipe = "int8",
    measure: Measure = noise,
    verbose: int = 0,
) -> Sensitivity:
    """Ranks the layers of a float model by the cost of fewer bits for their weights.

    It quantizes the weights of one layer at a time, with the others in float. `search_bits`
    assumes that the costs of several layers add up, which is true for small costs.

    In a cluster (a model under `MultiWorkerMirroredStrategy`), all workers must call it with the
    same data. Each worker measures some of the layers, and all return the complete result.

    Args:
        model: a float model, as for `quantize_model`. It is not changed.
        data: 50 to 500 inputs without labels, all held in memory: an array, a list or dict of
            arrays, a `tf.data.Dataset`, a `keras.utils.Sequence`, or a generator of batches.
        steps: number of batches to read; all by default. Required for an infinite dataset.
        batch_size: examples per batch of arrays, 32 by default.
        bits: the bits to try, 2 to 8.
        recipe: the recipe, which determines the quantized layers.
        measure: function that returns the cost, given the float outputs and the outputs with one
            layer quantized, two lists of arrays. The default is the power of the error divided by
            the power of the outputs. If you have labels, it can be a loss.
        verbose: 1 shows progress.

    Returns:
        The costs; print them, or read their `layers`.

    Raises:
        ValueError: if the model cannot be quantized, the data does not match it, `bits` is empty
            or not within 2 to 8, or the recipe's weights have one range per tensor.

    Example:
        >>> print(keras_qat.sensitivity(model, x_train[:128]))
    """
    tried, recipe = sort_bits(bits)[::-1], get_recipe(recipe)
    if not tried:
        raise ValueError("No bits were passed. Try bits=(2, 4, 6, 8).")
    if not recipe.weights.per_channel:
        raise ValueError(
            f"Recipe '{recipe.name}' quantizes weights per tensor, which sensitivity does not "
            f"support. Use recipes.int8()."
        )
    if is_quantized(model):
        raise ValueError(f"'{model.name}' is already quantized. Pass the float model.")
    layers = _find_layers(model, recipe)
    qat = quantize_model(model, recipe)
    read = list(read_batches(qat, data, batch_size, steps, finite=True))
    graph = read_model(qat)
    outputs = make_evaluator(graph, flatten_values(graph.outputs), untraced_runs=0)

    def compute_outputs() -> list[NDArray]:
        by_batch = map(outputs, read)
        return [np.concatenate(output, dtype=np.float32) for output in zip(*by_batch, strict=True)]

    exact = compute_outputs()
    table = np.zeros((len(layers), 1 + len(tried)))
    """A row for each layer: the number of its weights, and its costs."""
    index, workers = get_worker(qat.distribute_strategy)
    own = list(zip(table, layers.values(), strict=True))[index::workers]
    for row, parts in show_progress(own, "Sensitivity", verbose, unit="layer"):
        wrappers = [qat.get_layer(PREFIX + part) for part in parts]
        kernels = [
            (get_weight(wrapper.layer, weight), quantizer.channel_axes)
            for wrapper in wrappers
            for weight, quantizer in wrapper.weight_quantizers.items()
        ]
        row[0] = sum(kernel.shape.num_elements() for kernel, _ in kernels)
        with restore_states([kernel for kernel, _ in kernels]):
            before = [(kernel.numpy(), kernel, axes) for kernel, axes in kernels]
            for column, count in enumerate(tried, 1):
                for value, kernel, axes in before:
                    limits = find_least_squares_limits(value, axes, count)
                    kernel.assign(round_weights(value, limits, count))
                row[column] = measure(exact, compute_outputs())
    total = gather_workers(qat, table).sum(0)
    return Sensitivity(
        tuple(
            LayerSensitivity(name, int(size), dict(zip(tried, map(float, measured), strict=True)))
            for name, (size, *measured) in zip(layers, total.tolist(), strict=True)
        )
    )


def _find_layers(model: keras.Model, recipe: Recipe) -> dict[str, list[str]]:
    """Return layer with quantized weights -> the layers that replace it in the quantized model."""
    parts: dict[str, list[str]] = {}
    planned, seen = plan(model, recipe), set()
    for group in planned.groups:
        layer = group.kernel.layer
        is_variable = bool(group.weights) and not has_computed_kernel(layer)
        if planned.weights[group] is not None and is_variable and layer not in seen:
            seen.add(layer)
            parts.setdefault(group.kernel.origin, []).append(group.kernel.name)
    return parts
