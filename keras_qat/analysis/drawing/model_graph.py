"""Draws a quantization-aware model as a graph of operators with their ranges."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from keras_qat.analysis.drawing.pages import GREY, INK, Picture, new_figure, render, shorten
from keras_qat.analysis.summary import LayerSummary, format_shape, summarize_nodes
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.resolve import resolve
from keras_qat.keras2.backend import keras
from keras_qat.ops.node import Node, Tensor
from keras_qat.training.schedule import check_quantized

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHARED = ("#9ad0f5", "#b7e4a8", "#f7b7d2", "#cfc1f3", "#f6dd86", "#9fe3d6", "#f5b89a", "#c9d39b")
"""Colours of shared ranges."""
OWN, UNSET = "#e4e9ef", "#ffffff"
FLOAT, FLOAT_ROW, EDGE = "#d9730d", "#fdebd3", "#8a97a6"
POINTS, LETTER, LANE = 20.0, 5.4, 13.0
"""Height of a row, width of a letter, and width of a lane for edges, in points."""


class _Row(NamedTuple):
    """A row of the drawing: an operator, an input or an output.

    Args:
        key: the node, or the name of an input or output.
        reads: keys of the rows that compute its inputs.
        words: its name, its operation, and the range, step and shape of its output.
        color: the colour of its range.
        is_float: whether it computes in float.
    """

    key: Node | str
    reads: list[Node | str]
    words: tuple[str, str, str, str, str]
    color: str
    is_float: bool = False


def plot_model(model: keras.Model, to_file: str | os.PathLike[str] | None = None) -> Picture:
    """Draws the operators of a quantization-aware model's file, one per row.

    A row shows the layer, the operator with the bits of its weights, and the range, step and shape
    of its output. Tensors that share a range have the same colour. Float operators are orange and
    show the reason. Lines on the left lead from an operator to its consumers. It needs matplotlib:
    `pip install 'keras-qat[plot]'`.

    Args:
        model: the result of `quantize_model`; its ranges may still be unset.
        to_file: where to write the picture: `.svg`, or `.html`.

    Returns:
        The picture; notebooks show it.

    Raises:
        ValueError: if the model is not quantized or cannot be resolved, or for another suffix.
        ImportError: without matplotlib.

    Example:
        >>> keras_qat.plot_model(qat, "model.svg")
    """
    check_quantized(model)
    graph = resolve(model)
    layers = dict(zip(graph.nodes, summarize_nodes(graph), strict=True))
    picture = _draw(graph.name, _list_rows(graph, layers))
    if to_file is not None:
        picture.save(to_file)
    return picture


def _list_rows(graph: ResolvedGraph, layers: dict[Node, LayerSummary]) -> list[_Row]:
    makers: dict[Tensor, Node | str] = {x: f"input {name}" for name, x in graph.inputs.items()}
    makers |= {tensor: node for node in graph.nodes for tensor in node.outputs}
    colors = _color_shared_ranges(makers)
    rows = [
        _Row(makers[tensor], [], _describe_input(name, tensor), _choose_color(tensor, colors))
        for name, tensor in graph.inputs.items()
    ]
    for node in graph.nodes:
        read = [makers[x] for x in node.inputs if isinstance(x, Tensor)]
        color = _choose_color(node.output, colors, layers[node].scale is not None)
        words = _describe_node(node, layers[node])
        rows.append(_Row(node, list(dict.fromkeys(read)), words, color, node.computes_in_float))
    for name, tensor in graph.outputs.items():
        words = (name, "output", "", "", "")
        rows.append(_Row(f"output {name}", [makers[tensor]], words, UNSET))
    return rows


def _color_shared_ranges(tensors: Iterable[Tensor]) -> dict[int, str]:
    """Return the colours of ranges that several tensors share, by the id of their parameters."""
    counts = Counter(id(tensor.params) for tensor in tensors if tensor.params is not None)
    shared = [params for params, count in counts.items() if count > 1]
    return dict(zip(shared, itertools.cycle(SHARED), strict=False))


def _choose_color(tensor: Tensor, colors: dict[int, str], is_set: bool = True) -> str:
    if tensor.params is None:
        return FLOAT_ROW
    return colors.get(id(tensor.params), OWN if is_set else UNSET)


def _describe_input(name: str, tensor: Tensor) -> tuple[str, str, str, str, str]:
    params, shape = tensor.params, format_shape(tensor.shape)
    if params is None:
        return name, "input", tensor.dtype, "", shape
    low, high = params.range
    step = f"{float(params.scale):.4g}, zero {int(params.zero_point)}"
    return name, "input", f"{params.dtype.name} [{low:.4g}, {high:.4g}]", step, shape


def _describe_node(node: Node, layer: LayerSummary) -> tuple[str, str, str, str, str]:
    kind = layer.operator if node.op or not node.reason else f"float: {node.reason}"
    if node.maximum is not None:
        kind += f" + ReLU{'' if node.maximum > 1e30 else 6}"
    if layer.weight_bits is not None:
        granularity = "weights" if layer.granularity == "per tensor" else layer.granularity
        kind += f" · {layer.weight_bits}-bit {granularity}"
    band, step = node.output.dtype, ""
    if node.output.params is not None and layer.scale is None:
        band = f"{layer.bits} bits, range not set"
    elif layer.scale is not None:
        band = f"int{layer.bits} [{layer.minimum:.4g}, {layer.maximum:.4g}]"
        step = f"{layer.scale:.4g}, zero {layer.zero_point}"
    return layer.name, kind, band, step, format_shape(layer.shape)


def _assign_lanes(rows: list[_Row]) -> dict[Node | str, int]:
    """Return the lane of each row, used by the edges that run down from this row."""
    last = {key: index for index, row in enumerate(rows) for key in row.reads}
    lanes: dict[Node | str, int] = {}
    until: list[int] = []
    """Lane -> the row until which it is in use."""
    for index, row in enumerate(rows):
        free = [lane for lane, end in enumerate(until) if end <= index]
        lanes[row.key] = lane = free[0] if free else len(until)
        until[lane : lane + 1] = [last.get(row.key, index)]
    return lanes


def _draw(name: str, rows: list[_Row]) -> Picture:
    texts = list(zip(*([shorten(words, 60) for words in row.words] for row in rows), strict=True))
    lanes = _assign_lanes(rows)
    lefts = [LANE * (1 + max(lanes.values()))]
    for column in texts:
        lefts.append(lefts[-1] + LETTER * max(map(len, column)) + 14)
    width, height = max(lefts[-1], 420.0) + 24, POINTS * (len(rows) + 3.2)
    figure = new_figure(width / 72, height / 72)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-16, width - 16), ylim=(height - 56, -56))
    axes.set_axis_off()
    left, band = lefts[2] - 6, lefts[3] - lefts[2] - 6
    for index, row in enumerate(rows):
        y = index * POINTS
        if row.is_float:
            axes.barh(y, width, POINTS, left=-16, color=FLOAT_ROW)
        if row.words[2]:
            axes.barh(
                y, band, POINTS - 3, left=left, color=row.color, gid=f"range of {row.words[0]}"
            )
        inks = (FLOAT, FLOAT, INK, GREY, INK) if row.is_float else (INK, GREY) * 2 + (INK,)
        for x, column, ink in zip(lefts, texts, inks, strict=False):
            weight = "bold" if column is texts[0] else "normal"
            axes.text(x, y + 3, column[index], size=9, color=ink, weight=weight)
    _draw_edges(axes, rows, lanes)
    _draw_head(axes, name, rows)
    return render(figure, f"{name}, quantized")


def _draw_edges(axes: Axes, rows: list[_Row], lanes: dict[Node | str, int]) -> None:
    """Draw a dot for each row, and a line from it to each of its consumers."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    spots = {row.key: (LANE * lanes[row.key], POINTS * y) for y, row in enumerate(rows)}
    in_float = {row.key for row in rows if row.is_float}
    curve = [Path.MOVETO, Path.LINETO, Path.CURVE4, Path.CURVE4, Path.CURVE4]
    for row in rows:
        x, y = spots[row.key]
        for key in row.reads:
            left, top = spots[key]
            turn, middle = y - POINTS, y - POINTS / 2
            way = Path([(left, top), (left, turn), (left, middle), (x, middle), (x, y)], curve)
            color, style = (FLOAT, "--") if key in in_float else (EDGE, "-")
            axes.add_patch(PathPatch(way, fill=False, edgecolor=color, linestyle=style, zorder=2))
        color = FLOAT if row.is_float else GREY
        axes.plot(x, y, "o", markersize=5, color=color, zorder=3)


def _draw_head(axes: Axes, name: str, rows: list[_Row]) -> None:
    """Draw the title, the number of operators, and a key of the colours."""
    axes.text(-8, -36, shorten(name, 50), size=14, color=INK, weight="bold")
    in_float = sum(row.is_float for row in rows)
    operators = sum(not isinstance(row.key, str) for row in rows)
    x = -8.0
    counts = f"{operators - in_float} operators in integers, {in_float} in float"
    shared = [row.color for row in rows if row.color in SHARED]
    keys = [("", counts), (OWN, "separate range")]
    keys += [(shared[0], "shared range: same colour")] if shared else []
    keys += [(FLOAT_ROW, "float")] if in_float else []
    for color, words in keys:
        if color:
            axes.barh(-22, 10, 10, left=x, color=color, edgecolor=GREY)
            x += 14
        axes.text(x, -18, words, size=9, color=GREY)
        x += LETTER * len(words) + 14
