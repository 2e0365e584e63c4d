"""The notice of layers that compute in float although nobody asked for that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from keras_qat.graph.operations import is_operation, name_in_tensorflow
from keras_qat.keras2.backend import keras
from keras_qat.messages import pluralize, show_once
from keras_qat.placement.layer_settings import ASKED_FOR


def report_float_layers(layers: Iterable[tuple[Any, str]], start: str, advice: str) -> None:
    """Logs in a line how many layers of which classes compute in float, once in a process.

    Layers that the recipe or the scope leaves in float do not count.

    Args:
        layers: the user's layer and the reason of each call in float; a layer counts once.
        start: beginning of the sentence.
        advice: what follows the sentence.
    """
    unasked = [(layer, reason) for layer, reason in layers if not reason.startswith(ASKED_FOR)]
    if not unasked:
        return
    labels = {id(layer): describe_layer(layer) for layer, _ in unasked}
    classes = ", ".join(f"{count} {kind}" for kind, count in Counter(labels.values()).most_common())
    reasons = {reason for _, reason in unasked}
    why = f" ({reasons.pop().removeprefix('in float, ')})" if len(reasons) == 1 else ""
    show_once(
        f"{start} {pluralize(len(labels), 'layer')} in float: {classes}{why}. {advice}", key=classes
    )


def describe_layer(layer: Any) -> str:
    """Returns a layer's class name, or the name of an activation or operation."""
    if is_operation(layer):
        return f"tf.{name_in_tensorflow(layer)}"
    if type(layer) is keras.layers.Activation:
        return str(getattr(layer.activation, "__name__", layer.activation))
    return type(layer).__name__
