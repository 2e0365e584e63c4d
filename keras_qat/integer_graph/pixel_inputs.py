"""Lets a file accept pixels, 0 to 255, although the model expects rescaled values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from keras_qat.arithmetic.kernel_families import FAMILIES
from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.integer_graph.execute import compute_node
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.keras2.backend import keras
from keras_qat.messages import warn_caller
from keras_qat.ops.conv import AFFINE, CONV
from keras_qat.ops.elementwise import ADD
from keras_qat.ops.node import Constant, Node, Operand, Tensor
from keras_qat.ops.op import Op
from keras_qat.ops.slicing import CONCATENATE
from keras_qat.ops.weights import Weights

Rescaling = tuple[Any, Any]
"""Pairs `(scale, offset)` of scalars or lists. The model reads `scale * pixel + offset`."""

RAW: Rescaling = (1.0, 0.0)
"""The rescaling for a model that reads pixels, 0 to 255."""

PIXELS = np.arange(256.0)

ZERO = -128
"""Quantized value of pixel 0."""

LARGEST = 127.0
"""Quantized value of positive weights and added constants. Negative ones become -127."""

MOST = 8
"""Maximum number of channels that are rescaled one by one and concatenated. TFLite Micro
concatenates up to 10 tensors."""

POINTWISE = {"strides": 1, "padding": "valid", "dilation": 1, "data_format": "channels_last"}

CONCATENATE_CHANNELS = dataclasses.replace(
    CONCATENATE, compute=lambda a: tf.concat(a.q, a.attributes["axis"])
)
"""Concatenates the rescaled channels of an image."""

FEW = 0.6
"""`_check_range` warns if two ranges overlap by less than this share of their union."""


def read_rescalings(rescaling: Any, names: list[str]) -> dict[str, Rescaling]:
    """Reads the argument `rescaling` of `export_tflite`. Returns `{input name: rescaling}`."""
    if rescaling is None:
        return {}
    if not isinstance(rescaling, Mapping):
        if len(names) > 1:
            raise ValueError(
                f"rescaling: the model has the inputs {', '.join(names)}. Pass a dict "
                f"that maps the name of each image input to its rescaling."
            )
        rescaling = {names[0]: rescaling}
    unknown = [str(name) for name in rescaling if name not in names]
    if unknown:
        raise ValueError(
            f"rescaling: there is no input '{unknown[0]}'. The inputs are: {', '.join(names)}."
        )
    return {name: _read_rescaling(name, value) for name, value in rescaling.items()}


def _read_rescaling(name: str, rescaling: Any) -> Rescaling:
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
        scale, offset = (np.asarray(x, np.float64).squeeze() for x in rescaling)
    except (TypeError, ValueError):
        scale = offset = np.array(np.nan)
    if max(scale.ndim, offset.ndim) > 1 or not np.all(np.isfinite(scale) & np.isfinite(offset)):
        raise ValueError(
            f"rescaling of '{name}': pass (scale, offset), such as (1 / 127.5, -1), for a model "
            f"input of scale * pixel + offset. Or pass the Rescaling or Normalization layer that "
            f"was used."
        )
    return scale.tolist(), offset.tolist()


def begins_with_rescaling(graph: ResolvedGraph, tensor: Tensor) -> bool:
    """Returns whether an input has the range of pixels, and only rescaling layers read it."""
    kinds = keras.layers.Rescaling, keras.layers.Normalization
    consumers = [node for node in graph.nodes if tensor in node.inputs]
    params = tensor.params
    return (
        bool(consumers)
        and all(node.op is AFFINE and isinstance(node.call.layer, kinds) for node in consumers)
        and params is not None
        and params.zero_point == ZERO
        and 0.5 < params.scale < 1.01
    )


def accept_pixels(
    graph: ResolvedGraph, rescalings: Mapping[str, Rescaling]
) -> tuple[ResolvedGraph, dict[str, Rescaling]]:
    """Replaces inputs by int8 inputs for pixels minus 128. Adds nodes that rescale the pixels.

    Returns:
        The graph, and the rescalings that the file computes. A rescaling by one positive factor is
        omitted, because it only changes the input's scale.

    Raises:
        ValueError: if an input is float or 16-bit, or if a rescaling does not fit the channels.
    """
    rescaled = {}
    for name, rescaling in rescalings.items():
        nodes = _make_nodes(graph, name, rescaling)
        if not nodes:
            continue
        pixels = nodes[0].inputs[0]
        assert isinstance(pixels, Tensor)
        inputs = {**graph.inputs, name: pixels}
        graph = dataclasses.replace(graph, inputs=inputs, nodes=(*nodes, *graph.nodes))
        if nodes[0].op is not ADD or rescaling[1]:
            rescaled[name] = rescaling
    return graph, rescaled


def _make_nodes(graph: ResolvedGraph, name: str, rescaling: Rescaling) -> list[Node]:
    """Return nodes that compute an input from pixels minus 128, or [] if no node is needed."""
    tensor = graph.inputs[name]
    params, channels = tensor.params, tensor.shape[-1]
    scale, offset = (np.asarray(x, np.float64) for x in rescaling)
    if params is None or params.bits == 16:
        raise ValueError(f"rescaling: the input '{name}' is not quantized to 8 bits.")
    if len(tensor.shape) < 2 or channels is None or {scale.size, offset.size} - {1, channels}:
        raise ValueError(
            f"rescaling of '{name}': {max(scale.size, offset.size)} values do not fit its shape "
            f"{list(tensor.shape)}. Pass one value, or one for each of its channels."
        )
    values = (PIXELS[:, None] * scale + offset) * np.ones(channels)
    expected = params.quantize(values.astype(np.float32))
    _check_range(name, values, params)
    if np.array_equal(expected, np.broadcast_to(PIXELS[:, None] + ZERO, expected.shape)):
        return []
    scales, offsets = (np.broadcast_to(x, channels) for x in (scale, offset))
    if scale.size == offset.size == 1 and scale > 0:
        pixels = dataclasses.replace(
            tensor, name=f"{tensor.name}/pixels", params=QuantParams(np.float32(scale), ZERO)
        )
        nodes = [_make_sum(pixels, tensor, PIXELS * scale, float(offset), expected[:, 0])]
    elif len(tensor.shape) in (3, 4) and channels <= MOST and np.all(scale):
        nodes = _make_channels(tensor, scales, offsets, expected)
    else:
        nodes = [_make_product(tensor, scales, offsets)]
    _check_values(name, nodes, expected)
    return nodes


def _make_node(
    op: Op,
    attributes: Mapping[str, Any],
    inputs: tuple[Operand, ...],
    output: Tensor,
    weights: Weights | None,
) -> Node:
    name = f"{output.name}/rescaling"
    return Node(name, op, attributes, None, inputs, (output,), weights)  # type: ignore[arg-type]


def _make_sum(
    pixels: Tensor, output: Tensor, scaled: NDArray, offset: float, expected: NDArray
) -> Node:
    """Make an ADD of scaled pixels and a constant. TFLite computes an ADD with 20 extra bits.

    Many constants lead to the expected results. The middle of their range is used.
    """
    params = output.params
    assert params is not None
    assert pixels.params is not None
    scale = pixels.params.scale
    exact = (scaled + offset) / params.scale + params.zero_point
    away = exact - expected  # A clipped value has only one boundary.
    above = np.max(away, initial=-0.5, where=expected < params.highest)
    below = np.min(away, initial=0.5, where=expected > params.lowest)
    moved = float(offset - (above + below) / 2 * params.scale)
    size = np.float32(abs(moved) / LARGEST)
    if size < 1e-6 * scale:  # No kernel supports scales with such a large ratio.
        added = Constant(np.zeros(1, np.int8), QuantParams(scale, 0))
    else:
        q = np.array([np.sign(moved) * LARGEST], np.int8)
        added = Constant(q, QuantParams(size, 0))
    return _make_node(ADD, {"sign": 1}, (pixels, added), output, None)


def _make_channels(
    tensor: Tensor, scale: NDArray, offset: NDArray, expected: NDArray
) -> list[Node]:
    """Make nodes that extract each channel with a 1x1 convolution and add the channel's offset.

    A multiplication would round some pixels incorrectly, because TFLite's kernels multiply with
    only 6 or 7 fractional bits.
    """
    raw = dataclasses.replace(tensor, name=f"{tensor.name}/pixels", params=QuantParams(1.0, ZERO))
    shape, spatial = (*tensor.shape[:-1], 1), len(tensor.shape) - 2
    nodes, results = [], []
    for channel in range(len(scale)):
        size, sign = np.float32(abs(scale[channel])), np.sign(scale[channel])
        q = np.zeros((*(1,) * spatial, len(scale), 1))
        q[..., channel, 0] = sign * LARGEST
        weights = Weights("kernel", q, np.full((1,) * (spatial + 2), np.float32(size / LARGEST)))
        name = f"{tensor.name}/rescaling/{channel}"
        params = QuantParams(size, ZERO if sign > 0 else -1 - ZERO)
        pixels = dataclasses.replace(tensor, name=f"{name}/pixels", shape=shape, params=params)
        nodes.append(_make_node(CONV, POINTWISE, (raw,), pixels, weights))
        results.append(dataclasses.replace(tensor, name=name, shape=shape))
        scaled, column = PIXELS * scale[channel], expected[:, channel]
        nodes.append(_make_sum(pixels, results[-1], scaled, float(offset[channel]), column))
    axis = len(tensor.shape) - 1
    return [
        *nodes,
        _make_node(
            CONCATENATE_CHANNELS, {"axis": axis, "numbers": ()}, tuple(results), tensor, None
        ),
    ]


def _make_product(tensor: Tensor, scale: NDArray, offset: NDArray) -> Node:
    pixels = dataclasses.replace(
        tensor, name=f"{tensor.name}/pixels", params=QuantParams(1.0, ZERO)
    )
    step = (np.where(scale == 0, 1.0, np.abs(scale)) / LARGEST).astype(np.float32)
    step = step.astype(np.float64)
    weights = Weights("", np.sign(scale) * LARGEST, step, np.round(offset / step))
    return _make_node(AFFINE, AFFINE.defaults, (pixels,), tensor, weights)


def _check_range(name: str, values: NDArray, params: QuantParams) -> None:
    """Warn if the range of rescaled pixels hardly overlaps the range of the model's input."""
    low, high = params.range
    lowest, highest = min(values.min(), 0.0), max(values.max(), 0.0)  # Ranges include zero.
    if min(high, highest) - max(low, lowest) < FEW * (max(high, highest) - min(low, lowest)):
        warn_caller(
            f"rescaling: pixels of '{name}' become {values.min():.4g} to {values.max():.4g}, but "
            f"the model's input has the range {low:.4g} to {high:.4g}. Pass the scale and offset "
            f"of training: the input is scale * pixel + offset."
        )


def _check_values(name: str, nodes: list[Node], expected: NDArray) -> None:
    """Warn if the file would quantize some pixel values differently from the model."""
    pixels, output = nodes[0].inputs[0], nodes[-1].output
    assert isinstance(pixels, Tensor)
    assert pixels.params is not None
    assert output.params is not None
    q = np.broadcast_to(PIXELS[:, None] + ZERO - pixels.params.zero_point, expected.shape)
    q_pixels = tf.constant(q.reshape(-1, *(1,) * (len(pixels.shape) - 2), q.shape[-1]), tf.float32)
    wrong = 0.0
    for family in FAMILIES.values():
        known: dict[Any, Any] = {pixels: q_pixels}
        for node in nodes:
            (known[node.output],) = compute_node(node, [*map(known.get, node.inputs)], family)
        found = known[output].numpy().reshape(expected.shape) + output.params.zero_point
        wrong = max(wrong, float(np.mean(found != expected)))
    if wrong:
        warn_caller(
            f"rescaling: {wrong:.1%} of the pixel values of '{name}' are so close to the middle of "
            f"two quantized values that the file may round them differently."
        )
