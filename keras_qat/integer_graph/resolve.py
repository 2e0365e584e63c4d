"""Resolves a quantization-aware model: returns the integer computation as a graph of operators."""

from __future__ import annotations

import dataclasses

from keras_qat.arithmetic.kernel_families import XNNPACK, KernelFamily, kernel_family
from keras_qat.config.arguments import read_input_range
from keras_qat.config.targets.target import Target, get_target
from keras_qat.graph.calls import Graph
from keras_qat.graph.read_model import read_model
from keras_qat.integer_graph.graph import Origin, ResolvedGraph
from keras_qat.integer_graph.passes import pack_int4
from keras_qat.integer_graph.resolve_calls import resolve_calls
from keras_qat.io.inputs import get_inputs
from keras_qat.keras2.backend import keras
from keras_qat.tflite.metadata import compute_fingerprint
from keras_qat.training.quantizers import list_activation_quantizers
from keras_qat.training.readiness import check_exportable, describe_difference, explain_untrained
from keras_qat.training.recurrent import list_states
from keras_qat.training.schedule import check_is_graph, check_process, get_file_model, get_recipe


def resolve(model: keras.Model, *, input_range: tuple[float, float] | None = None) -> ResolvedGraph:
    """Returns the integer computation of a quantization-aware model: operators, scales, weights.

    Args:
        model: the result of `quantize_model`, or a model built from layers of such models.
        input_range: minimum and maximum of the model's inputs if they have no quantizer, as in
            `recipes.contrib`. By default, these inputs and their consumers are float.

    Returns:
        The graph. Print it to see every operator with its quantization parameters.

    Raises:
        ValueError: if the model cannot be read, or `input_range` is not a range.

    Example:
        >>> print(keras_qat.resolve(qat))
    """
    check_process(model)
    model = get_file_model(model)
    calls = read_model(model)
    for call in calls.calls:
        check_is_graph(call.layer)
    resolved = resolve_calls(calls, input_range=read_input_range(input_range))
    origin = _read_origin(model, calls)
    return dataclasses.replace(_fix_batch(resolved, origin.target), origin=origin)


def resolve_to_export(
    model: keras.Model, *, input_range: tuple[float, float] | None = None
) -> ResolvedGraph:
    """Resolves a trained model for export or simulation.

    Raises:
        ValueError: as in `resolve`, or if the model is not quantized, a quantizer has no usable
            range, or a weight is not finite.
    """
    check_exportable(model)
    return resolve(model, input_range=input_range)


def resolve_in_graph(
    calls: Graph, target: Target | None, packing: KernelFamily | None = None
) -> ResolvedGraph:
    """Returns a resolved graph in which ranges and weights are tensors of a TensorFlow graph.

    Each run of the TensorFlow graph reads the current variables. If `packing` is a kernel family,
    weights are packed into 4 bits for this family.
    """
    graph = resolve_calls(calls, in_graph=True)
    return _fix_batch(graph if packing is None else pack_int4(graph, packing), target)


def _fix_batch(graph: ResolvedGraph, target: Target | None) -> ResolvedGraph:
    """Return a graph that rounds like a file with a fixed batch size, if the target has one."""
    is_open = target is None or target.batch_size is None
    return graph if is_open else graph.assume_fixed_batch()


def _read_origin(model: keras.Model, calls: Graph) -> Origin:
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
