"""Which TFLite runtime belongs to the TensorFlow at hand."""

from __future__ import annotations

import tensorflow as tf

__all__ = ["RECENT"]

RECENT = tuple(int(part) for part in tf.__version__.split(".")[:2]) >= (2, 17)
"""Whether it has all kernels for weights with a scale for each channel. Those before have no
FULLY_CONNECTED of that kind, and XNNPACK takes no such TRANSPOSE_CONV."""
