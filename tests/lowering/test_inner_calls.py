"""Tests inner layers called with `training` and `mask` by position, by name and by other names."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.helpers import build_model, keras, layers, rng

pytestmark = pytest.mark.legacy


def shown(x):
    """Returns 1 for about half of the steps, unlike a dense layer with random weights."""
    return tf.cast(x[..., :1] > 0, tf.float32)


class Encoder(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense, self.drop = layers.Dense(4), layers.Dropout(0.5)

    def call(self, x, training=None, mask=None):
        y = self.drop(self.dense(x), training)
        return y if mask is None else y * mask


class Required(Encoder):
    def call(self, x, training, mask):
        return super().call(x, training, mask)


class OtherName(Encoder):
    def call(self, x, is_training=False, mask=None):
        y = self.dense(x)
        if is_training:
            y = self.drop(y, training=True)
        return y if mask is None else y * mask


class Variadic(Encoder):
    def call(self, x, training, *masks):
        return super().call(x, training, masks[0])


class AfterStates(Encoder):
    def call(self, x, *states, training=None):
        return super().call(x, training, states[0])


class Nested(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.encoder = Encoder()

    def call(self, this, training=None, mask=None):
        return self.encoder(this, training, mask) + 0.1 * self.encoder(this, training)


class Pooled(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.pool, self.drop = layers.GlobalAveragePooling1D(), layers.Dropout(0.5)

    def call(self, x, training=None, mask=None):
        return self.drop(self.pool(x, mask=mask), training=training)


def functional():
    inputs = keras.Input((6, 4))
    return keras.Model(inputs, layers.Dropout(0.5)(layers.GlobalAveragePooling1D()(inputs)))


class Outer(keras.Model):
    def __init__(self, inner, how):
        super().__init__()
        self.inner, self.how = inner, how

    def call(self, x, training=None):
        return self.how(self.inner, x, training)


def padding(x):
    return tf.greater(x[..., 0], 0.0)


CALLS = {
    "both by position": (Encoder, lambda e, x, phase: e(x, phase, shown(x))),
    "both required": (Required, lambda e, x, phase: e(x, phase, shown(x))),
    "training by position": (Encoder, lambda e, x, phase: e(x, phase)),
    "mask by name": (Encoder, lambda e, x, phase: e(x, phase, mask=shown(x))),
    "nested twice": (Nested, lambda e, x, phase: e(x, phase, shown(x))),
    "functional": (functional, lambda e, x, phase: e(x, phase, padding(x))),
    "pooled": (Pooled, lambda e, x, phase: e(x, phase, padding(x))),
    "another name": (OtherName, lambda e, x, phase: e(x, is_training=phase)),
    "another name by position": (OtherName, lambda e, x, phase: e(x, phase, shown(x))),
    "variadic": (Variadic, lambda e, x, phase: e(x, phase, shown(x))),
    "after states": (AfterStates, lambda e, x, phase: e(x, shown(x), training=phase)),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", CALLS)
def test_inner_layers_get_all_of_their_arguments(kind):
    inner, how = CALLS[kind]
    keras.utils.set_random_seed(0)
    model = build_model((6, 4), Outer(inner(), how))
    qat = keras_qat.quantize_model(model)
    keras_qat.set_quantization(qat, enabled=False)
    x = rng().normal(size=(64, 6, 4)).astype("float32")
    np.testing.assert_allclose(qat(x), model(x), atol=1e-5)
    zeros = [np.mean(np.asarray(each(x, training=True)) == 0) for each in (model, qat)]
    assert zeros[0] > 0.3  # The dropout, and the masked steps.
    assert abs(zeros[0] - zeros[1]) < 0.06
