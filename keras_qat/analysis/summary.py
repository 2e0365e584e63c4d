"""Summary of a model on a device: bits, ranges, memory and work of each layer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.resolve import resolve
from keras_qat.ops.multiply_accumulates import count_products, describe_share, integer_share
from keras_qat.ops.node import Constant, Node, Tensor
from keras_qat.training.fake_quantization.weight_quantizer import get_weight
from keras_qat.training.layers import QuantizeWeights
from keras_qat.training.schedule import check_quantized

FLOAT = 4
"""Bytes of a number in float."""


@dataclasses.dataclass(frozen=True)
class LayerSummary:
    """An operator of the model. Sizes are for one example, None where they are unknown.

    Args:
        name: the layer in the float model.
        operator: the operator's name, or "float".
        reason: why it computes in float, else "".
        shape: shape of its output.
        bits: bits of its output, None in float.
        minimum, maximum: the real values of the lowest and the highest code; None in float, and
            before calibration or training have set the range.
        scale: real value of one step (LSB); None where the range is.
        zero_point: the code of 0; None where the range is.
        weight_bits: what the weights were trained with, None for none.
        per_channel: whether each output channel has its own scale, None without weights.
        weight_bytes: bytes of weights and biases in the file, a whole one for each 4-bit weight. 0
            if they were counted for an earlier call.
        float_weight_bytes: bytes of the same numbers in float32.
        activation_bytes: bytes of the output.
        multiply_accumulates: products of its convolution or product of matrices; 0 for other
            operators.
        granularity: what of the weights has a scale of its own: "per channel", "per gate" or
            "per tensor"; None without weights.
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
        layers: in the order of computation.
        peak_activation_bytes: the most bytes that the tensors of one example take at a time, if
            each is kept from its operator to its last reader. An interpreter allocates about as
            much, and scratch memory for its kernels. None if sizes are unknown.
        peak_layer: the layer that computes at that moment.
        float_peak_activation_bytes: the same for the float model.
        target: name of the target that the model was quantized for, None without one.
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
        """Bytes of all weights in float32, with BatchNormalization folded as in the file."""
        return sum(layer.float_weight_bytes for layer in self.layers)

    @property
    def multiply_accumulates(self) -> int:
        """Number of multiply-accumulates of all integer layers whose sizes are known."""
        return sum(
            layer.multiply_accumulates or 0 for layer in self.layers if layer.operator != "float"
        )

    @property
    def integer_share(self) -> float | None:
        """Share of the multiply-accumulates that are integers; None if some are not known."""
        return integer_share(
            (layer.operator != "float", layer.multiply_accumulates) for layer in self.layers
        )

    @property
    def in_float(self) -> dict[str, str]:
        """Layer that computes in float -> the reason."""
        return {layer.name: layer.reason for layer in self.layers if layer.operator == "float"}

    def to_dict(self) -> dict[str, Any]:
        """Returns the summary as JSON data, totals included."""
        totals = (
            *("weight_bytes", "float_weight_bytes"),
            *("multiply_accumulates", "integer_share", "in_float"),
        )
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in totals}

    def to_json(self) -> str:
        """Returns the summary as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        table = [COLUMNS, *(tuple(_cells(layer)) for layer in self.layers)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        form = "  ".join(f"{{:{'>' if i in RIGHT else '<'}{w}}}" for i, w in enumerate(widths))
        lines = [form.format(*line).rstrip() for line in table]
        lines.insert(1, "  ".join("-" * width for width in widths))
        lines.append(
            f"weights: {_size(self.weight_bytes)}, in float {_size(self.float_weight_bytes)}; "
            f"{_count(self.multiply_accumulates)} multiply-accumulates per example"
        )
        if self.peak_activation_bytes is None:
            lines.append("activations: unknown, because some sizes depend on the input")
        else:
            lines.append(
                f"activations: at most {_size(self.peak_activation_bytes)} at a time, in "
                f"'{self.peak_layer}'; in float {_size(self.float_peak_activation_bytes)}"
            )
        if self.target is not None:
            lines.append(f"target: {self.target}")
        if self.in_float:
            share = self.integer_share
            bits = max((layer.bits or 8 for layer in self.layers), default=8)
            part = "" if share is None else f"; {describe_share(share, bits)}"
            lines.append(f"{len(self.in_float)} of {len(self.layers)} compute in float{part}:")
            lines += [f"  {name}: {reason}" for name, reason in self.in_float.items()]
        return "\n".join(lines)


def summary(model: Any, *, input_range: tuple[float, float] | None = None) -> Summary:
    """Summarizes a quantization-aware model as its file holds it: bits, ranges, memory, work.

    Args:
        model: what `quantize_model` returned; without training or calibration its ranges are not
            set. For a float model use `keras_qat.plan`.
        input_range: minimum and maximum of inputs that have no quantizer, as those of
            `recipes.contrib`. Without it such inputs and the layers that read them are float.

    Returns:
        The summary; print it, or read its `layers`.

    Raises:
        ValueError: if the model is not quantization-aware; as `resolve`.

    Example:
        >>> print(keras_qat.summary(qat))
    """
    check_quantized(model)
    graph = resolve(model, input_range=input_range)
    layers = summarized(graph)
    peak, at = _peak(graph, _bytes)
    float_peak, _ = _peak(graph, _float_bytes)
    target = graph.origin.target
    name = None if target is None else target.name
    return Summary(graph.name, layers, peak, at, float_peak, name)


def summarized(graph: ResolvedGraph) -> tuple[LayerSummary, ...]:
    """Returns a row for each node of a model's graph, in its order."""
    names = graph.origin.uncalibrated
    unset = {id(tensor.params) for tensor in graph.tensors.values() if tensor.label in names}
    seen: set[int] = set()
    return tuple(_layer(node, unset, seen) for node in graph.nodes)


