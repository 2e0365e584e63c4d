"""What custom layers do besides computing, in layers that stay in float."""

import pytest
import tensorflow as tf

from tests.helpers import images, keras, layers, quantize_on


class Closed(layers.Layer):
    """Computes by numpy, and returns None beside it."""

    def call(self, x):
        return tf.ensure_shape(tf.numpy_function(abs, [x], tf.float32), x.shape), None


@pytest.mark.legacy
@pytest.mark.filterwarnings("ignore:These layers compute in float")
def test_none_beside_what_is_computed_in_float():
    inputs, x = keras.Input((3, 4)), images(16, (3, 4))
    hidden, _ = Closed()(layers.Dense(4)(inputs))
    qat = quantize_on(keras.Model(inputs, layers.Dense(2)(hidden)), x)
    assert qat(x).shape == (16, 3, 2)
