"""A quantization-aware model as a graph: operators, ranges, which are shared, islands of float."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from keras_qat.analysis.drawing.layout import Layout, laid_out
from keras_qat.analysis.drawing.svg import Picture, element, fitted, group, label, picture, width_of
from keras_qat.analysis.summary import LayerSummary, summarized
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.resolve import resolve
from keras_qat.ops.node import Node, Tensor
from keras_qat.training.schedule import check_quantized

__all__ = ["plot_model"]

HEIGHT, BAND, ROW = 62.0, 20.0, 96.0
"""Of a box, of the range at its foot, and of a row of boxes."""
NARROWEST, WIDEST, MARGIN, HEAD = 130.0, 280.0, 24.0, 78.0
SHARED = ("#9ad0f5", "#b7e4a8", "#f7b7d2", "#cfc1f3", "#f6dd86", "#9fe3d6", "#f5b89a", "#c9d39b")
"""Colours of ranges that several tensors have."""
OWN, UNSET = "#e4e9ef", "#ffffff"
FLOAT, ISLAND, EDGE = "#d9730d", "#fdebd3", "#8a97a6"


class _Box(NamedTuple):
    """What is drawn for a node or an input."""

    name: str
    kind: str
    band: str
    color: str
    is_float: bool
    told: str

    @property
    def width(self) -> float:
        """As its words need it, within limits."""
        rest = (width_of(words, 11) for words in (self.kind, self.band))
        needed = 20 + max(width_of(self.name, 13) * 1.08, *rest)
        return min(max(NARROWEST, needed), WIDEST)


def plot_model(model: Any, to_file: str | os.PathLike[str] | None = None) -> Picture:
    """Draws what a quantization-aware model computes on a device.

    A box is an operator of the file, with the bits of its weights; at its foot is the range of its
    output. Tensors that share a range have it in the same colour. Layers that compute in float
    are orange, on an island of their own. Details are shown when the pointer is on a box.

    Args:
        model: what `quantize_model` returned; ranges that are not set yet are said to be so.
        to_file: where to write the picture: `.svg`, or `.html`.

    Returns:
        The picture; notebooks show it.

    Raises:
        ValueError: if the model is not quantized or cannot be resolved, or for a file with another
            ending.

    Example:
        >>> keras_qat.plot_model(qat, "model.svg")
    """
    check_quantized(model, ": call keras_qat.quantize_model(model) first.")
    graph = resolve(model)
    layers = dict(zip(graph.nodes, summarized(model, graph), strict=True))
    found = _drawn(graph, layers)
    if to_file is not None:
        found.save(to_file)
    return found


def _drawn(graph: ResolvedGraph, layers: dict[Node, LayerSummary]) -> Picture:
    makers: dict[Tensor, Any] = {each: f"input {name}" for name, each in graph.inputs.items()}
    makers |= {tensor: node for node in graph.nodes for tensor in node.outputs}
    colors = _colors(graph)
    boxes: dict[Any, _Box] = {
        makers[each]: _input_box(name, each, colors) for name, each in graph.inputs.items()
    }
    boxes |= {node: _node_box(node, layers[node], colors) for node in graph.nodes}
    edges: list[tuple[Any, Any]] = [
        (makers[each], node)
        for node in graph.nodes
        for each in node.inputs
        if isinstance(each, Tensor)
    ]
    ends = {f"output {name}": makers[each] for name, each in graph.outputs.items()}
    boxes |= {end: _Box(end.removeprefix("output "), "output", "", OWN, False, end) for end in ends}
    edges += [(maker, end) for end, maker in ends.items()]
    layout = laid_out({key: box.width for key, box in boxes.items()}, edges)
    right = max((x + boxes[key].width / 2 for key, (x, _) in layout.places.items()), default=0.0)
    rows = 1 + max((row for _, row in layout.places.values()), default=0)
    in_float = [each for each in layers.values() if each.operator == "float"]
    shared = sorted(set(colors.values()), key=SHARED.index)
    body = "".join(_head(graph, layers, in_float, shared))
    body += element("g", _body(boxes, layout), transform=f"translate({MARGIN:g} {HEAD:g})")
    width = max(right + 2 * MARGIN, 470.0)
    return picture(f"{graph.name}, quantized", body, width, HEAD + ROW * rows)


def _colors(graph: ResolvedGraph) -> dict[int, str]:
    """Colours of the ranges that several tensors have, by the identity of their parameters."""
    tensors = [*graph.inputs.values(), *(each for node in graph.nodes for each in node.outputs)]
    counts: dict[int, int] = {}
    for each in tensors:
        if each.params is not None:
            counts[id(each.params)] = counts.get(id(each.params), 0) + 1
    shared = [params for params, count in counts.items() if count > 1]
    return dict(zip(shared, itertools.cycle(SHARED), strict=False))


def _input_box(name: str, tensor: Tensor, colors: dict[int, str]) -> _Box:
    band = tensor.dtype
    if tensor.params is not None:
        low, high = (
            float(tensor.params.dequantize(np.array(each)))
            for each in (tensor.params.lowest, tensor.params.highest)
        )
        band = f"{tensor.params.dtype.name} [{low:.4g}, {high:.4g}]"
    color = colors.get(id(tensor.params), OWN if tensor.params else ISLAND)
    return _Box(name, "input", f"{band} · {_shape(tensor.shape)}", color, False, f"input {name}")


def _node_box(node: Node, layer: LayerSummary, colors: dict[int, str]) -> _Box:
    is_float, tensor = node.op is None, node.output
    weights = ""
    if layer.weight_bits is not None:
        weights = f"{layer.weight_bits}-bit" + (
            " weights" if layer.granularity == "per tensor" else f" {layer.granularity}"
        )
    relu = "" if node.maximum is None else f" + ReLU{'' if node.maximum > 1e30 else 6}"
    kind = f"{layer.operator}{relu}" + (f" · {weights}" if weights else "")
    lines = [layer.name, kind, *([node.reason] if node.reason else [])]
    color = colors.get(id(tensor.params), OWN)
    if tensor.params is None:
        band, color = tensor.dtype, ISLAND
    elif layer.scale is None:
        band, color = f"{layer.bits} bits, range not set", colors.get(id(tensor.params), UNSET)
    else:
        band = f"int{layer.bits} [{layer.minimum:.4g}, {layer.maximum:.4g}]"
        lines.append(f"step {layer.scale:.6g}, zero point {layer.zero_point}")
    lines.append(f"{band}, {_shape(layer.shape)}")
    kind = kind if not is_float else f"float: {node.reason}" if node.reason else "float"
    band = f"{band} · {_shape(layer.shape)}"
    return _Box(layer.name, kind, band, color, is_float, "\n".join(lines))


def _shape(shape: tuple[int | None, ...]) -> str:
    return "x".join("?" if size is None else str(size) for size in shape[1:]) or "1"


def _body(boxes: dict[Any, _Box], layout: Layout) -> str:
    """Islands first, then edges, then boxes: each above what was drawn before."""
    islands, edges, drawn = [], [], []
    for (start, end), way in layout.ways.items():
        first = layout.places[start][1]
        bottom = HEIGHT if boxes[start].band else HEIGHT - BAND
        rows = [(first + each) * ROW for each in range(1, len(way))]
        path = _path(way, first * ROW + bottom, rows)
        if boxes[start].is_float and boxes[end].is_float:
            islands.append(element("path", d=path, stroke=ISLAND, stroke_width=60, fill="none"))
        is_float = boxes[start].is_float
        color = FLOAT if is_float else EDGE
        edges.append(
            element(
                "path",
                d=path,
                fill="none",
                stroke=color,
                stroke_width=1.6,
                stroke_dasharray="5 3" if is_float else None,
                marker_end=f"url(#{'float' if is_float else 'int'})",
            )
        )
    for key, (x, row) in layout.places.items():
        box, left, top = boxes[key], x - boxes[key].width / 2, row * ROW
        if box.is_float:
            size = {"width": box.width + 28, "height": HEIGHT + 28, "rx": 20}
            islands.append(element("rect", x=left - 14, y=top - 14, fill=ISLAND, **size))
        drawn.append(_box(box, left, top))
    return _markers() + "".join([*islands, *edges, *drawn])


def _path(way: list[float], start: float, rows: list[float]) -> str:
    """A line from the foot of a box down to the head of another, upright in each row between."""
    d, at = f"M{way[0]:.1f} {start:.1f}", start
    for x, before, row in zip(way[1:], way, rows, strict=False):
        middle = (at + row) / 2
        d += f"C{before:.1f} {middle:.1f} {x:.1f} {middle:.1f} {x:.1f} {row - 3:.1f}"
        at = row + HEIGHT
        if row != rows[-1]:
            d += f"L{x:.1f} {at:.1f}"
    return d


def _box(box: _Box, x: float, y: float) -> str:
    width, height = box.width, HEIGHT if box.band else HEIGHT - BAND
    stroke = FLOAT if box.is_float else "#52606d"
    dashes = "5 3" if box.is_float else None
    parts = [element("rect", x=x, y=y, width=width, height=height, rx=7, fill="white")]
    inner = width - 16
    parts.append(label(x + 8, y + 17, fitted(box.name, inner / 1.08, 13), 13, font_weight="600"))
    fill = FLOAT if box.is_float else "#52606d"
    parts.append(label(x + 8, y + 33, fitted(box.kind, inner, 11), 11, fill=fill))
    if box.band:
        top = y + height - BAND
        d = f"M{x:.1f} {top:.1f}h{width:.1f}v{BAND - 7:g}q0 7 -7 7h{14 - width:.1f}q-7 0 -7 -7z"
        parts.append(element("path", d=d, fill=box.color))
        parts.append(label(x + 8, top + 14, fitted(box.band, inner, 11), 11))
    parts.append(
        element(
            "rect",
            x=x,
            y=y,
            width=width,
            height=height,
            rx=7,
            fill="none",
            stroke=stroke,
            stroke_width=1.3,
            stroke_dasharray=dashes,
        )
    )
    return group("".join(parts), box.told)


def _markers() -> str:
    heads = [
        element(
            "marker",
            element("path", d="M0 0 8 4 0 8z", fill=color),
            id=name,
            viewBox="0 0 8 8",
            refX=6,
            refY=4,
            markerWidth=6,
            markerHeight=6,
            orient="auto",
        )
        for name, color in (("int", EDGE), ("float", FLOAT))
    ]
    return element("defs", "".join(heads))


def _head(
    graph: ResolvedGraph,
    layers: dict[Node, LayerSummary],
    in_float: list[LayerSummary],
    shared: list[str],
) -> Iterator[str]:
    """The title, what is counted, and what the colours mean."""
    yield label(MARGIN, 28, fitted(graph.name, 420, 18), 18, font_weight="700")
    counts = f"{len(layers) - len(in_float)} operators in integers, {len(in_float)} in float"
    yield label(MARGIN, 47, counts, 12, fill="#52606d")
    x = MARGIN
    keys = [(OWN, "range of its own")]
    keys += [(shared[0], "shared range: one colour")] if shared else []
    keys += [(ISLAND, "float")] if in_float else []
    for color, words in keys:
        yield element("rect", x=x, y=54, width=14, height=14, rx=3, fill=color, stroke="#52606d")
        yield label(x + 20, 65, words, 11)
        x += 34 + width_of(words, 11)
