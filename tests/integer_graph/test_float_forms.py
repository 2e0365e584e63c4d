"""Tests that replacements of float layers in files compute the same as Keras' layers."""

import numpy as np
import pytest
import tensorflow as tf

from keras_qat.integer_graph.float_layers import find_variant, rnn
from tests.helpers import assert_all_close, build_model, keras, layers, rng, scramble

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
    (layers.CategoryEncoding, {"num_tokens": 5, "output_mode": "count"}, (4,)),
    (layers.CategoryEncoding, {"num_tokens": 5, "output_mode": "multi_hot"}, (4,)),
    (layers.CategoryEncoding, {"num_tokens": 5, "output_mode": "one_hot"}, (1,)),
    (layers.CategoryEncoding, {"num_tokens": 5, "output_mode": "one_hot"}, ()),
    (layers.Activation, {"activation": "softsign"}, (4,)),
    (layers.Activation, {"activation": "tanh"}, (4,)),
    (layers.Resizing, {"interpolation": "nearest", "height": 3, "width": 5}, (6, 5, 2)),
    (layers.Resizing, {"height": 3, "width": 5}, (6, 5, 2)),
    (layers.Conv3D, {"filters": 4, "kernel_size": 2, "groups": 2}, (3, 4, 5, 6)),
    (layers.RandomCrop, {"height": 3, "width": 4}, (6, 5, 2)),
]


@pytest.mark.sample(7)
@pytest.mark.parametrize(("kind", "options", "shape"), FORMS)
def test_a_form_computes_what_its_layer_does(kind, options, shape):
    layer = kind(**options)
    model = scramble(build_model(shape, layer))
    x = tf.constant(rng().integers(0, 5, (2, *shape)), tf.float32)
    form = find_variant(layer)
    assert form is not None
    np.testing.assert_allclose(form(layer, x), model(x, training=False), rtol=1e-4, atol=1e-5)


def test_tokens_are_counted_by_weights():
    layer = layers.CategoryEncoding(4, output_mode="count")
    x, weights = tf.constant([[0, 3, 3], [1, 0, 1]]), tf.constant([[0.5, 2, 3], [1, 4, 0.25]])
    form = find_variant(layer)
    assert form is not None
    np.testing.assert_array_equal(form(layer, x, weights), layer(x, count_weights=weights))


def test_groups_of_images_whose_sizes_are_open():
    layer = layers.GroupNormalization(2)
    model = scramble(build_model((None, None, 4), layer))
    form = find_variant(layer)
    traced = tf.function(lambda x: form(layer, x), [tf.TensorSpec([None, None, None, 4])])
    x = np.float32(rng().normal(size=(2, 3, 5, 4)))
    np.testing.assert_allclose(traced(x), model(x), rtol=1e-4, atol=1e-5)


class Own(layers.LayerNormalization):
    """Overrides `call`."""

    def call(self, inputs):
        return 2.0 * super().call(inputs)


class Named(layers.LayerNormalization):
    """Computes like Keras' layer."""


def test_layers_of_users_have_the_form_of_what_they_inherit():
    assert find_variant(Own()) is None
    assert find_variant(Named()) is find_variant(layers.LayerNormalization()) is not None
    assert find_variant(layers.Dense(2)) is None


@pytest.mark.parametrize("layer", [layers.Hashing(3), layers.Resizing(3, 3, "bicubic")])
def test_what_tflite_lacks_is_refused(layer):
    form = find_variant(layer)
    assert form is not None
    with pytest.raises(ValueError, match=layer.name):
        form(layer, tf.ones([1, 4, 4, 2]))


EXAMPLES, STEPS, UNITS = 3, 4, 2


def step(x, states):
    hidden, count, *constants = states
    first, second = x
    hidden = tf.tanh(0.5 * hidden - first + second[..., 0])
    output = 2.0 * hidden + count + sum(constants)
    return output, [hidden, count + 1.0]


MASKS = {"none": None, "bool": tf.bool, "int8": tf.int8}


@pytest.mark.sample(12)
@pytest.mark.parametrize("steps", [1, STEPS])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"unroll": True},
        {"zero_output_for_mask": True},
        {"return_all_outputs": False},
        {"time_major": True, "unroll": True},
        {"time_major": True, "return_all_outputs": False},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_it_is_the_loop_of_keras(options, backwards, mask, steps):
    numbers = rng()
    x = np.float32(numbers.normal(size=(EXAMPLES, steps, UNITS)))
    of_two = np.float32(numbers.normal(size=(EXAMPLES, steps, UNITS, 3)))
    is_there = numbers.random((EXAMPLES, steps)) < 0.6
    inputs = x, of_two
    if options.get("time_major"):
        is_there, *inputs = (np.swapaxes(array, 0, 1) for array in (is_there, *inputs))
    given = {
        "inputs": tuple(map(tf.constant, inputs)),
        "initial_states": [tf.ones([EXAMPLES, UNITS]), tf.zeros([EXAMPLES, 1])],
        "constants": [tf.constant(0.3)],
        "go_backwards": backwards,
        **options,
    }
    if MASKS[mask]:
        given["mask"] = tf.cast(is_there, MASKS[mask])
    result, expected = (
        tf.nest.flatten(compute(step, **given)) for compute in (rnn, keras.backend.rnn)
    )
    assert_all_close(result, expected, rtol=1e-6)
