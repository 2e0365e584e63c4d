"""Replaces subclasses and reimplementations of BatchNormalization by Keras' layer.

Examples of subclasses are `SyncBatchNormalization` and classes with frozen statistics.
Reimplementations are custom layers that assign moving statistics in training. Both kinds are
recognized by their results for test inputs.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from keras_qat.graph.calls import Call
from keras_qat.keras2.backend import keras, layers
from keras_qat.keras2.layers_and_models import list_layers
from keras_qat.lowering.builder import LoweringContext, PartsBuilder
from keras_qat.ops.registry import is_listed

_BASE = layers.BatchNormalization.__base__


def replace_custom_batch_norm(call: Call, context: LoweringContext) -> list[Call]:
    """Replace a custom BatchNormalization by Keras' layer if both compute and learn the same.

    If the layer uses the moving statistics even in training, the new call has `training=False`.
    """
    layer = call.layer
    if len(call.inputs) != 1 or is_listed(layer) or not layer.weights or layer.activity_regularizer:
        return []
    replace = _replace_subclass if isinstance(layer, _BASE) else _replace_custom_layer
    try:
        return replace(call, PartsBuilder(call, context))
    except Exception:  # Custom code may raise any error. The layer is then traced.
        return []


def _replace_subclass(call: Call, parts: PartsBuilder) -> list[Call]:
    layer, kind = call.layer, layers.BatchNormalization
    if len(layer.weights) != 2 + layer.scale + layer.center:
        return []
    x = _draw(call, layer.compute_dtype)
    config = _BASE.get_config(layer)
    if getattr(layer, "synchronized", False):  # Keras omits this setting.
        config["synchronized"] = True

    def make(**changes: object) -> keras.layers.Layer:
        return kind.from_config({**config, **changes})

    plain = make()
    plain.build(call.inputs[0].shape)
    plain.set_weights(layer.get_weights())
    own = [_compute(layer, x, phase) for phase in (True, False)]
    known = [_compute(plain, x, phase) for phase in (True, False)]
    if not _are_equal(own[1], known[1]):
        return []
    kwargs = dict(call.kwargs)
    if not _are_equal(own[0], known[0]):
        if not _are_equal(own[0], known[1]):
            return []
        kwargs["training"] = False
    return parts.end(parts.new("", make, weights=layer.weights), *call.args[:1], kwargs=kwargs)


def _replace_custom_layer(call: Call, parts: PartsBuilder) -> list[Call]:
    """Replace a custom layer that computes and learns like a BatchNormalization.

    The moving variance may have Bessel's correction, which Keras' layer only uses for images.
    """
    layer, shape = call.layer, call.inputs[0].shape
    moving = [weight for weight in layer.weights if not weight.trainable]
    learned = [weight for weight in layer.weights if weight.trainable]
    sizes = {tuple(weight.shape) for weight in layer.weights}
    axes = [axis for axis in (len(shape) - 1, 1) if axis and {(shape[axis],)} == sizes]
    has_others = layer.losses or any(weight.constraint for weight in layer.weights)
    takes_others = len(call.args) > 1 or not {"training"}.issuperset(call.kwargs)
    if len(moving) != 2 or len(learned) > 2 or not axes or has_others or takes_others:
        return []
    if call.inputs[0].dtype != "float32" or list_layers(layer) != [layer]:
        return []
    x = _draw(call, "float32")
    for roles in _list_roles(moving, learned):
        if options := _find_options(layer, roles, x, axes[0]):
            own = parts.new("", layers.BatchNormalization, **options, weights=roles.weights)
            return parts.end(own, *call.args, kwargs=call.kwargs)
    return []


class _Roles(NamedTuple):
    """The weights of a normalization layer by role. None means that the layer lacks the weight."""

    gamma: tf.Variable | None
    beta: tf.Variable | None
    mean: tf.Variable
    variance: tf.Variable

    @property
    def weights(self) -> list[tf.Variable]:
        return [weight for weight in self if weight is not None]


def _list_roles(moving: Sequence[tf.Variable], learned: Sequence[tf.Variable]) -> Iterator[_Roles]:
    padded = [*learned, None, None][:2]
    for pair, statistics in itertools.product(
        itertools.permutations(padded), itertools.permutations(moving)
    ):
        yield _Roles(*pair, *statistics)


def _find_options(
    layer: keras.layers.Layer, roles: _Roles, x: NDArray[np.float32], axis: int
) -> dict[str, object]:
    """Return the options of a BatchNormalization that computes the same. Return {} if none does.

    Epsilon is computed from a call with a variance of 0, and momentum from a call in training.
    """
    draw, count = np.random.default_rng(1), x.shape[axis]
    before = [draw.uniform(2.0, 4.0, (count,)).astype(np.float32) for _ in layer.weights]
    flat = [*map(id, layer.weights)]
    gamma, beta, mean, variance = (
        np.full(count, role == 0) if weight is None else before[flat.index(id(weight))]
        for role, weight in enumerate(roles)
    )
    without_variance = [np.zeros_like(w) if w is variance else w for w in before]

    def in_rows(values: NDArray[np.float32]) -> NDArray[np.float64]:
        return np.moveaxis(values, axis, -1).reshape(-1, count).astype(np.float64)

    rows = in_rows(x)
    (trained, *after), (tested, *_), (steep, *_) = (
        _compute(layer, x, phase, weights)
        for phase, weights in ((True, before), (False, before), (False, without_variance))
    )
    slope = in_rows(steep) - beta
    root = np.sum((rows - mean) * gamma * slope) / np.sum(slope**2)
    batch_mean = rows.mean(0)
    distance = mean - batch_mean
    moved = after[flat.index(id(roles.mean))] - batch_mean
    momentum = round(float(np.sum(moved * distance) / np.sum(distance**2)), 5)
    epsilon = float(f"{root**2:.3g}")

    def normalize(mean: Any, variance: Any) -> NDArray[np.float64]:
        return (rows - mean) / np.sqrt(variance + epsilon) * gamma + beta

    variances = [
        momentum * variance + (1.0 - momentum) * rows.var(0, ddof=correction)
        for correction in (0, 1)
    ]
    new_variance = after[flat.index(id(roles.variance))]
    is_same = (
        _is_close(in_rows(tested), normalize(mean, variance))
        and _is_close(in_rows(trained), normalize(batch_mean, rows.var(0)))
        and any(_is_close(new_variance, expected) for expected in variances)
    )
    if not is_same:
        return {}
    options = {"axis": axis, "momentum": momentum, "epsilon": epsilon}
    return {**options, "center": roles.beta is not None, "scale": roles.gamma is not None}


def _is_close(values: NDArray[Any], expected: NDArray[Any]) -> bool:
    return bool(np.allclose(values, expected, rtol=1e-3, atol=1e-4))


def _draw(call: Call, dtype: str) -> NDArray[Any]:
    sizes = [8 if size is None else size for size in call.inputs[0].shape]
    return np.random.default_rng(0).normal(1.0, 2.0, sizes).astype(dtype)


def _compute(
    layer: keras.layers.Layer,
    x: NDArray[Any],
    training: bool,
    weights: Sequence[NDArray[np.float32]] | None = None,
) -> list[NDArray[Any]]:
    """Call a layer with `weights`. Return the output and the new weights. Restore the old ones."""
    eagerly = contextlib.nullcontext() if tf.executing_eagerly() else tf.init_scope()
    with eagerly:
        before = layer.get_weights()
        try:
            layer.set_weights(before if weights is None else weights)
            output = layer.call(tf.constant(x), training=training)
            return [output.numpy(), *layer.get_weights()]
        finally:
            layer.set_weights(before)


def _are_equal(a: list[NDArray[Any]], b: list[NDArray[Any]]) -> bool:
    return all(map(np.array_equal, a, b))
