"""One graph of an optimizer's update, for training steps of a model that are traced later."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from keras_qat.keras2.backend import keras, make_tf_function
from keras_qat.training.steps.joint_update import update_together

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
    def of(self, optimizer: Any) -> Iterator[None]:
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

        def update(strategy: Any, gradients: Iterable[tuple[Any, Any]], **kwargs: Any) -> Any:
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
