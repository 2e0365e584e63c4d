"""Tests that `plan` needs linear time for chains in which each link reads the previous one twice.

The tests count calls of Python functions instead of seconds, so they do not depend on the machine.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import tensorflow as tf

import keras_qat
from tests.helpers import keras, layers


def repeat(link: Callable[[Any], Any], count: int, x: Any) -> Any:
    for _ in range(count):
        x = link(x)
    return x


def extremum(y: Any) -> Any:
    return tf.maximum(y, tf.reverse(y, [1]))


def softmax_of(scores: Callable[[], Any]) -> Any:
    return tf.exp(scores()) / tf.reduce_sum(tf.exp(scores()), -1, keepdims=True)


def whole(y: Any) -> Any:
    return y + tf.reverse(y, [1])


class FromWeights(layers.Layer):
    """Adds an expression of its weight, a long chain."""

    def __init__(self, count, **kwargs):
        super().__init__(**kwargs)
        self.count = count

    def build(self, shape):
        self.w = self.add_weight("w", (4,), initializer="ones")

    def call(self, inputs):
        return inputs + repeat(lambda w: tf.maximum(w, tf.reverse(w, [0])), self.count, self.w)

    def get_config(self):
        return {**super().get_config(), "count": self.count}


CHAINS: dict[str, Callable[[int, Any], Any]] = {
    "extrema": lambda count, x: repeat(extremum, count, x),
    "extrema of a fixed range": lambda count, x: repeat(extremum, count, tf.sigmoid(x)),
    "extrema before a concatenation": lambda count, x: tf.concat(
        [repeat(extremum, count, tf.sigmoid(x)), x], -1
    ),
    "scores computed twice": lambda count, x: softmax_of(lambda: repeat(extremum, count, x)),
    "sums": lambda count, x: repeat(lambda y: y + y, count, layers.Dense(4)(x)),
    "residual": lambda count, x: repeat(lambda y: layers.Add()([y, layers.ReLU()(y)]), count, x),
    "concatenations": lambda count, x: repeat(
        lambda y: tf.concat([y, tf.reverse(y, [1])], -1)[..., 2:6], count, x
    ),
    "masked scores": lambda count, x: tf.nn.softmax(
        repeat(extremum, count, tf.where(x > 0, x, -1e9))
    ),
    "indices": lambda count, x: tf.gather(
        tf.constant([[0.5], [1.5], [2.5]]),
        tf.cast(tf.clip_by_value(repeat(whole, count, tf.round(x)), 0, 2), "int32"),
    ),
    "sizes": lambda count, x: (
        x * tf.cast(repeat(lambda size: size + size - 1, count, tf.shape(x)[1] // 6), x.dtype)
    ),
    "uniform constants": lambda count, x: x + repeat(lambda y: y * y, count, tf.zeros_like(x)),
    "token ids": lambda count, x: layers.Embedding(9, 4)(
        repeat(lambda y: tf.concat([y, tf.reverse(y, [1])], 1)[:, 2:6], count, x[..., 0])
    ),
    "weights": lambda count, x: FromWeights(count)(x),
    "initial state": lambda count, x: layers.GRU(4)(
        x, initial_state=repeat(extremum, count, tf.tanh(x[:, 0]))[:, :4]
    ),
}


@contextmanager
def count_calls() -> Iterator[list[int]]:
    """Counts the calls of the package's functions in the block."""
    counts, package = [0], keras_qat.__path__[0]

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            counts[0] += 1

    sys.setprofile(note)
    try:
        yield counts
    finally:
        sys.setprofile(None)


def calls_of(chain: Callable[[int, Any], Any], count: int, recipe: Any) -> int:
    x = keras.Input((6, 4), name="x")
    model = keras.Model(x, chain(count, x))
    with count_calls() as counts:
        keras_qat.plan(model, recipe)
    return counts[0]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "recipe"), [*((name, "int8") for name in CHAINS), ("sums", "contrib")]
)
def test_plan_visits_a_chain_in_linear_time(name, recipe):
    calls = functools.partial(calls_of, CHAINS[name], recipe=recipe)
    calls(1)  # Fills caches that are computed once per process.
    first, second, third = calls(4), calls(8), calls(12)
    assert third - second < 1.5 * (second - first) + 500
