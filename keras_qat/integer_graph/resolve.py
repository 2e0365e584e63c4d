"""From a quantization-aware model to its resolved graph."""

from __future__ import annotations

from typing import Any

from keras_qat.config.arguments import range_of
from keras_qat.frontend import graph as graph_lib
from keras_qat.frontend.graph import Graph
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.resolve_calls import resolve_calls
from keras_qat.training.schedule import check_process

__all__ = ["resolve"]


def resolve(
    model: Any,
    *,
    input_range: tuple[float, float] | None = None,
    in_graph: bool = False,
    graph: Graph | None = None,
) -> ResolvedGraph:
    """Says what a quantization-aware model computes in integers: operators, scales, weights.

    Args:
        model: a model of quantize-aware layers: what `quantize_model` returned, or a model made of
            parts of such models.
        input_range: minimum and maximum of inputs that have no quantizer, as those of
            `recipes.contrib`; without it they are in float, as is what reads them.
        in_graph: whether ranges and weights are tensors, read whenever the graph runs, instead of
            numbers.
        graph: the model, if it was read already.

    Returns:
        The graph; print it to see every operator with its quantization parameters.

    Raises:
        ValueError: if the model cannot be read, or `input_range` is no range.

    Example:
        >>> print(keras_qat.resolve(qat))
    """
    check_process(model)
    calls = graph or graph_lib.read(model)
    resolved = resolve_calls(calls, input_range=range_of(input_range), in_graph=in_graph)
    target = getattr(model, "target", None)
    return resolved if target is None or target.batch_size is None else resolved.sized()
