"""How weight quantization and the BatchNormalization behind a layer go together in training."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_qat import backend
from keras_qat.layers.scheduled import Phase

__all__ = ["FOLDS"]


def normalize_per_channel(wrapper: Any, inputs: Any, phase: Phase) -> Any:
    """Quantizes the kernel as it is, then normalizes: BatchNorm(conv(x, Q(W))).

    With symmetric weights and one range per output channel, Q(a W) = a Q(W) for a per channel
    a, so the codes are those of the folded kernel, with one convolution and Keras' own
    BatchNormalization. Exact when folded at export.
    """
    layer = wrapper.layer
    quantized = {
        name: quantizer(getattr(layer, name), phase)
        for name, quantizer in wrapper.weight_quantizers.items()
    }
    with backend.swapped(layer, **quantized):
        x = layer(inputs)
    if wrapper.batch_norm is None:
        return x
    if phase.training is False or phase.frozen is True:
        learning = False
    else:
        learning = tf.logical_and(phase.training, tf.logical_not(phase.frozen))
    return wrapper.batch_norm(x, training=learning)


FOLDS = {"per_channel": normalize_per_channel}