def _layer(node: Node, unset: set[int], seen: set[int]) -> LayerSummary:
    output, weights = node.output, node.weights
    bits = output.params.bits if output.params else None
    params = None if id(output.params) in unset else output.params
    is_known = _is_known(node)
    owner = id(node.layer or node.call.layer)
    sizes = (0, 0) if owner in seen else _weight_bytes(node)
    seen.add(owner)
    limits: tuple[float | None, float | None] = (None, None)
    if params is not None:
        low, high = params.dequantize(np.array([params.lowest, params.highest]))
        limits = float(low), float(high)
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
        _bytes(output) if is_known else None,
        _count_products(node),
        weights.granularity if weights else None,
    )


def _count_products(node: Node) -> int | None:
    """Returns the multiply-accumulates of a node; several nodes may come from one call."""
    if node.op is None:
        return count_products(node.call)
    return None if node.call is None else node.op.products(node.call)


def _is_known(node: Node) -> bool:
    """Whether all sizes but the batch's are numbers."""
    tensors = [x for x in (*node.inputs, *node.outputs) if isinstance(x, Tensor)]
    return not any(None in tensor.shape[1:] for tensor in tensors)


def _weight_bytes(node: Node) -> tuple[int, int]:
    """Returns the bytes of a node's weights and constants, in the file and in float."""
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
        quantized = _quantized_numbers(layer)
        numbers = sum(map(_elements, _variables(layer)))
        count += numbers
        held += FLOAT * (numbers - quantized) + quantized
    return held, FLOAT * count


def _variables(layer: Any) -> Iterable[Any]:
    """Returns the weights of a layer, without those of quantizers."""
    inner = getattr(layer, "sublayers", None) or [getattr(layer, "layer", layer)]
    return [weight for part in inner for weight in part.weights]


