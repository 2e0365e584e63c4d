"""Packs weights of 4 bits two to a byte."""

from __future__ import annotations

import math

import numpy as np


def in_halves(q: np.ndarray) -> np.ndarray:
    """Packs quantized weights of 4 bits into bytes, the first of two in the lower half."""
    halves = (q.reshape(-1) & 15).astype(np.uint8)
    halves = np.append(halves, np.zeros(halves.size % 2, np.uint8))
    return halves[0::2] | halves[1::2] << 4


def from_halves(halves: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Unpacks what `in_halves` packed."""
    pairs = np.stack([halves << 4, halves & 240], -1).view(np.int8) >> 4
    return pairs.reshape(-1)[: math.prod(shape)].reshape(shape)
