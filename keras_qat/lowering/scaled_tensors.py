"""Scales tensors alike before they are concatenated, if a normalization follows."""

from __future__ import annotations

import dataclasses

import numpy as np

from keras_qat.graph.calls import Call, Graph, Value, map_values
from keras_qat.helper_layers.rescaled_norms import RESCALED, seen_statistics
from keras_qat.keras2.backend import layers
from keras_qat.lowering.builder import LoweringContext, PartsBuilder
from keras_qat.ops.registry import match

LEVELS = 255
"""A tensor is lost in a range that is so many times as wide as any of its channels deviates."""
ALIKE = 4
"""Tensors are not scaled whose widths differ by less."""


def scale_tensors(graph: Graph, context: LoweringContext) -> Graph:
    """Rewrites `norm(concat(a, b))` to `norm(concat(a, b / k) * [1, k])` if 8 bits would lose `a`.

    All tensors of a concatenation have one range. The statistics of the normalization tell how
    wide each tensor is. Before training there are none, and nothing changes. `k` is a power of two,
    so the model computes the same to the last bit. The multiplication is part of the normalization,
    whose factors are exact for each channel.
    """
    readers, counts = graph.find_single_consumers(), graph.count_calls()
    replaced: dict[Call, list[Call]] = {}
    for call in graph.calls:
        norm = readers.get(call.output) if isinstance(call.output, Value) else None
        if norm is None or type(norm.layer) not in RESCALED or counts[norm.layer] > 1:
            continue
        if factors := _factors(call, norm, context):
            replaced[call] = _with_scaled_inputs(call, factors, context)
            input_scale = [
                factor
                for x, factor in zip(call.inputs, factors, strict=True)
                for _ in range(x.shape[-1] or 0)
            ]
            replaced[norm] = [_rescaled(norm, input_scale, context)]
    calls = [new for call in graph.calls for new in replaced.get(call, [call])]
    return dataclasses.replace(graph, calls=calls) if replaced else graph


def _factors(call: Call, norm: Call, context: LoweringContext) -> list[float]:
    """Returns what to divide each input of a concatenation by; nothing if no input is lost."""
    op, attributes, _ = match(call)
    rank = len(call.output.shape)
    is_join = op is not None and op.name == "concatenate" and not attributes["numbers"]
    if not is_join or attributes["axis"] != rank - 1 or len(set(call.inputs)) < len(call.inputs):
        return []
    axes = np.ravel(norm.layer.axis) % rank if norm.layer.axis is not None else ()
    sizes = [x.shape[-1] or 0 for x in call.inputs]
    known = norm.layer.built and norm.layer not in context.weights
    if 0 in sizes or list(axes) != [rank - 1] or any(x.masked for x in call.inputs) or not known:
        return []
    mean, deviation = seen_statistics(norm.layer) or (np.zeros(0), np.zeros(0))
    if mean.size != sum(sizes):
        return []
    ends = np.cumsum(sizes)[:-1]
    low = [min(0.0, part.min()) for part in np.split(mean - 2 * deviation, ends)]
    high = [max(0.0, part.max()) for part in np.split(mean + 2 * deviation, ends)]
    most = (max(high) - min(low)) / LEVELS
    if all(part.max() >= most for part in np.split(deviation, ends)):
        return []
    widths = np.subtract(high, low)
    ratios = widths / widths[int(np.argmax(sizes))]
    exponents = np.where(np.abs(np.log2(ratios)) < np.log2(ALIKE), 0, np.round(np.log2(ratios)))
    return [float(2**exponent) for exponent in exponents]


def _with_scaled_inputs(call: Call, factors: list[float], context: LoweringContext) -> list[Call]:
    """Returns a concatenation of inputs that are divided by factors."""
    parts, scaled = PartsBuilder(call, context), {}
    for index, (x, factor) in enumerate(zip(call.inputs, factors, strict=True)):
        if factor != 1:
            layer = parts.new(f"scaled{index}", layers.Rescaling, 1 / factor)
            scaled[x] = parts.add(layer, x, shape=x.shape)
    args, kwargs = map_values(lambda x: scaled.get(x, x), (call.args, call.kwargs))
    return parts.end(call.layer, *args, kwargs=kwargs)


def _rescaled(norm: Call, input_scale: list[float], context: LoweringContext) -> Call:
    """Returns a normalization that multiplies its input by constants first."""
    layer = norm.layer
    config = {**layer.get_config(), "input_scale": input_scale}
    made = context.layer(
        layer,
        "rescaled",
        lambda: RESCALED[type(layer)].from_config(config),
        context.weights_of(layer),
    )
    return Call(made, norm.args, norm.kwargs, norm.outputs, norm.name).as_part_of(norm)
