"""Functions with a gradient of their own, `tf.custom_gradient`, on symbolic tensors."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_qat.graph.operations import draws_random_numbers, name_in_tensorflow
from keras_qat.helper_layers.operations import SameShape
from keras_qat.keras2.backend import is_symbolic, keras, patch_members, register
from keras_qat.keras2.configurations import load_nested_model


@register
class OwnGradient(SameShape):
    """Passes its input on, and its gradient to the tensors that it is made of, by a model.

    `OwnGradient(model)(y, given=[x])`, where the model computes the gradients of `given` from these
    tensors and the gradient of `y`.

    Args:
        model: the model, or its configuration.
    """

    def __init__(self, model: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model = load_nested_model(model) if isinstance(model, dict) else model

    def call(self, inputs: Any, given: Any = None) -> Any:
        @tf.custom_gradient
        def passed_on(y: Any, *read: Any) -> Any:
            return tf.identity(y), lambda upstream: (
                None,
                *tf.nest.flatten(self.model([*read, upstream])),
            )

        return passed_on(inputs, *given)

    def operations(self) -> list[Any]:
        """Returns what the model computes, without names."""
        return [name_in_tensorflow(layer) or type(layer) for layer in self.model.layers]

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "model": self.model.get_config()}


@contextlib.contextmanager
def record_custom_gradients() -> Iterator[None]:
    """Runs a block in which functions with a gradient of their own take symbolic tensors."""
    module: Any = inspect.getmodule(tf.custom_gradient)
    plain = module._eager_mode_decorator

    def applied(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        flat = tf.nest.flatten(args)
        read = [x for x in flat if is_symbolic(x)]
        if not read:
            return plain(function, args, kwargs)
        y, _ = function(*args, **kwargs)
        symbols = [keras.Input(type_spec=x.type_spec) if is_symbolic(x) else x for x in flat]
        _, gradient = function(*tf.nest.pack_sequence_as(args, symbols), **kwargs)
        upstream = keras.Input(type_spec=y.type_spec)
        given = zip(symbols, tf.nest.flatten(gradient(upstream)), strict=True)
        pairs = [(x, g) for x, g in given if is_symbolic(x)]
        gradients = [tf.zeros_like(x) if g is None else g for x, g in pairs]
        if any(map(draws_random_numbers, _layers_before(gradients))):
            return y  # They would draw anew: a dropout has TensorFlow's own gradient.
        layer = OwnGradient(None, name=f"own_gradient_{len(made)}" if made else "own_gradient")
        made.append((layer, [*(x for x, _ in pairs), upstream], gradients))
        return layer(y, given=read)

    made: list[Any] = []
    with patch_members(module, _eager_mode_decorator=applied):
        yield
    for layer, *ends in made:  # A `Lambda` would not let models make their variables.
        layer.model = keras.Model(*ends)


def _layers_before(tensors: list[Any]) -> Iterator[Any]:
    """Yields the layers that compute symbolic tensors."""
    waiting, seen = list(tensors), set[int]()
    for tensor in waiting:
        if is_symbolic(tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor._keras_history.layer
            waiting += tensor.node.keras_inputs
