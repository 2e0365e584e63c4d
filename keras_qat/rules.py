"""Rules for layers that keras_qat does not know."""

from __future__ import annotations

from typing import Any

from keras_qat.kernels import KERNELS
from keras_qat.kinds import KINDS

__all__ = ["register_rule"]


def register_rule(
    layer_class: type,
    *,
    weights: dict[str, tuple[int, ...]] | None = None,
    kind: str | None = None,
) -> None:
    """Says how a custom layer is quantized. Without a rule it computes in float.

    Register the class with Keras too (`keras.utils.register_keras_serializable`), or a saved model
    cannot be loaded. Rules are not saved: give them again where a model is exported.

    Args:
        layer_class: the layer's class; subclasses need rules of their own.
        weights: attribute of the layer that holds a weight (of the shape of a kernel) -> axes of
            its output channels, counted from the end; `()` for one range for all. The layer's
            `call` has to read the weight from that attribute. Its output is quantized too.
        kind: for a layer without such weights, what it is like: `"move"` for one that only moves
            values (its output has its input's range), `"add"`, `"multiply"`, `"concatenate"`,
            `"mean"`, or any other kind in `keras_qat.kinds.KINDS`.

    Raises:
        ValueError: unless exactly one of `weights` and `kind` is given, or on an unknown kind.

    Example:
        >>> keras_qat.register_rule(MyDense, weights={"kernel": (-1,)})
        >>> keras_qat.register_rule(ChannelShuffle, kind="move")
    """
    if (weights is None) == (kind is None):
        raise ValueError("Give either the layer's weights or its kind.")
    if weights is not None:
        if len(weights) != 1:
            raise ValueError(
                f"weights={weights!r}: a rule is for one weight. Split a layer that has several."
            )
        KERNELS[layer_class] = {name: tuple(axes) for name, axes in weights.items()}
        KINDS[layer_class] = "kernel"
        return
    known: set[Any] = set(KINDS.values()) - {"kernel", "affine"}
    if kind not in known:
        raise ValueError(f"kind={kind!r}: use one of {', '.join(sorted(known))}.")
    KINDS[layer_class] = str(kind)
