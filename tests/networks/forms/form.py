"""A form: a network that people write, its inputs, and the required accuracy of its file."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.keras2.backend import keras
from tests.helpers import scramble


@dataclasses.dataclass(frozen=True)
class Form:
    """A network that `tests/end_to_end/test_forms.py` tests from the float model to its file.

    Args:
        build: a function of the tensors of all inputs that returns the outputs.
        data: an array for each input; or a function that creates them for a model. `build` then
            returns the model.
        sqnr: the minimum signal-to-noise ratio of the quantized model, in dB.
        recipe: the recipe.
        target: the target.
        in_float: whether some of it stays in float.
        kernels: kernel families with which a slow test compares each tensor.
        is_random: whether it computes something else in training.
        trains: whether all of its weights are trained before calibration.
        strips: whether the float model can be restored from the quantized model.
        lacks: operators that must not be in its file.
        scrambles: whether its weights become random.
        shape: shape of its input, if sizes of the data are unknown.
    """

    build: Callable[..., Any]
    data: tuple[np.ndarray, ...] | Callable[[Any], Any]
    sqnr: float = 30.0
    recipe: Any = "int8"
    target: str | None = None
    in_float: bool = False
    kernels: tuple[str, ...] = ()
    is_random: bool = False
    trains: bool = False
    strips: bool = False
    lacks: tuple[str, ...] = ()
    scrambles: bool = True
    shape: tuple[int | None, ...] | None = None

    def model(self) -> Any:
        keras.utils.set_random_seed(1)
        if callable(self.data):
            return self.build()
        inputs = [keras.Input(self.shape or x.shape[1:], dtype=x.dtype.name) for x in self.data]
        model = keras.Model(inputs, self.build(*inputs))
        return scramble(model) if self.scrambles else model

    def inputs(self, model: Any) -> Any:
        """Returns data in the form that the model accepts: an array, or a list of several."""
        data = tf.nest.flatten(self.data(model) if callable(self.data) else self.data)
        return data if len(data) > 1 else data[0]


def forms(
    functions: Mapping[str, Callable[..., Any]], *data: Any, **options: Any
) -> dict[str, Form]:
    """Returns forms that only differ in their function. `sqnr` may map names to values."""
    least = options.pop("sqnr", 30.0)
    return {
        name: Form(
            function,
            data,
            least.get(name, least[""]) if isinstance(least, dict) else least,
            **options,
        )
        for name, function in functions.items()
    }


def decibels(expected: Any, values: Any) -> float:
    """Returns the lowest signal-to-noise ratio of all outputs, in dB."""
    pairs = zip(tf.nest.flatten(expected), tf.nest.flatten(values), strict=True)
    return min(_decibels(np.asarray(y, np.float64), np.asarray(z)) for y, z in pairs)


def _decibels(expected: np.ndarray, values: np.ndarray) -> float:
    assert expected.shape == values.shape
    noise = np.mean(np.square(values - expected))
    return 10 * np.log10(np.mean(np.square(expected)) / max(noise, 1e-30))
