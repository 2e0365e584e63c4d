"""Where the nodes of a graph are drawn: in rows, each below those that it reads."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

__all__ = ["Layout", "laid_out"]

SWEEPS = 12
GAP = 24.0
"""Between two nodes of a row."""
WAY = 14.0
"""The width that an edge takes of a row that it passes."""

Key = Hashable


class Layout(NamedTuple):
    """The places of a graph's nodes, and the ways of its edges.

    Args:
        places: node -> x of its middle, number of its row.
        ways: edge -> x in each row that it passes, from its start to its end.
    """

    places: dict[Key, tuple[float, int]]
    ways: dict[tuple[Key, Key], list[float]]


def laid_out(widths: dict[Key, float], edges: Iterable[tuple[Key, Key]]) -> Layout:
    """Finds the places of nodes: few crossings, straight edges.

    Args:
        widths: node -> its width, in an order in which each comes after those that it reads.
        edges: from a node to one that reads it.
    """
    edges, keys = list(dict.fromkeys(edges)), list(widths)
    rows = _rows(keys, edges)
    chains = {edge: _chain(edge, rows) for edge in edges}
    widths = widths | {key: WAY for chain in chains.values() for key in chain[1:-1]}
    above: dict[Key, list[Key]] = {key: [] for key in widths}
    below: dict[Key, list[Key]] = {key: [] for key in widths}
    for chain in chains.values():
        for upper, lower in itertools.pairwise(chain):
            below[upper].append(lower)
            above[lower].append(upper)
    lines: list[list[Key]] = [[] for _ in range(1 + max(rows.values(), default=0))]
    for key in widths:
        lines[rows[key]].append(key)
    x = {key: float(place) for line in lines for place, key in enumerate(line)}
    for sweep in range(SWEEPS):  # Each between its neighbours: first their order ...
        down = sweep % 2 == 0
        for line in lines if down else reversed(lines):
            middle = {key: _mean(x, (above if down else below)[key], x[key]) for key in line}
            line.sort(key=middle.__getitem__)
            x |= {key: float(place) for place, key in enumerate(line)}
    for line in lines:
        x |= _apart(line, dict.fromkeys(line, 0.0), widths)
    for sweep in range(2 * SWEEPS):  # ... and then how far they are apart.
        down = sweep % 2 == 0
        for line in lines if down else reversed(lines):
            near = (above if down else below) if sweep < SWEEPS else _both(above, below, line)
            x |= _apart(line, {key: _mean(x, near[key], x[key]) for key in line}, widths)
    left = min((x[key] - widths[key] / 2 for key in widths), default=0.0)
    places = {key: (x[key] - left, rows[key]) for key in keys}
    return Layout(places, {edge: [x[key] - left for key in chains[edge]] for edge in edges})


def _rows(keys: list[Key], edges: list[tuple[Key, Key]]) -> dict[Key, int]:
    """The row of each node: below all that it reads, and no higher than its readers ask for."""
    read: dict[Key, list[Key]] = {key: [] for key in keys}
    readers: dict[Key, list[Key]] = {key: [] for key in keys}
    for start, end in edges:
        read[end].append(start)
        readers[start].append(end)
    rows: dict[Key, int] = {}
    for key in keys:
        rows[key] = 1 + max((rows[each] for each in read[key]), default=-1)
    for key in reversed(keys):
        if not read[key] and readers[key]:
            rows[key] = min(rows[each] for each in readers[key]) - 1
    return rows


def _chain(edge: tuple[Key, Key], rows: dict[Key, int]) -> list[Key]:
    """An edge with a node for each row that it passes."""
    start, end = edge
    passed = [(*edge, row) for row in range(rows[start] + 1, rows[end])]
    rows |= {key: key[-1] for key in passed}
    return [start, *passed, end]


def _mean(x: dict[Key, float], near: Sequence[Key], otherwise: float) -> float:
    return sum(x[each] for each in near) / len(near) if near else otherwise


def _both(
    above: dict[Key, list[Key]], below: dict[Key, list[Key]], line: list[Key]
) -> dict[Key, list[Key]]:
    return {key: above[key] + below[key] for key in line}


def _apart(line: list[Key], wanted: dict[Key, float], widths: dict[Key, float]) -> dict[Key, float]:
    """The places nearest to those wanted, in squares, at which nodes do not overlap.

    Nodes that would are moved together, as one block: the regression that keeps an order.
    """
    offsets, end = [], 0.0
    for key in line:
        offsets.append(end + widths[key] / 2)
        end += widths[key] + GAP
    blocks: list[tuple[float, int]] = []
    for key, offset in zip(line, offsets, strict=True):
        middle, count = wanted[key] - offset, 1
        while blocks and blocks[-1][0] > middle:
            other, others = blocks.pop()
            middle = (middle * count + other * others) / (count + others)
            count += others
        blocks.append((middle, count))
    starts = [middle for middle, count in blocks for _ in range(count)]
    return {key: start + each for key, start, each in zip(line, starts, offsets, strict=True)}
