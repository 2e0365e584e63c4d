"""Resolves quantization-aware models: makes their resolved graphs."""

from __future__ import annotations

import dataclasses
from typing import Any

from keras_qat.arithmetic.kernel_families import XNNPACK, KernelFamily, kernel_family
from keras_qat.config.arguments import range_of
from keras_qat.config.targets.target import Target, get_target
from keras_qat.graph.calls import Graph
from keras_qat.graph.read_model import read_model
from keras_qat.integer_graph.graph import Origin, ResolvedGraph
from keras_qat.integer_graph.passes import with_int4
from keras_qat.integer_graph.resolve_calls import resolve_calls
from keras_qat.io.inputs import get_inputs
from keras_qat.tflite.metadata import compute_fingerprint
from keras_qat.training.quantizers import list_activation_quantizers
from keras_qat.training.readiness import (
    check_exportable,
    describe_difference,
    explain_untrained,
)
from keras_qat.training.recurrent import (
    list_states,
)
from keras_qat.training.schedule import check_is_graph, check_process, get_file_model, get_recipe


def resolve(model: Any, *, input_range: tuple[float, float] | None = None) -> ResolvedGraph:
    """Says what a quantization-aware model computes in integers: operators, scales, weights.

    Args:
        model: a model of quantize-aware layers: what `quantize_model` returned, or a model made of
            parts of such models.
        input_range: minimum and maximum of inputs that have no quantizer, as those of
            `recipes.contrib`; without it they are in float, as is what reads them.

    Returns:
        The graph; print it to see every operator with its quantization parameters.

    Raises:
        ValueError: if the model cannot be read, or `input_range` is no range.

    Example:
        >>> print(keras_qat.resolve(qat))
    """
    check_process(model)
    model = get_file_model(model)
    calls = read_model(model)
    for call in calls.calls:
        check_is_graph(call.layer)
    resolved = resolve_calls(calls, input_range=range_of(input_range))
    origin = origin_of(model, calls)
    return dataclasses.replace(_sized(resolved, origin.target), origin=origin)


def resolve_to_export(
    model: Any, *, input_range: tuple[float, float] | None = None
) -> ResolvedGraph:
    """Resolves a model that is to be exported or simulated, for which it has to be trained.

    Raises:
        ValueError: as `resolve`; and if the model is not quantized, a quantizer has no usable
            range or a weight is not finite.
    """
    check_exportable(model)
    return resolve(model, input_range=input_range)


def resolve_in_graph(
    calls: Graph, target: Target | None, packing: KernelFamily | None = None
) -> ResolvedGraph:
    """Resolves a model's calls with tensors for ranges and weights, read whenever the graph runs.

    The graph's `origin` is empty: the model itself runs it.

    Args:
        calls: the calls of the model.
        target: where its file is to run.
        packing: the kernel family for which weights of at most 4 bits are packed; None: not packed.
    """
    graph = resolve_calls(calls, in_graph=True)
    return _sized(graph if packing is None else with_int4(graph, packing), target)


def _sized(graph: ResolvedGraph, target: Target | None) -> ResolvedGraph:
    """Makes operators round as with a known batch size where the target has one."""
    return graph if target is None or target.batch_size is None else graph.sized()


def origin_of(model: Any, calls: Graph) -> Origin:
    """Reads the facts about a quantization-aware model that its calls do not tell."""
    recipe = get_recipe(model)
    uncalibrated = {
        name
        for quantizer in list_activation_quantizers(model)
        if not quantizer.calibrated
        for name in quantizer.quantizes
    }
    unlike_float = describe_difference(model)
    return Origin(
        calls=calls,
        inputs=get_inputs(model),
        recipe=recipe,
        family=kernel_family(getattr(model, "kernels", XNNPACK.name)),
        simulates=getattr(model, "simulates", True),
        target=get_target(model),
        packs_int4=getattr(model, "pack_int4", False),
        states=list_states(model),
        uncalibrated=frozenset(uncalibrated),
        fingerprint=compute_fingerprint(model),
        warnings=tuple(filter(None, [unlike_float, *explain_untrained(model, calls)])),
        unlike_float=unlike_float,
    )
