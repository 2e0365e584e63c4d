"""Inputs that take pixels of 0 to 255 where the model takes rescaled numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.kernel_families import FAMILIES
from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.integer_graph.execute import compute_node
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.keras2.backend import keras
from keras_qat.messages import warn_caller
from keras_qat.ops.conv import AFFINE, CONV
from keras_qat.ops.elementwise import ADD
from keras_qat.ops.node import Constant, Node, Tensor
from keras_qat.ops.slicing import CONCATENATE
from keras_qat.ops.weights import Weights

Rescaling = tuple[Any, Any]
"""Scale and offset, one number or one per channel: the model takes `scale * pixel + offset`."""

RAW: Rescaling = (1.0, 0.0)
"""Rescaling of a model that takes pixels of 0 to 255."""

PIXELS = np.arange(256.0)

ZERO = -128
"""Quantized value of a pixel of 0."""

LARGEST = 127.0
"""Quantized value of constants and weights here: the largest of int8, for the finest scale."""

MOST = 8
"""Most channels that are computed one by one: TFLite Micro concatenates up to 10 tensors."""

POINTWISE = {"strides": 1, "padding": "valid", "dilation": 1, "data_format": "channels_last"}

SIDE_BY_SIDE = dataclasses.replace(
    CONCATENATE, compute=lambda a: tf.concat(a.q, a.attributes["axis"])
)
"""Concatenation of computed channels; no Keras layer maps to this row."""

FEW = 0.6
"""A smaller overlap of the pixels' range and the input's range means another scale."""


def rescalings(rescaling: Any, names: list[str]) -> dict[str, Rescaling]:
    """Reads the argument `rescaling` of `export_tflite` as a rescaling for each input.

    Args:
        rescaling: a rescaling for a model with one input, or a dict of them by name. A rescaling
            is a tuple of scale and offset, or a Keras layer `Rescaling` or `Normalization`.
        names: names of the model's inputs.

    Raises:
        ValueError: for anything else.
    """
    if rescaling is None:
        return {}
    if not isinstance(rescaling, Mapping):
        if len(names) > 1:
            raise ValueError(
                f"rescaling: the model has the inputs {', '.join(names)}. Give a dict by name, of "
                f"those that are pixels."
            )
        rescaling = {names[0]: rescaling}
    unknown = [str(name) for name in rescaling if name not in names]
    if unknown:
        raise ValueError(
            f"rescaling: there is no input '{unknown[0]}'. There are: {', '.join(names)}."
        )
    return {name: _rescaling(name, value) for name, value in rescaling.items()}


def _rescaling(name: str, rescaling: Any) -> Rescaling:
    if isinstance(rescaling, keras.layers.Rescaling):
        rescaling = rescaling.scale, rescaling.offset
    elif isinstance(rescaling, keras.layers.Normalization) and not rescaling.invert:
        mean, variance = (  # A built layer has `mean`, others `input_mean`.
            np.asarray(getattr(rescaling, name, getattr(rescaling, f"input_{name}")), np.float64)
            for name in ("mean", "variance")
        )
        scale = 1 / np.maximum(np.sqrt(variance), keras.backend.epsilon())
        rescaling = scale, -mean * scale
    try:
        scale, offset = (np.asarray(part, np.float64).squeeze() for part in rescaling)
    except (TypeError, ValueError):
        scale = offset = np.array(np.nan)
    if max(scale.ndim, offset.ndim) > 1 or not np.all(np.isfinite(scale) & np.isfinite(offset)):
        raise ValueError(
            f"rescaling of '{name}': give (scale, offset), by which the model's input is scale * "
            f"pixel + offset, as (1 / 127.5, -1), or the Rescaling or Normalization layer that "
            f"was used."
        )
    return scale.tolist(), offset.tolist()


def begins_with_rescaling(graph: ResolvedGraph, tensor: Tensor) -> bool:
    """Whether an input takes pixels: only `Rescaling` or `Normalization` layers read it.

    Its range also has to be about 0 to 255.
    """
    kinds = keras.layers.Rescaling, keras.layers.Normalization
    readers = [node for node in graph.nodes if tensor in node.inputs]
    params = tensor.params
    return (
        bool(readers)
        and all(node.op is AFFINE and isinstance(node.call.layer, kinds) for node in readers)
        and params is not None
        and params.zero_point == ZERO
        and 0.5 < params.scale < 1.01
    )


def with_pixels(
    graph: ResolvedGraph, rescalings: Mapping[str, Rescaling]
) -> tuple[ResolvedGraph, dict[str, Rescaling]]:
    """Returns the graph with inputs that take pixels minus 128 in place of real numbers.

    Returns:
        The graph, and the rescalings of inputs whose numbers differ from the model's. Inputs whose
        quantized values are pixels anyway are left out.

    Raises:
        ValueError: if an input is not quantized to 8 bits or fewer, or has other channels.
    """
    rescaled = {}
    for name, rescaling in rescalings.items():
        nodes = _rescaling_nodes(graph, name, rescaling)
        if not nodes:
            continue
        pixels = nodes[0].inputs[0]
        assert isinstance(pixels, Tensor)
        inputs = {**graph.inputs, name: pixels}
        graph = dataclasses.replace(graph, inputs=inputs, nodes=(*nodes, *graph.nodes))
        if nodes[0].op is not ADD or rescaling[1]:
            rescaled[name] = rescaling
    return graph, rescaled


def _rescaling_nodes(graph: ResolvedGraph, name: str, rescaling: Rescaling) -> list[Node]:
    """Returns nodes that compute an input from pixels minus 128; none where both are the same."""
    tensor = graph.inputs[name]
    params, channels = tensor.params, tensor.shape[-1]
    scale, offset = (np.asarray(part, np.float64) for part in rescaling)
    if params is None or params.bits == 16:
        raise ValueError(f"rescaling: the input '{name}' is not quantized to 8 bits.")
    if len(tensor.shape) < 2 or channels is None or {scale.size, offset.size} - {1, channels}:
        raise ValueError(
            f"rescaling of '{name}': {max(scale.size, offset.size)} numbers do not fit its shape "
            f"{list(tensor.shape)}. Give one number, or one for each of its channels."
        )
    real = (PIXELS[:, None] * scale + offset) * np.ones(channels)
    expected = params.quantize(real.astype(np.float32))
    _check_range(name, real, params)
    if np.array_equal(expected, np.broadcast_to(PIXELS[:, None] + ZERO, expected.shape)):
        return []
    scales, offsets = (np.broadcast_to(part, channels) for part in (scale, offset))
    if scale.size == offset.size == 1 and scale > 0:
        pixels = dataclasses.replace(
            tensor, name=f"{tensor.name}/pixels", params=QuantParams(np.float32(scale), ZERO)
        )
        nodes = [_sum(pixels, tensor, PIXELS * scale, float(offset), expected[:, 0])]
    elif len(tensor.shape) in (3, 4) and channels <= MOST and np.all(scale):
        nodes = _by_channel(tensor, scales, offsets, expected)
    else:
        nodes = [_product(tensor, scales, offsets)]
    _check_codes(name, nodes, expected)
    return nodes


def _node(
    op: Any, attributes: Any, inputs: tuple[Any, ...], output: Tensor, weights: Weights | None
) -> Node:
    name = f"{output.name}/rescaling"
    return Node(name, op, attributes, None, inputs, (output,), weights)  # type: ignore[arg-type]


def _sum(
    pixels: Tensor, output: Tensor, scaled: np.ndarray, offset: float, codes: np.ndarray
) -> Node:
    """Makes a node that adds a constant to scaled pixels, which TFLite kernels do with 20 bits.

    The constant is the offset, moved so that the pixels keep the same distance from the rounding
    boundaries above and below their quantized values.
    """
    params = output.params
    assert params is not None
    assert pixels.params is not None
    scale = pixels.params.scale
    exact = (scaled + offset) / params.scale + params.zero_point
    away = exact - codes  # A clipped value has no boundary on its other side.
    above = np.max(away, initial=-0.5, where=codes < params.highest)
    below = np.min(away, initial=0.5, where=codes > params.lowest)
    moved = float(offset - (above + below) / 2 * params.scale)
    size = np.float32(abs(moved) / LARGEST)
    if size < 1e-6 * scale:  # No implementation takes scales that are so far apart.
        added = Constant(np.zeros(1, np.int8), QuantParams(scale, 0))
    else:
        q = np.array([np.sign(moved) * LARGEST], np.int8)
        added = Constant(q, QuantParams(size, 0))
    return _node(ADD, {"sign": 1}, (pixels, added), output, None)


def _by_channel(
    tensor: Tensor, scale: np.ndarray, offset: np.ndarray, expected: np.ndarray
) -> list[Node]:
    """Makes nodes that rescale each channel: a 1x1 convolution extracts it, and `_sum` follows.

    TFLite kernels of products keep 6 or 7 fractional bits, which would round some pixels the wrong
    way.
    """
    raw = dataclasses.replace(tensor, name=f"{tensor.name}/pixels", params=QuantParams(1.0, ZERO))
    shape, spatial = (*tensor.shape[:-1], 1), len(tensor.shape) - 2
    nodes, parts = [], []
    for channel in range(len(scale)):
        size, sign = np.float32(abs(scale[channel])), np.sign(scale[channel])
        q = np.zeros((*(1,) * spatial, len(scale), 1))
        q[..., channel, 0] = sign * LARGEST
        weights = Weights("kernel", q, np.full((1,) * (spatial + 2), np.float32(size / LARGEST)))
        name = f"{tensor.name}/rescaling/{channel}"
        params = QuantParams(size, ZERO if sign > 0 else -1 - ZERO)
        pixels = dataclasses.replace(tensor, name=f"{name}/pixels", shape=shape, params=params)
        nodes.append(_node(CONV, POINTWISE, (raw,), pixels, weights))
        parts.append(dataclasses.replace(tensor, name=name, shape=shape))
        scaled, codes = PIXELS * scale[channel], expected[:, channel]
        nodes.append(_sum(pixels, parts[-1], scaled, float(offset[channel]), codes))
    axis = len(tensor.shape) - 1
    return [*nodes, _node(SIDE_BY_SIDE, {"axis": axis, "numbers": ()}, tuple(parts), tensor, None)]


def _product(tensor: Tensor, scale: np.ndarray, offset: np.ndarray) -> Node:
    """Makes a node with a weight and a bias for each channel."""
    pixels = dataclasses.replace(
        tensor, name=f"{tensor.name}/pixels", params=QuantParams(1.0, ZERO)
    )
    step = (np.where(scale == 0, 1.0, np.abs(scale)) / LARGEST).astype(np.float32)
    step = step.astype(np.float64)
    weights = Weights("", np.sign(scale) * LARGEST, step, np.round(offset / step))
    return _node(AFFINE, AFFINE.defaults, (pixels,), tensor, weights)


def _check_range(name: str, real: np.ndarray, params: QuantParams) -> None:
    """Warns if pixels are on another scale than the model's input."""
    codes = np.array([params.lowest, params.highest])
    low, high = (codes - params.zero_point) * float(params.scale)
    lowest, highest = min(real.min(), 0.0), max(real.max(), 0.0)  # A range always holds zero.
    if min(high, highest) - max(low, lowest) < FEW * (max(high, highest) - min(low, lowest)):
        warn_caller(
            f"rescaling: pixels of '{name}' become {real.min():.4g} to {real.max():.4g}, but the "
            f"model's input has the range {low:.4g} to {high:.4g}. Give the scale and offset of "
            f"training: the input is scale * pixel + offset."
        )


def _check_codes(name: str, nodes: list[Node], expected: np.ndarray) -> None:
    """Warns if the file quantizes some pixels differently from the model's callers."""
    pixels, output = nodes[0].inputs[0], nodes[-1].output
    assert isinstance(pixels, Tensor)
    assert pixels.params is not None
    assert output.params is not None
    q = np.broadcast_to(PIXELS[:, None] + ZERO - pixels.params.zero_point, expected.shape)
    q_pixels = tf.constant(q.reshape(-1, *(1,) * (len(pixels.shape) - 2), q.shape[-1]), tf.float32)
    wrong = 0.0
    for family in (family for family in FAMILIES.values() if not family.in_float):
        known: dict[Any, Any] = {pixels: q_pixels}
        for node in nodes:
            (known[node.output],) = compute_node(node, [*map(known.get, node.inputs)], family)
        codes = known[output].numpy().reshape(expected.shape) + output.params.zero_point
        wrong = max(wrong, float(np.mean(codes != expected)))
    if wrong:
        warn_caller(
            f"rescaling: {wrong:.1%} of the pixel values of '{name}' lie so near halfway between "
            f"two quantized values that a file may take the other one."
        )
