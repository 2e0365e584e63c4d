"""`summary`: lists bits, ranges, memory and multiply-accumulates of each layer in the file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.resolve import resolve
from keras_qat.keras2.backend import keras
from keras_qat.messages import warn_caller
from keras_qat.ops.multiply_accumulates import count_products, describe_share, integer_share
from keras_qat.ops.node import Constant, Node, Tensor
from keras_qat.training.fake_quantization.weight_quantizer import get_weight
from keras_qat.training.layers import QuantizeWeights
from keras_qat.training.schedule import check_quantized

FLOAT = 4
"""Number of bytes of a float32 value."""


@dataclasses.dataclass(frozen=True)
class LayerSummary:
    """A row of the table: one operator of the model. Sizes are for one example.

    Args:
        name: name of the layer in the float model.
        operator: the operator's name, or "float".
        reason: why the layer computes in float, or "".
        shape: shape of the output.
        bits: bits of the output. None if the layer computes in float.
        minimum, maximum: the float values of the lowest and the highest quantized value. None for
            a float layer. Also None if the model was neither calibrated nor trained.
        scale: float value of one step (LSB). None if `minimum` is None.
        zero_point: the quantized value of 0. None if `minimum` is None.
        weight_bits: bits of the weights. None if the layer has no quantized weights.
        per_channel: whether each output channel has a separate scale. None without weights.
        weight_bytes: bytes of weights and biases in the file, one byte for each 4-bit weight. If
            the model calls a layer several times, later calls have 0 bytes.
        float_weight_bytes: bytes of the same weights in float32.
        activation_bytes: bytes of the output. None if its shape is unknown.
        multiply_accumulates: number of products in a convolution or matrix product. It is 0 for
            other operators, and None if a shape is unknown.
        granularity: how many weights share a scale: "per channel", "per gate" or "per tensor". None
            without weights.
    """

    name: str
    operator: str
    reason: str
    shape: tuple[int | None, ...]
    bits: int | None
    minimum: float | None
    maximum: float | None
    scale: float | None
    zero_point: int | None
    weight_bits: int | None
    per_channel: bool | None
    weight_bytes: int
    float_weight_bytes: int
    activation_bytes: int | None
    multiply_accumulates: int | None
    granularity: str | None = None


@dataclasses.dataclass(frozen=True)
class Summary:
    """The result of `summary`. Prints as a table.

    Args:
        model: the model's name.
        layers: the operators, in the order of computation.
        peak_activation_bytes: peak memory of the activations of one example. Each tensor is freed
            after the last layer that reads it. An interpreter also needs scratch memory for its
            kernels. None if a shape is unknown.
        peak_layer: the layer that runs when memory use is highest.
        float_peak_activation_bytes: `peak_activation_bytes` of the float model.
        target: name of the target that the model was quantized for, or None.
    """

    model: str
    layers: tuple[LayerSummary, ...]
    peak_activation_bytes: int | None
    peak_layer: str | None
    float_peak_activation_bytes: int | None
    target: str | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in the file."""
        return sum(layer.weight_bytes for layer in self.layers)

    @property
    def float_weight_bytes(self) -> int:
        """Bytes that the weights of the file would need in float32."""
        return sum(layer.float_weight_bytes for layer in self.layers)

    @property
    def multiply_accumulates(self) -> int:
        """Number of multiply-accumulates of all integer layers with known sizes."""
        return sum(
            layer.multiply_accumulates or 0 for layer in self.layers if layer.operator != "float"
        )

    @property
    def integer_share(self) -> float | None:
        """Share of multiply-accumulates in integer layers, 0 to 1. None if a count is unknown."""
        return integer_share(self._list_products())

    def _list_products(self) -> list[tuple[bool, int | None]]:
        return [(layer.operator != "float", layer.multiply_accumulates) for layer in self.layers]

    @property
    def float_layers(self) -> dict[str, str]:
        """Maps each layer that computes in float to the reason."""
        return {layer.name: layer.reason for layer in self.layers if layer.operator == "float"}

    @property
    def in_float(self) -> dict[str, str]:
        """Deprecated name of `float_layers`."""
        warn_caller("Summary.in_float is deprecated: use Summary.float_layers.", DeprecationWarning)
        return self.float_layers

    def to_dict(self) -> dict[str, object]:
        """Returns the summary, with totals, as JSON data."""
        totals = {
            "weight_bytes": self.weight_bytes,
            "float_weight_bytes": self.float_weight_bytes,
            "multiply_accumulates": self.multiply_accumulates,
            "integer_share": self.integer_share,
            "in_float": self.float_layers,
        }
        return dataclasses.asdict(self) | totals

    def to_json(self) -> str:
        """Returns the summary as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        table = [COLUMNS, *(tuple(_format_cells(layer)) for layer in self.layers)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        form = "  ".join(f"{{:{'>' if i in RIGHT else '<'}{w}}}" for i, w in enumerate(widths))
        lines = [form.format(*line).rstrip() for line in table]
        lines.insert(1, "  ".join("-" * width for width in widths))
        lines.append(
            f"weights: {_format_size(self.weight_bytes)}, in float "
            f"{_format_size(self.float_weight_bytes)}; "
            f"{_format_count(self.multiply_accumulates)} multiply-accumulates per example"
        )
        if self.peak_activation_bytes is None:
            lines.append("activations: unknown, because some sizes depend on the input")
        else:
            lines.append(
                f"activations: at most {_format_size(self.peak_activation_bytes)} at a time, in "
                f"'{self.peak_layer}'; in float {_format_size(self.float_peak_activation_bytes)}"
            )
        if self.target is not None:
            lines.append(f"target: {self.target}")
        if self.float_layers:
            bits = max((layer.bits or 8 for layer in self.layers), default=8)
            part = describe_share(self._list_products(), bits)
            lines.append(f"{len(self.float_layers)} of {len(self.layers)} compute in float{part}:")
            lines += [f"  {name}: {reason}" for name, reason in self.float_layers.items()]
        return "\n".join(lines)


def summary(model: keras.Model, *, input_range: tuple[float, float] | None = None) -> Summary:
    """Summarizes the file of a quantization-aware model: bits, ranges, memory and MACs.

    Args:
        model: the result of `quantize_model`. Calibrate or train it first, or ranges are not shown.
            For a float model, use `keras_qat.plan`.
        input_range: minimum and maximum of the inputs. Only for models that do not quantize their
            inputs, such as models from `recipes.contrib`. Without it, their inputs and first layers
            count as float.

    Returns:
        The summary. Print it, or read its `layers`.

    Raises:
        ValueError: if the model is not quantized, or cannot be exported.

    Example:
        >>> print(keras_qat.summary(qat))
    """
    check_quantized(model)
    graph = resolve(model, input_range=input_range)
    layers = summarize_nodes(graph)
    peak, at = _find_peak(graph, _count_bytes)
    float_peak, _ = _find_peak(graph, _count_float_bytes)
    target = getattr(graph.origin.target, "name", None)
    return Summary(graph.name, layers, peak, at, float_peak, target)


def summarize_nodes(graph: ResolvedGraph) -> tuple[LayerSummary, ...]:
    names = graph.origin.uncalibrated
    unset = {id(tensor.params) for tensor in graph.tensors.values() if tensor.label in names}
    seen: set[int] = set()
    return tuple(_summarize_node(node, unset, seen) for node in graph.nodes)


def _summarize_node(node: Node, unset: set[int], seen: set[int]) -> LayerSummary:
    output, weights = node.output, node.weights
    bits = output.params.bits if output.params else None
    params = None if id(output.params) in unset else output.params
    is_known = _has_known_sizes(node)
    owner = id(node.layer or node.call.layer)
    sizes = (0, 0) if owner in seen else _count_weight_bytes(node)
    seen.add(owner)
    no_limits: tuple[float | None, float | None] = None, None
    limits = no_limits if params is None else params.range
    count = node.op.products if node.op else count_products
    return LayerSummary(
        output.label or node.name,
        node.op.name if node.op else "float",
        node.reason,
        output.shape,
        bits,
        *limits,
        None if params is None else float(params.scale),
        None if params is None else int(params.zero_point),
        weights.bits if weights else None,
        weights.granularity == "per channel" if weights else None,
        *sizes,
        _count_bytes(output) if is_known else None,
        None if node.call is None else count(node.call),
        weights.granularity if weights else None,
    )


def _has_known_sizes(node: Node) -> bool:
    tensors = [x for x in (*node.inputs, *node.outputs) if isinstance(x, Tensor)]
    return not any(None in tensor.shape[1:] for tensor in tensors)


def _count_weight_bytes(node: Node) -> tuple[int, int]:
    constants = [np.asarray(x.q) for x in node.inputs if isinstance(x, Constant)]
    count = sum(q.size for q in constants)
    held = sum(q.nbytes for q in constants)
    if node.weights is not None:
        bias = 0 if node.weights.bias is None else np.size(node.weights.bias)
        wide = node.output.params is not None and node.output.params.bits == 16
        count += node.weights.count + bias
        held += node.weights.count + (8 if wide else 4) * bias
    elif node.op is None:
        layer = node.call.layer
        inner = getattr(layer, "sublayers", None) or [getattr(layer, "layer", layer)]
        size = sum(_count_elements(weight) for part in inner for weight in part.weights)
        quantized = 0
        if isinstance(layer, QuantizeWeights):
            weights = (get_weight(layer.layer, path) for path in layer.weight_quantizers)
            quantized = sum(map(_count_elements, weights))
        count += size
        held += FLOAT * (size - quantized) + quantized
    return held, FLOAT * count


def _count_elements(variable: tf.Variable) -> int:
    return int(np.prod(variable.shape))


def _count_bytes(tensor: Tensor) -> int:
    if tensor.params is not None:
        return tensor.elements * tensor.params.dtype.itemsize
    return tensor.elements * (FLOAT if tensor.is_float else tf.as_dtype(tensor.dtype).size)


def _count_float_bytes(tensor: Tensor) -> int:
    return tensor.elements * FLOAT if tensor.is_float else _count_bytes(tensor)


def _find_peak(
    graph: ResolvedGraph, size: Callable[[Tensor], int]
) -> tuple[int | None, str | None]:
    """Return the peak memory of activations in bytes, and the layer that runs at the peak."""
    if not all(map(_has_known_sizes, graph.nodes)):
        return None, None
    last: dict[Tensor, int] = dict.fromkeys(graph.inputs.values(), -1)
    aliases: dict[Tensor, Tensor] = {}  # A reshape's result has the memory of its input.

    def get_memory(tensor: Tensor) -> Tensor:
        return aliases.get(tensor, tensor)

    for step, node in enumerate(graph.nodes):
        read = [get_memory(x) for x in node.inputs if isinstance(x, Tensor)]
        if node.op is not None and node.op.alias:
            aliases[node.output] = read[0]
        last |= dict.fromkeys([*read, *map(get_memory, node.outputs)], step)
    last |= dict.fromkeys(map(get_memory, graph.outputs.values()), len(graph.nodes))
    live = set(map(get_memory, graph.inputs.values()))
    peak: tuple[int, str | None] = (sum(map(size, live)), None)
    for step, node in enumerate(graph.nodes):
        live |= set(map(get_memory, node.outputs))
        total = sum(map(size, live)) + _count_copies(node, size)
        if total > peak[0]:
            peak = total, node.output.label or node.name
        live = {tensor for tensor in live if last[tensor] > step}
    return peak


def _count_copies(node: Node, size: Callable[[Tensor], int]) -> int:
    if node.op is not None:
        return 0
    read = {x: _count_float_bytes(x) for x in node.inputs if isinstance(x, Tensor)}
    return sum(count for tensor, count in read.items() if size(tensor) != count)


COLUMNS = (
    *("layer", "operator", "output", "bits", "range", "step", "zero"),
    *("weights", "bytes", "activation", "MACs"),
)
RIGHT = (3, 5, 6, 8, 9, 10)
"""Indices of the columns that are aligned right."""


def _format_cells(layer: LayerSummary) -> Iterator[str]:
    yield layer.name
    yield layer.operator
    yield format_shape(layer.shape)
    yield "-" if layer.bits is None else str(layer.bits)
    if layer.scale is None:
        yield from ("-" if layer.bits is None else "not set", "-", "-")
    else:
        yield f"[{layer.minimum:.4g}, {layer.maximum:.4g}]"
        yield f"{layer.scale:.4g}"
        yield str(layer.zero_point)
    yield "-" if layer.weight_bits is None else f"{layer.weight_bits} bits {layer.granularity}"
    yield _format_size(layer.weight_bytes) if layer.weight_bytes else "-"
    yield "?" if layer.activation_bytes is None else _format_size(layer.activation_bytes)
    macs = layer.multiply_accumulates
    yield "-" if macs == 0 else "?" if macs is None else _format_count(macs)


def format_shape(shape: tuple[int | None, ...]) -> str:
    """Formats the shape of one example: "28x28x1"."""
    return "x".join("?" if size is None else str(size) for size in shape[1:]) or "1"


def _format_size(count: int | None) -> str:
    return "?" if count is None else f"{count} B" if count < 10_000 else f"{_format_count(count)}B"


def _format_count(count: int) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)
