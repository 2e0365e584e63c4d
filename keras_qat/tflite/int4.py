"""Packs weights of 4 bits two to a byte."""

from __future__ import annotations

import numpy as np


def in_halves(q: np.ndarray) -> np.ndarray:
    """Packs quantized weights of 4 bits into bytes, the first of two in the lower half."""
    halves = (q.reshape(-1) & 15).astype(np.uint8)
    halves = np.append(halves, np.zeros(halves.size % 2, np.uint8))
    return halves[0::2] | halves[1::2] << 4
