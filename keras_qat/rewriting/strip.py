"""The function `strip_quantization`, which returns a float model with the trained weights."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.config.arguments import switch
from keras_qat.graph.calls import Call, Graph, flatten_values
from keras_qat.graph.read_model import read_model
from keras_qat.graph.rebuild_model import rebuild_model
from keras_qat.helper_layers.operations import Regularize
from keras_qat.integer_graph.float_inference import draw_inputs, make_evaluator
from keras_qat.keras2.backend import keras
from keras_qat.keras2.configurations import collect_custom_objects, deserialization_scope
from keras_qat.keras2.layers_and_models import assign_reshaped, clone, list_layers, restore_names
from keras_qat.keras2.readability import check_readable
from keras_qat.lowering import LoweringContext, lower
from keras_qat.placement import lower_graph, place_lowered
from keras_qat.placement.fusion_groups import Group, find_groups
from keras_qat.rewriting.quantized_model import QuantizedModel
from keras_qat.rewriting.saved_config import make_float_model
from keras_qat.tracing.layer_weights import hash_constant_masks, is_constant_mask
from keras_qat.training.batch_norm.factor_and_bias import fold_normalization, scale_channels
from keras_qat.training.layers import QuantizeWeights, QuantizeWrapper
from keras_qat.training.quantizers import PREFIX


def strip_quantization(model: keras.Model, folded: bool = False) -> Any:
    """Returns a float Keras model with the weights of a quantization-aware model.

    The result has the layers, names, nesting, inputs and outputs of the original float model. The
    `trainable` flags are from the quantization-aware model. The result computes the same outputs as
    the quantization-aware model with quantization off. Keras can load the result without keras_qat.
    If the float model was subclassed, the result has the same layers, but not the class and the
    attributes.

    Args:
        model: a quantization-aware model. It is not changed.
        folded: True to fold each BatchNormalization after a convolution or dense layer into the
            kernel and bias, as in exported files. The result then has no nested models and no
            activity regularizers. Layers with several operations, such as a convolution with an
            activation, are split.

    Returns:
        A `Sequential` if the float model was a `Sequential` and `folded` is False. Otherwise, a
        functional model. It is not compiled.

    Raises:
        ValueError: if the model was not made by `quantize_model`. Or if the model has a `Lambda`
            and was loaded in Keras' safe mode.

    Example:
        >>> keras_qat.strip_quantization(qat).save("float.keras")
    """
    switch("folded", folded)
    if not isinstance(model, QuantizedModel):
        check_readable(model)
        raise ValueError(
            f"'{model.name}' was not made by keras_qat.quantize_model. Pass the result of that "
            f"function, or the same model loaded with keras.models.load_model."
        )
    if model.float_config is None:
        raise ValueError(
            f"'{model.name}' cannot be converted back to float, because Keras has no configuration "
            f"for one of its objects, such as a layer without get_config, or an activation that is "
            f"a functools.partial."
        )
    customs = collect_custom_objects(list_layers(model)), model.customs
    with deserialization_scope(*customs, safe=model.safe_mode):
        # A copy, because some layers of Keras remove entries from the configuration.
        try:
            plain = make_float_model(deepcopy(model.float_config))
        except AttributeError as error:  # The error is in a user's code.
            raise _make_copy_error(
                "a layer reads an attribute that another layer has not built yet"
            ) from error
        except TypeError as error:  # For example, a function that reads an array from its closure.
            raise _make_copy_error(_find_reason(error)) from error
        except ValueError as error:  # For example, Keras misreads tf.einsum of three tensors.
            if not str(error).startswith(_IN_A_CALL):
                raise
            raise _make_copy_error(_find_reason(error)) from error
    restore_names(plain, model.float_config)
    _assign_weights(plain, model)
    return _fold(plain) if folded else plain


_IN_A_CALL = "Exception encountered when calling layer"


def _find_reason(error: Exception) -> str:
    """Return the first line of an error, and the next line if the first only names a layer."""
    lines = [line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()]
    return ": ".join(lines[: 2 if lines[0].startswith(_IN_A_CALL) else 1])


def _make_copy_error(reason: str) -> ValueError:
    return ValueError(
        f"Keras cannot copy the float model: {reason}. Build it with your own code, and assign the "
        f"weights of this model to it."
    )


def _assign_weights(plain: keras.Model, model: QuantizedModel) -> None:
    float_graph = read_model(plain)
    layer_of = {layer.name: layer for layer in model.layers}

    def has_layer(call: Call) -> bool:
        """Return True if the quantized model has a layer with this name and class."""
        layer: Any = layer_of.get(PREFIX + call.name)
        layer = layer.layer if isinstance(layer, QuantizeWeights) else layer
        return type(layer) is type(call.layer)

    graph = lower_graph(float_graph, model.recipe, has_layer)
    norms = {group.kernel: group.batch_norm for group in place_lowered(graph, model.recipe).groups}
    plain.trainable = True
    done: set[Any] = set()
    frozen: set[int] = set()
    own = {id(weight): weight.name for weight in plain.weights}
    given: set[int] = set()
    for call in graph.calls + graph.loss_only:
        trained: Any = layer_of.get(PREFIX + call.name)
        pairs: list[tuple[Any, Any]] = [(call, trained)]
        if isinstance(trained, QuantizeWrapper):
            pairs = [(call, trained.layer), (norms.get(call), trained.batch_norm)]
        elif isinstance(trained, QuantizeWeights):
            pairs = [(call, trained.layer)]
        for part, source in pairs:
            weights = graph.weights.get(part.layer, part.layer.weights) if source else []
            if source is None or part.layer in done or own.keys().isdisjoint(map(id, weights)):
                continue  # The layer has no weights, or is a constant of an operation.
            if len(weights) != len(source.weights):
                raise _make_copy_error(f"other layers read weights of '{part.name}'")
            done.add(part.layer)
            part.source.trainable = trained.trainable and source.trainable
            if getattr(source, "synchronized", False):  # Keras omits it from configurations.
                part.source.synchronized = True
            trains = set(map(id, source.trainable_weights))
            for new, old in zip(weights, source.weights, strict=True):
                assign_reshaped(new, old)
                given.add(id(new))
                if new.trainable and id(old) not in trains:
                    frozen.add(id(new))
    given |= {id(weight) for metric in plain.metrics for weight in metric.weights}
    if list(model.float_masks) == hash_constant_masks(plain):  # The masks are unchanged.
        given |= {id(weight) for weight in plain.weights if is_constant_mask(weight)}
    missing = [weight for weight in plain.weights if id(weight) not in given]
    of_losses = tf.nest.flatten(
        [graph.weights.get(call.layer, call.layer.weights) for call in graph.loss_only]
    )
    is_lost = not set(map(id, missing)).isdisjoint(map(id, of_losses))
    if is_lost or (missing and _are_read(missing, float_graph)):
        raise _make_copy_error(f"the float model has no counterpart for weight '{missing[0].name}'")
    for layer in list_layers(plain)[1:]:
        if isinstance(layer, keras.Model) and not layer.trainable_weights:
            layer.trainable = False
        if layer.weights and frozen.issuperset(map(id, layer.weights)):  # An inner layer.
            layer.trainable = False
        layer.finalize_state()  # Normalization derives values from its weights.


def _are_read(weights: list[Any], graph: Graph) -> bool:
    """Return whether `weights` affect the outputs. Return True if no outputs can be computed."""
    evaluate, inputs = make_evaluator(graph, flatten_values(graph.outputs)), draw_inputs(graph)
    draw, held = np.random.default_rng(0), [weight.numpy() for weight in weights]
    try:
        before = evaluate(inputs)
        for weight in weights:
            weight.assign(tf.cast(draw.normal(0.0, 2.0, weight.shape), weight.dtype))
        after = evaluate(inputs)
    except Exception:  # The model may not accept random values.
        return True
    finally:
        for weight, values in zip(weights, held, strict=True):
            weight.assign(values)
    return any(np.any(x != y) for x, y in zip(before, after, strict=True))


def _fold(model: keras.Model) -> Any:
    """Return a functional copy of a float model without nested models and BatchNormalization."""
    graph = lower(read_model(model), LoweringContext(activations=False))
    folds = {
        group.kernel.layer: group for group in find_groups(graph, affine=False) if group.batch_norm
    }
    norms = {group.batch_norm.layer for group in folds.values() if group.batch_norm}
    copies: dict[Any, Any] = {}

    def apply(call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
        layer = call.layer
        if layer in norms or type(layer) is Regularize:
            return args[0]
        if layer not in copies:
            changes = {"use_bias": True} if layer in folds else {}
            copies[layer] = clone(layer, name=call.name, **changes)
        return copies[layer](*args, **kwargs)

    folded = rebuild_model(graph, apply=apply)
    for layer, copy in copies.items():
        weights = graph.weights.get(layer, layer.weights)
        for new, old in zip(copy.weights, weights, strict=layer not in folds):
            new.assign(old)
        if layer in folds:
            if not layer.use_bias:
                copy.bias.assign(tf.zeros_like(copy.bias))
            _fold_norm(copy, folds[layer])
        copy.finalize_state()
    return folded


def _fold_norm(layer: keras.layers.Layer, group: Group) -> None:
    """Multiply and shift the weights of `layer` to include the BatchNormalization of its group."""
    assert group.batch_norm is not None
    factor, bias = fold_normalization(layer.bias, group.batch_norm.layer)
    ((name, axes),) = group.weights.items()
    getattr(layer, name).assign(scale_channels(getattr(layer, name), axes, factor))
    layer.bias.assign(bias)
