"""BatchNormalization of vectors with TensorFlow's fused operation, as `tf.contrib.slim` did it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_qat.keras2 import backend


@backend.register
class FusedBatchNormalization(backend.keras.layers.BatchNormalization):
    """BatchNormalization behind a dense layer, computed on images of one pixel.

    The moving variance gets Bessel's correction, as it does for images. Keras' own layer keeps the
    biased variance of vectors. `recipes.contrib` uses this layer for each BatchNormalization on
    vectors that is not folded.

    Shapes: [batch, channels].
    """

    def build(self, input_shape: Any) -> None:
        self.axis = [3]
        super().build([input_shape[0], 1, 1, input_shape[-1]])
        self.input_spec = backend.keras.layers.InputSpec(ndim=2)

    def call(self, inputs: Any, training: Any = None) -> Any:
        y = super().call(tf.reshape(inputs, [-1, 1, 1, inputs.shape[-1]]), training=training)
        return tf.reshape(y, [-1, inputs.shape[-1]])