def _quantized_numbers(layer: Any) -> int:
    """Counts the quantized weights of a layer that computes in float."""
    if not isinstance(layer, QuantizeWeights):
        return 0
    return sum(_elements(get_weight(layer.layer, path)) for path in layer.weight_quantizers)


def _elements(variable: Any) -> int:
    return int(np.prod(variable.shape))


def _bytes(tensor: Tensor) -> int:
    if tensor.params is not None:
        return tensor.elements * tensor.params.dtype.itemsize
    return tensor.elements * (FLOAT if tensor.is_float else tf.as_dtype(tensor.dtype).size)


def _float_bytes(tensor: Tensor) -> int:
    return tensor.elements * FLOAT if tensor.is_float else _bytes(tensor)


def _peak(graph: ResolvedGraph, size: Callable[[Tensor], int]) -> tuple[int | None, str | None]:
    """Returns the most bytes that tensors take at one moment, and the layer that computes then."""
    if not all(map(_is_known, graph.nodes)):
        return None, None
    last: dict[Tensor, int] = dict.fromkeys(graph.inputs.values(), -1)
    root: dict[Tensor, Tensor] = {}
    """Tensor -> the one whose memory it is, where an operator computes nothing."""

    def memory(tensor: Tensor) -> Tensor:
        return root.get(tensor, tensor)

    for step, node in enumerate(graph.nodes):
        read = [memory(x) for x in node.inputs if isinstance(x, Tensor)]
        if node.op is not None and node.op.alias:
            root[node.output] = read[0]
        last |= dict.fromkeys([*read, *map(memory, node.outputs)], step)
    last |= dict.fromkeys(map(memory, graph.outputs.values()), len(graph.nodes))
    live = set(map(memory, graph.inputs.values()))
    peak: tuple[int, str | None] = (sum(map(size, live)), None)
    for step, node in enumerate(graph.nodes):
        live |= set(map(memory, node.outputs))
        total = sum(map(size, live)) + _copies(node, size)
        if total > peak[0]:
            peak = total, node.output.label or node.name
        live = {tensor for tensor in live if last[tensor] > step}
    return peak


def _copies(node: Node, size: Callable[[Tensor], int]) -> int:
    """Returns the bytes of the float copies that a node in float reads."""
    if node.op is not None:
        return 0
    read = {x: _float_bytes(x) for x in node.inputs if isinstance(x, Tensor)}
    return sum(count for tensor, count in read.items() if size(tensor) != count)


COLUMNS = (
    *("layer", "operator", "output", "bits", "range", "step", "zero"),
    *("weights", "bytes", "activation", "MACs"),
)
RIGHT = (3, 5, 6, 8, 9, 10)
"""Columns of numbers."""


def _cells(layer: LayerSummary) -> Iterator[str]:
    yield layer.name
    yield layer.operator
    yield shape_text(layer.shape)
    yield "-" if layer.bits is None else str(layer.bits)
    if layer.scale is None:
        yield from ("-" if layer.bits is None else "not set", "-", "-")
    else:
        yield f"[{layer.minimum:.4g}, {layer.maximum:.4g}]"
        yield f"{layer.scale:.4g}"
        yield str(layer.zero_point)
    yield "-" if layer.weight_bits is None else f"{layer.weight_bits} bits {layer.granularity}"
    yield _size(layer.weight_bytes) if layer.weight_bytes else "-"
    yield "?" if layer.activation_bytes is None else _size(layer.activation_bytes)
    macs = layer.multiply_accumulates
    yield "-" if macs == 0 else "?" if macs is None else _count(macs)


def shape_text(shape: tuple[int | None, ...]) -> str:
    """Formats the shape of one example: "28x28x1"."""
    return "x".join("?" if size is None else str(size) for size in shape[1:]) or "1"


def _size(count: int | None) -> str:
    """Formats a number of bytes."""
    return "?" if count is None else f"{count} B" if count < 10_000 else f"{_count(count)}B"


def _count(count: int) -> str:
    """Formats a number with three digits and a unit."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)
