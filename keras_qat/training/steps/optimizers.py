"""Lets Keras optimizers update all vectors of a model, such as biases, as one long vector.

An optimizer has at least six operations for each variable. Most variables, such as biases, only
have a few values. In a small network, tracing the updates takes half of the time for tracing a
training step.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_qat.keras2.backend import keras, swap_attributes

_NAMES = ("SGD", "Adam", "AdamW", "Lion")
ELEMENTWISE = tuple(getattr(keras.optimizers, name) for name in _NAMES)
"""Optimizers that update one long vector with the same results as separate vectors.

Other optimizers compute inverse square roots. TensorFlow rounds these differently at the end of a
vector, so results would depend on the position in the vector."""

METHOD = "_distributed_apply_gradients_fn"
"""Name of the method of Keras optimizers that updates variables."""

Pair = tuple[tf.Tensor, tf.Variable]


@contextlib.contextmanager
def join_updates(optimizer: keras.optimizers.Optimizer | None) -> Iterator[None]:
    """Updates all vectors of the model together if a training step is traced inside the block.

    Replicas of a strategy and legacy optimizers still update each variable separately.
    """
    if isinstance(optimizer, keras.mixed_precision.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    original = getattr(optimizer, METHOD, None)
    if original is None or tf.distribute.has_strategy():
        yield
        return

    def update(strategy: tf.distribute.Strategy, pairs: Iterable[Pair], **kwargs: Any) -> Any:
        return original(strategy, update_together(optimizer, list(pairs)), **kwargs)

    with swap_attributes(optimizer, **{METHOD: update}):
        yield


def update_together(optimizer: keras.optimizers.Optimizer, pairs: list[Pair]) -> list[Pair]:
    """Updates vectors together. Returns the (gradient, variable) pairs not updated yet.

    The results are identical to separate updates.
    """
    if not _is_elementwise(optimizer) or tf.executing_eagerly():
        return pairs
    groups: dict[tf.DType, list[Pair]] = collections.defaultdict(list)
    remaining: list[Pair] = []
    for gradient, variable in pairs:
        is_known = getattr(variable, "_unique_id", None) in optimizer._index_dict
        is_vector = variable.shape.rank == 1 and isinstance(gradient, tf.Tensor)
        group = groups[variable.dtype] if is_known and is_vector else remaining
        group.append((gradient, variable))
    for group in groups.values():
        gradients, variables = zip(*group, strict=True)
        view, joint = _OptimizerView(optimizer, variables), _JointVariable(variables)
        type(optimizer).update_step(view, tf.concat(gradients, 0), joint)
    return remaining


def _is_elementwise(optimizer: keras.optimizers.Optimizer) -> bool:
    if type(optimizer) not in ELEMENTWISE or optimizer.use_ema:  # Averages need all pairs.
        return False
    return not getattr(optimizer, "nesterov", False)  # Graphs may reorder sums of three terms.


class _JointVariable:
    """Several vectors that act like one variable for the optimizers in `ELEMENTWISE`."""

    def __init__(self, variables: Sequence[tf.Variable]) -> None:
        self._variables = variables
        self._value: tf.Tensor | None = None

    @property
    def dtype(self) -> tf.DType:
        return self._variables[0].dtype

    def value(self) -> tf.Tensor:
        if self._value is None:
            self._value = tf.concat(self._variables, 0)
        return self._value

    def assign(self, value: tf.Tensor) -> None:
        self._value = value
        sizes = [variable.shape[0] for variable in self._variables]
        for variable, component in zip(self._variables, tf.split(value, sizes), strict=True):
            variable.assign(component, read_value=False)

    def assign_add(self, value: tf.Tensor) -> None:
        self.assign(self.value() + value)

    def assign_sub(self, value: tf.Tensor) -> None:
        self.assign(self.value() - value)

    def __mul__(self, other: tf.Tensor) -> tf.Tensor:
        return self.value() * other


class _OptimizerView:
    """Acts like an optimizer with one `_JointVariable`. The momentums are joined, too."""

    def __init__(
        self, optimizer: keras.optimizers.Optimizer, variables: Sequence[tf.Variable]
    ) -> None:
        self._optimizer = optimizer
        self._indices = [optimizer._index_dict[optimizer._var_key(x)] for x in variables]
        self._index_dict = {None: 0}

    def _var_key(self, variable: _JointVariable) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._optimizer, name)
        if not isinstance(value, list) or not value:
            return value
        return [_JointVariable([value[index] for index in self._indices])]


tf.register_tensor_conversion_function(
    _JointVariable, lambda joint, dtype=None, name=None, as_ref=False: joint.value()
)


def check_optimizer(trained: keras.Model, weights: Sequence[tf.Variable]) -> None:
    """Raises a `ValueError` if an optimizer has already been used with another model.

    A Keras optimizer creates slot variables in the first update, for the weights of this update.
    """
    optimizer = trained.optimizer
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    known = getattr(optimizer, "_index_dict", None)  # Legacy optimizers lack this attribute.
    if not known or not weights:
        return
    unknown = [weight for weight in weights if optimizer._var_key(weight) not in known]
    has_own_step = type(trained).train_step is not keras.Model.train_step
    if len(unknown) == len(weights) or (unknown and not has_own_step):
        name = type(optimizer).__name__
        raise ValueError(
            f"The optimizer of '{trained.name}' ({name}) has already updated other weights, such "
            f"as the float model's. It has no state for '{unknown[0].name}'. Compile "
            f"with a new optimizer: {name}(...), or {name}.from_config(optimizer.get_config())."
        )
