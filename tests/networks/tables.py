"""Networks of other tests' tables, with inputs, for tests of other runtimes."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf

from tests.end_to_end import test_given_states, test_integer_tensors
from tests.end_to_end.exact import inputs_of, model_of
from tests.helpers import images, keras, layers, scramble
from tests.lowering import test_masking, test_masks, test_recurrent_masks
from tests.lowering.test_masks import padded
from tests.networks import lent_weights
from tests.networks.custom import OPENED
from tests.networks.forms import (
    Form,
    attention,
    cells_and_convolutions,
    equivalents,
    in_the_wild,
    recurrent,
)


class Network(NamedTuple):
    """Builds a float model, and creates its inputs: an array or a list of arrays.

    Layers that are `opened` would otherwise stay in float, which is more accurate.
    """

    build: Callable[[], Any]
    inputs: Callable[[Any], Any]
    opened: tuple[str, ...] = ()


def of_tensor(build: Callable[[Any], Any], shape: tuple[int | None, ...]) -> Network:
    """Returns a network of a function of one tensor. Unknown sizes are 12."""
    sizes = tuple(size or 12 for size in shape)
    return Network(lambda: scramble(model_of(build, shape)), lambda model: images(24, sizes))


def of_integers(dtype: str, build: Callable[[Any], Any]) -> Network:
    return Network(lambda: scramble(model_of(build, dtype=dtype)), inputs_of)


def of_form(form: Form) -> Network:
    return Network(form.model, form.inputs)


def behind_dense(ends: Callable[[], tuple[Any, Any]]) -> Any:
    """Returns a model of inputs and a tensor. Its weights are too small to saturate states."""
    inputs, x = ends()
    model = scramble(keras.Model(inputs, layers.Dense(3)(x)))
    for weight in model.trainable_weights:
        weight.assign(0.5 * weight)
    return model


def lent(build: Callable[[], tuple[Any, Any]]) -> Network:
    return Network(lambda: build()[0], lambda model: build()[1])


MASKED_STEPS = {
    f"{name} {kind.__name__}": partial(ends, kind)
    for name, ends in test_recurrent_masks.MODELS.items()
    for kind in test_recurrent_masks.KINDS
}

MASKINGS = {"alone": lambda x: layers.GRU(4)(layers.Masking(-1.0)(x)), **test_masking.OTHERS}

RECURRENT = {
    "all merges": (recurrent.all_merges, recurrent.SHAPE),
    "mixed": (recurrent.mixed, recurrent.SHAPE),
    "TimeDistributed": (
        lambda x: layers.TimeDistributed(layers.GRU(3, return_sequences=True))(x),
        (2, *recurrent.SHAPE),
    ),
    **{build.__name__: (build, shape) for build, shape in cells_and_convolutions.SHAPES.items()},
}

COMPARED = {
    "with 0": lambda x: tf.where(tf.equal(x, 0.0), tf.ones_like(x), tf.tanh(x)),
    "not with 0": lambda x: tf.cast(layers.ReLU()(x) != 0.0, tf.float32) * x,
    "tensors": lambda x: tf.cast(layers.ReLU()(x) == tf.abs(x), tf.float32) * x,
    "any": lambda x: tf.cast(tf.reduce_any(x > 1.5, axis=-1), tf.float32),
    "all": lambda x: tf.cast(tf.reduce_all(x < 1.5, axis=[1, 2]), tf.float32),
    "both": lambda x: tf.where(
        tf.logical_and(x > 0.0, tf.reduce_any(x > 1.0, 1, keepdims=True)), x, -0.5 * x
    ),
}
"""Operations on booleans."""

TABLES: dict[str, dict[str, Network]] = {
    "cells": {
        name: Network(
            partial(test_given_states.model_of, name), lambda model: cells_and_convolutions.X
        )
        for name in cells_and_convolutions.MODELS
    },
    "masked steps": {
        name: Network(partial(behind_dense, ends), partial(padded, count=24, between=True))
        for name, ends in {**MASKED_STEPS, **test_recurrent_masks.NESTED}.items()
    },
    "masks": {
        name: Network(partial(behind_dense, ends), padded)
        for name, ends in test_masks.MODELS.items()
    },
    "masking": {
        name: Network(
            partial(test_masking.model_of, 3, build),
            lambda model: test_masking.data_of(3),
            () if name == "inside" else ("Masking",),
        )
        for name, build in MASKINGS.items()
    },
    "attention masks": {
        **{name: of_form(Form(*row)) for name, row in attention.MASKED.items()},
        **{name: of_form(form) for name, form in attention.CHOOSING.items()},
    },
    "lent weights": {name: lent(build) for name, build in lent_weights.MODELS.items()},
    "states": {
        name: Network(lambda build=build: scramble(build()), test_given_states.data)
        for name, build in test_given_states.BUILDS.items()
    },
    "recurrent": {name: of_tensor(*row) for name, row in RECURRENT.items()},
    "opened": {name: of_tensor(build, (8, 8, 4)) for name, build in OPENED.items()},
    "in the wild": {name: of_tensor(*row) for name, row in in_the_wild.FUNCTIONS.items()},
    "equivalents": {
        name: of_tensor(build, equivalents.SHAPE) for name, build in equivalents.CASES.items()
    },
    "compared": {name: of_tensor(build, (6, 6, 4)) for name, build in COMPARED.items()},
    "integers": {name: of_integers(*row) for name, row in test_integer_tensors.OF_INTEGERS.items()},
}
"""Name of the table -> name of the network -> the network."""
