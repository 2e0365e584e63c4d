"""Controls how inner layers are called while their outer layer is traced."""

from __future__ import annotations

import contextlib
import inspect
import weakref
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
    layers,
    patch_members,
    set_keras_mask,
    swap_attributes,
)
from keras_qat.keras2.layers_and_models import bind_options, list_layers
from keras_qat.messages import KNOWN, get_package
from keras_qat.tracing.cannot_trace import MustTraceInline


@contextlib.contextmanager
def trace_inner_calls(
    tape: tf.GradientTape, outer: keras.layers.Layer, lenders: Sequence[Any] = ()
) -> Iterator[None]:
    """Makes `outer.call` record each inner layer as a single call, inside a `with` block.

    `tape` does not record variables that inner layers read.

    Some inner layers are traced inline, as if their code were in `outer.call`:
    - `lenders`, because `outer.call` reads their weights, and layers that contain lenders.
    - custom layers without weights that `outer.call` creates.
    - layers that `outer.call` creates, if the layer or its RNN cell stores symbolic tensors.

    Raises:
        MustTraceInline: for any other layer that must be traced inline. The caller adds the layer
            to `lenders`, and tries again.
    """
    call, is_inside = keras.layers.Layer.__call__, False
    known, keeping = {id(layer) for layer in outer._flatten_layers()}, set[int]()

    def call_inner(layer: keras.layers.Layer, *args: object, **kwargs: object) -> Any:
        nonlocal is_inside
        if is_inside:
            return call(layer, *args, **kwargs)
        if is_operation(layer):
            with AUTOGRAPH_AS_USUAL:  # Otherwise, Keras 2.15 loses a function's arguments.
                return call(layer, *args, **kwargs)
        lends = any(inner is lender for inner in list_layers(layer) for lender in lenders)
        is_new = id(layer) not in known
        if is_new and isinstance(layer, keras.layers.RNN) and _holds_symbols(layer.cell):
            return _call_rnn_inline(layer, *args, **kwargs)
        if lends or (is_new and (_is_plain_code(layer) or _holds_symbols(layer))):
            return _call_inline(layer, *args, **kwargs)
        reads = any(map(is_symbolic, tf.nest.flatten((args, kwargs))))
        must_lend = (layer.weights and not reads) or id(layer) in keeping
        if not is_new and (must_lend or _has_symbolic_weight(layer)):
            raise MustTraceInline(layer)
        is_inside = True
        try:
            with tape.stop_recording(), AUTOGRAPH_AS_USUAL:
                return tf.nest.map_structure(_restore_none, call(layer, *args, **kwargs))
        finally:
            is_inside = False
            if _keeps_tensors(layer):
                keeping.add(id(layer))

    with patch_members(keras.layers.Layer, __call__=call_inner):
        yield


def _restore_none(output: Any) -> Any:
    """Return None instead of the tensor that represents None in functional models of Keras."""
    return None if "NoneTensorSpec" in type(getattr(output, "type_spec", 0)).__name__ else output


def _is_plain_code(layer: keras.layers.Layer) -> bool:
    """Return True for a custom layer without weights, inner layers, `build` or `training`."""
    kind = type(layer)
    has_build = kind.build is not keras.layers.Layer.build
    has_components = bool(layer.weights) or len(list(layer._flatten_layers())) > 1
    has_phases = "training" in inspect.signature(kind.call).parameters
    return not (_is_known(layer) or has_build or has_components or has_phases)


def _has_symbolic_weight(layer: keras.layers.Layer) -> bool:
    """Return True if a wrapper, such as SpectralNormalization, has set a weight to a tensor."""
    is_single = _is_known(layer) and not isinstance(layer, keras.Model)
    return is_single and any(map(is_symbolic, vars(layer).values()))


def _holds_symbols(layer: keras.layers.Layer) -> bool:
    if isinstance(layer, keras.Model) or layer.weights:
        return False
    held = vars(layer)
    return any(map(is_symbolic, (*held.values(), *tf.nest.flatten(held.get("arguments")))))


