"""What keeps the converter from quantizing more than the plan says."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_qat.backend import mask_of, set_mask

__all__ = ["barrier"]


def barrier(x: Any) -> Any:
    """`x`, in a form behind which the converter quantizes nothing.

    It would put a layer in float between quantized tensors into integers, weights included, which
    training has not simulated. A cast and back is exact, and no folding removes it.
    """
    if x.dtype != tf.float32:
        return x
    y = tf.cast(tf.cast(x, tf.float64), tf.float32)
    set_mask(y, mask_of(x))
    return y
