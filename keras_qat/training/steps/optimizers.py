"""Updates of small variables by an optimizer, computed side by side.

An optimizer of Keras updates each variable by itself, by six operations or more. Of a model with
BatchNormalizations that is most of what a step launches, for few numbers each.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_qat.keras2.backend import keras, make_tf_function

SMALL = 2**14
"""Most numbers of a variable that is updated beside others: they are copied for it."""

_NAMES = ("SGD", "Adam", "AdamW", "Lion")
ELEMENTWISE = tuple(getattr(keras.optimizers, name) for name in _NAMES)
"""Optimizers that make the same of a number, whatever is beside it. Those that take inverse square
roots do not: TensorFlow computes eight at once otherwise than what is left over."""

_Pair = tuple[Any, Any]


def update_together(optimizer: keras.optimizers.Optimizer, pairs: Sequence[_Pair]) -> list[_Pair]:
    """Updates small variables together, each by what it would be alone, to the last bit.

    Args:
        optimizer: an optimizer of Keras; only those in `ELEMENTWISE` are known well enough.
        pairs: gradients, each with its variable.

    Returns:
        The pairs that are left to update.
    """
    if not _is_elementwise(optimizer) or tf.executing_eagerly():
        return list(pairs)
    groups: dict[Any, list[_Pair]] = collections.defaultdict(list)
    left = []
    for gradient, variable in pairs:
        is_known = getattr(variable, "_unique_id", None) in optimizer._index_dict
        if not (is_known and isinstance(gradient, tf.Tensor) and _is_small(variable.shape)):
            left.append((gradient, variable))
            continue
        shape = variable.shape.as_list()
        axis = shape.index(max(shape)) if shape else None
        others = tuple(size for index, size in enumerate(shape) if index != axis)
        groups[variable.dtype, axis, others].append((gradient, variable))
    for (_, axis, _), group in groups.items():
        if len(group) == 1:
            left += group
            continue
        gradients, variables = zip(*group, strict=True)
        view = _View(optimizer, variables, axis)
        type(optimizer).update_step(view, _side_by_side(gradients, axis), _Joint(variables, axis))
    return left


def _is_small(shape: tf.TensorShape) -> bool:
    return shape.is_fully_defined() and shape.num_elements() <= SMALL


def _is_elementwise(optimizer: keras.optimizers.Optimizer) -> bool:
    if type(optimizer) not in ELEMENTWISE or optimizer.use_ema:  # Averages are made of all pairs.
        return False
    return not getattr(optimizer, "nesterov", False)  # Graphs may reorder its sum of three.


class _View:
    """An optimizer as its `update_step` sees it, for variables side by side.

    Args:
        optimizer: the optimizer.
        variables: variables of equal shapes, apart from one axis.
        axis: that axis; None for scalars.
    """

    def __init__(
        self, optimizer: keras.optimizers.Optimizer, variables: Sequence[Any], axis: int | None
    ) -> None:
        self._optimizer, self._axis = optimizer, axis
        keys = map(optimizer._var_key, variables)
        self._indices = [optimizer._index_dict[key] for key in keys]
        self._index_dict = {None: 0}

    def _var_key(self, variable: _Joint) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._optimizer, name)
        if not isinstance(value, list) or not value:
            return value
        return [_Joint([value[index] for index in self._indices], self._axis)]


class _Joint:
    """Variables side by side, with the methods of a variable that `ELEMENTWISE` call."""

    def __init__(self, variables: Sequence[Any], axis: int | None) -> None:
        self._variables, self._axis = variables, axis
        self._value: Any = None

    @property
    def dtype(self) -> Any:
        return self._variables[0].dtype

    def value(self) -> Any:
        """Returns the values of the variables, as they are behind what was assigned."""
        if self._value is None:
            self._value = _side_by_side(self._variables, self._axis)
        return self._value

    def assign(self, value: Any) -> None:
        self._value = value
        if self._axis is None:
            parts = tf.unstack(value)
        else:
            parts = tf.split(value, [v.shape[self._axis] for v in self._variables], self._axis)
        for variable, part in zip(self._variables, parts, strict=True):
            variable.assign(part, read_value=False)

    def assign_add(self, value: Any) -> None:
        self.assign(self.value() + value)

    def assign_sub(self, value: Any) -> None:
        self.assign(self.value() - value)

    def __mul__(self, other: Any) -> Any:
        return self.value() * other


def _as_tensor(
    joint: _Joint, dtype: tf.DType = None, name: Any = None, as_ref: bool = False
) -> Any:
    return joint.value()


tf.register_tensor_conversion_function(_Joint, _as_tensor)


def _side_by_side(tensors: Sequence[Any], axis: int | None) -> Any:
    return tf.stack(tensors) if axis is None else tf.concat(tensors, axis)


METHOD = "_distributed_apply_gradients_fn"
"""The method of Keras' optimizers that updates variables, given a strategy and gradients."""


class SharedUpdate:
    """Traces how an optimizer updates variables once for all training steps but the first.

    The update of each variable takes several operations, and together half of the time that tracing
    a step of a small network takes. It does not depend on the phase of training. The first step has
    it in line, as many models need no other, and the call of a graph takes operations, too.
    """

    def __init__(self) -> None:
        self._traced: dict[Any, Any] = {}
        """Optimizer and variables -> the function of the gradients, once it is used again."""

    @contextlib.contextmanager
    def of(self, optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
        """Runs a block in which a training step is traced that may use the optimizer.

        Nothing is shared within a strategy, whose replicas update variables together, and of legacy
        optimizers, which have another method.
        """
        if isinstance(optimizer, keras.mixed_precision.LossScaleOptimizer):
            optimizer = optimizer.inner_optimizer
        original = getattr(optimizer, METHOD, None)
        if original is None or tf.distribute.has_strategy():
            yield
            return

        def update(
            strategy: tf.distribute.Strategy, gradients: Iterable[tuple[Any, Any]], **kwargs: Any
        ) -> Any:
            values, variables = zip(*gradients, strict=True)
            key = id(optimizer), *map(id, variables), *kwargs

            def apply(*values: Any) -> Any:
                pairs = list(zip(values, variables, strict=True))
                return original(strategy, update_together(optimizer, pairs), **kwargs)

            function = self._traced.get(key, apply)
            self._traced.setdefault(key, make_tf_function(apply))
            return function(*values)

        vars(optimizer)[METHOD] = update  # Past Keras, which would track it.
        try:
            yield
        finally:
            del vars(optimizer)[METHOD]


def check_optimizer(trained: keras.Model, weights: Sequence[Any]) -> None:
    """Raises a `ValueError` if an optimizer has already been used with another model.

    Keras' optimizers make their variables for the first weights that they update, and cannot update
    others.

    Args:
        trained: the model that `fit` trains.
        weights: the weights that it trains.
    """
    optimizer = trained.optimizer
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    known = getattr(optimizer, "_index_dict", None)  # Legacy optimizers have none.
    if not known or not weights:
        return
    unknown = [weight for weight in weights if optimizer._var_key(weight) not in known]
    has_own_step = type(trained).train_step is not keras.Model.train_step
    if len(unknown) == len(weights) or (unknown and not has_own_step):
        name = type(optimizer).__name__
        raise ValueError(
            f"The {name} that '{trained.name}' was compiled with has updated other weights before, "
            f"such as those of the float model, and does not know '{unknown[0].name}'. Compile "
            f"with a new one: {name}(...), or {name}.from_config(optimizer.get_config())."
        )
