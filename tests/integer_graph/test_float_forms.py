"""Layers in float whose form in files is another one than Keras' own: both compute the same."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from keras_qat.frontend.keras2.backend import keras
from keras_qat.integer_graph.float_forms import form_of
from tests.helpers import rng, scramble

layers = keras.layers

FORMS = [
    *(
        (kind, {**options, "center": center, "scale": scale}, shape)
        for kind, options, shape in [
            (layers.LayerNormalization, {}, (5, 6)),
            (layers.LayerNormalization, {"axis": (1, 3)}, (4, 3, 6)),
            (layers.GroupNormalization, {"groups": 2}, (4, 3, 6)),
            (layers.GroupNormalization, {"groups": 3, "axis": 1}, (6, 5)),
        ]
        for center, scale in [(True, True), (False, True), (True, False)]
    ),
    *(
        (layers.CategoryEncoding, {"num_tokens": 5, "output_mode": mode}, (4,))
        for mode in ("count", "multi_hot")
    ),
    (layers.Resizing, {"height": 3, "width": 5}, (6, 5, 2)),
    (layers.RandomCrop, {"height": 3, "width": 4}, (6, 5, 2)),
]


@pytest.mark.parametrize(("kind", "options", "shape"), FORMS)
def test_a_form_computes_what_its_layer_does(kind, options, shape):
    layer = kind(**options)
    inputs = keras.Input(shape)
    model = scramble(keras.Model(inputs, layer(inputs)))
    x = tf.constant(rng().integers(0, 5, (2, *shape)), tf.float32)
    form = form_of(layer)
    assert form is not None
    np.testing.assert_allclose(form(layer, x), model(x, training=False), rtol=1e-4, atol=1e-5)