def _keeps_tensors(layer: keras.layers.Layer) -> bool:
    """Return True if a custom layer stored a tensor of this call, which a later call may read."""
    if _is_known(layer) or "training" in inspect.signature(type(layer).call).parameters:
        return False
    is_constant = (tf.Variable, tf.__internal__.EagerTensor)
    return any(tf.is_tensor(x) and not isinstance(x, is_constant) for x in vars(layer).values())


def _is_known(layer: keras.layers.Layer) -> bool:
    return get_package(type(layer)) in KNOWN


def _call_rnn_inline(layer: keras.layers.Layer, inputs: Any, **kwargs: object) -> Any:
    layer.build(tf.nest.map_structure(lambda x: x.shape, inputs))
    return layer.call(inputs, **kwargs)


def _call_inline(layer: keras.layers.Layer, *args: object, **kwargs: object) -> Any:
    """Call `layer.call` directly, but pass and set Keras masks like `layer.__call__`."""
    if not args:
        args = (kwargs.pop(next(iter(kwargs))),)
    (inputs, *rest), kwargs = bind_options(layer, args, kwargs)
    inputs = tf.nest.map_structure(_convert_array, inputs)
    is_explicit, mask = has_mask_argument(layer, (inputs, *rest), kwargs), kwargs.get("mask")
    if not is_explicit:
        mask = tf.nest.map_structure(get_keras_mask, inputs)
        if all(item is None for item in tf.nest.flatten(mask)):
            mask = None
        if accepts_mask(layer):
            kwargs["mask"] = mask
    outputs = layer.call(inputs, *rest, **kwargs)
    if layer.supports_masking:
        masks = layer.compute_mask(inputs, mask)
        for output, own in zip(tf.nest.flatten(outputs), tf.nest.flatten(masks), strict=False):
            set_keras_mask(output, own)
    return outputs


def _convert_array(x: Any) -> Any:
    return tf.convert_to_tensor(x) if isinstance(x, (np.ndarray, int, float)) else x


@contextlib.contextmanager
def remove_nodes(layer: keras.layers.Layer) -> Iterator[None]:
    """Removes the Keras nodes that calls in a `with` block add to inner layers."""
    layers = list(layer._flatten_layers(include_self=False))
    counts = [(len(inner._inbound_nodes), len(inner._outbound_nodes)) for inner in layers]
    try:
        yield
    finally:
        for inner, (inbound, outbound) in zip(layers, counts, strict=True):
            del inner._inbound_nodes[inbound:], inner._outbound_nodes[outbound:]


@contextlib.contextmanager
def keep_symbols(layer: keras.layers.Layer) -> Iterator[None]:
    """Restores symbolic tensors in the attributes of `layer` after a `with` block.

    The block calls `layer` with real tensors, which `layer` may store in attributes. If another
    layer reads such an attribute, its trace would contain the real tensor as a wrong constant. A
    symbolic tensor makes this trace fail instead.
    """
    with contextlib.ExitStack() as block:
        for owner in layer._flatten_layers():
            symbols = {name: value for name, value in vars(owner).items() if is_symbolic(value)}
            block.enter_context(swap_attributes(owner, **symbols))
        yield


_dropouts: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Maps an attention layer to the Dropout layer that all of its calls share."""


def trace_attention_dropout(layer: keras.layers.Layer) -> contextlib.AbstractContextManager[None]:
    """Makes `Attention` call a Dropout layer, which can be traced, inside a `with` block."""
    if type(layer) not in (layers.Attention, layers.AdditiveAttention) or not layer.dropout:
        return contextlib.nullcontext()
    if layer not in _dropouts:
        _dropouts[layer] = layers.Dropout(layer.dropout, name="dropout")
    apply, drop = layer._apply_scores, _dropouts[layer]

    def apply_scores(scores: Any, value: Any, **options: object) -> Any:
        weights = drop(apply(scores, value, **options)[1])
        return tf.matmul(weights, value), weights

    return swap_attributes(layer, dropout=0.0, _apply_scores=apply_scores)
