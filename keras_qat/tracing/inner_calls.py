"""How layers inside of a layer are called while that layer is traced."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.operations import is_operation
from keras_qat.keras2.backend import (
    AUTOGRAPH_AS_USUAL,
    accepts_mask,
    get_keras_mask,
    has_mask_argument,
    is_symbolic,
    keras,
    patch_members,
    set_keras_mask,
    swap_attributes,
)
from keras_qat.keras2.layers_and_models import bind_options, list_layers
from keras_qat.messages import KNOWN, get_package


class MustTraceInline(BaseException):
    """Raised for a layer whose code has to be traced as a part of the layer around it.

    One with weights that reads no tensor, as an embedding of positions, or one that keeps a tensor
    of one call in an attribute and is called again. It passes through a user's `except Exception`,
    as the layer's own code is running.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__(f"the layer '{layer.name}' reads what is none of its arguments")
        self.layer = layer


@contextlib.contextmanager
def calls_inside(tape: tf.GradientTape, outer: Any, lenders: Sequence[Any] = ()) -> Iterator[None]:
    """Runs a block in which a tape does not watch variables that layers read in their own call.

    Layers that lend their weights to `outer`, and those around them, are traced as if their code
    stood in its call. So is a user's own layer that the call of `outer` makes anew and that has no
    weights: what it keeps in its attributes may be read there. So are the steps of a recurrent
    layer around a cell of that kind.

    Raises:
        MustTraceInline: for a layer that must lend its weights, or else what it reads is constant.
    """
    call, is_inside = keras.layers.Layer.__call__, False
    known, keeping = {id(layer) for layer in outer._flatten_layers()}, set[int]()

    def called(layer: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_inside
        if is_inside:
            return call(layer, *args, **kwargs)
        if is_operation(layer):
            with AUTOGRAPH_AS_USUAL:  # Keras 2.15 forgets a function's arguments without it.
                return call(layer, *args, **kwargs)
        lends = any(inner is lender for inner in list_layers(layer) for lender in lenders)
        is_new = id(layer) not in known
        if is_new and isinstance(layer, keras.layers.RNN) and _holds_symbols(layer.cell):
            return _steps_inline(layer, *args, **kwargs)
        if lends or (is_new and (_is_plain_code(layer) or _holds_symbols(layer))):
            return _inline(layer, *args, **kwargs)
        reads = any(map(is_symbolic, tf.nest.flatten((args, kwargs))))
        lends = (layer.weights and not reads) or id(layer) in keeping or _was_given_weights(layer)
        if id(layer) in known and lends:
            raise MustTraceInline(layer)
        is_inside = True
        try:
            with tape.stop_recording(), AUTOGRAPH_AS_USUAL:
                return tf.nest.map_structure(_or_none, call(layer, *args, **kwargs))
        finally:
            is_inside = False
            if _keeps_tensors(layer):
                keeping.add(id(layer))

    with patch_members(keras.layers.Layer, __call__=called):
        yield


def _or_none(output: Any) -> Any:
    """Returns None in the place of Keras' symbol for it, as Keras itself does for inner layers."""
    return None if "NoneTensorSpec" in type(getattr(output, "type_spec", 0)).__name__ else output


def _is_plain_code(layer: Any) -> bool:
    """Returns whether a layer is a user's own, and nothing but its `call`."""
    kind = type(layer)
    has_build = kind.build is not keras.layers.Layer.build
    has_parts = bool(layer.weights) or len(list(layer._flatten_layers())) > 1
    has_phases = "training" in inspect.signature(kind.call).parameters
    return not (_is_keras(layer) or has_build or has_parts or has_phases)


def _was_given_weights(layer: Any) -> bool:
    """Returns whether a wrapper put what it computes in the place of a weight of Keras' layer."""
    is_single = _is_keras(layer) and not isinstance(layer, keras.Model)
    return is_single and any(hasattr(value, "_keras_history") for value in vars(layer).values())


def _holds_symbols(layer: Any) -> bool:
    """Returns whether a layer without weights was given tensors of the layer around it."""
    is_model = isinstance(layer, keras.Model)
    return not is_model and not layer.weights and any(map(is_symbolic, vars(layer).values()))


def _steps_inline(layer: Any, inputs: Any, **kwargs: Any) -> Any:
    """Calls the code of a recurrent layer, whose cell reads what the layer around it computes."""
    layer.build(tf.nest.map_structure(lambda x: x.shape, inputs))
    return layer.call(inputs, **kwargs)


def _keeps_tensors(layer: Any) -> bool:
    """Returns whether a user's own layer without phases holds tensors that a trace computed."""
    if _is_keras(layer) or "training" in inspect.signature(type(layer).call).parameters:
        return False
    is_constant = (tf.Variable, tf.__internal__.EagerTensor)
    return any(tf.is_tensor(x) and not isinstance(x, is_constant) for x in vars(layer).values())


def _is_keras(layer: Any) -> bool:
    return get_package(type(layer)) in KNOWN


def _inline(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a layer's own code, with the masks of its inputs and of its outputs."""
    if args:
        inputs, rest = args[0], args[1:]
    else:  # By the name of the first argument.
        name = next(iter(kwargs))
        inputs, rest = kwargs.pop(name), ()
    (inputs, *rest), kwargs = bind_options(layer, (inputs, *rest), kwargs)
    inputs = tf.nest.map_structure(_as_tensor, inputs)
    is_given, mask = has_mask_argument(layer, (inputs, *rest), kwargs), kwargs.get("mask")
    if not is_given:
        mask = tf.nest.map_structure(get_keras_mask, inputs)
        if all(item is None for item in tf.nest.flatten(mask)):
            mask = None
    if accepts_mask(layer) and not is_given:
        kwargs["mask"] = mask
    outputs = layer.call(inputs, *rest, **kwargs)
    if layer.supports_masking:
        masks = layer.compute_mask(inputs, mask)
        for output, own in zip(tf.nest.flatten(outputs), tf.nest.flatten(masks), strict=False):
            set_keras_mask(output, own)
    return outputs


def _as_tensor(x: Any) -> Any:
    """Returns an array or number as a tensor, as Keras does in front of a layer's own code."""
    return tf.convert_to_tensor(x) if isinstance(x, (np.ndarray, int, float)) else x


@contextlib.contextmanager
def without_nodes(layer: Any) -> Iterator[None]:
    """Runs a block, then removes the Keras nodes that calls of inner layers left."""
    inside = list(layer._flatten_layers(include_self=False))
    counts = [(len(inner._inbound_nodes), len(inner._outbound_nodes)) for inner in inside]
    try:
        yield
    finally:
        for inner, (inbound, outbound) in zip(inside, counts, strict=True):
            del inner._inbound_nodes[inbound:], inner._outbound_nodes[outbound:]


@contextlib.contextmanager
def keeping_symbols(layer: Any) -> Iterator[None]:
    """Runs a block, after which attributes have the symbolic tensors again that a trace left.

    A later call that reads one is not opened: numbers in its place would become constants.
    """
    with contextlib.ExitStack() as block:
        for owner in layer._flatten_layers():
            symbols = {
                name: value
                for name, value in vars(owner).items()
                if hasattr(value, "_keras_history")
            }
            block.enter_context(swap_attributes(owner, **symbols))
        yield
