"""Defines recipes, which describe as data how to quantize a model."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

from keras_qat.config import specs
from keras_qat.config.specs import QuantSpec
from keras_qat.io.counts import check_count
from keras_qat.messages import warn_caller


@dataclasses.dataclass(frozen=True)
class Override:
    """Settings of a recipe that differ for some layers.

    Args:
        layers: a layer's name, a prefix of names, a pattern with `*`, or a class name.
        weight_bits: 2 to 8, or None for the recipe's bits.
        activation_bits: 2 to 8, or None for the recipe's bits.
        quantize: False to keep the layers in float. True reverts an earlier False, and quantizes
            layers that stay in float by default: LayerNormalization and GroupNormalization.
        open: whether to trace custom layers, to quantize their operations. False keeps them in
            float. True also traces layers that normalize; the default, None, does not.
    """

    layers: str
    weight_bits: int | None = None
    activation_bits: int | None = None
    quantize: bool | None = None
    open: bool | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.layers, str) and self.layers):
            name = getattr(self.layers, "name", "Dense")
            if isinstance(self.layers, type):
                name = self.layers.__name__
            if isinstance(self.layers, (list, tuple)):
                raise ValueError(
                    f"override({self.layers!r}): pass one layer, class or pattern, and call "
                    f"override once for each."
                )
            raise ValueError(
                f"override({self.layers!r}): pass the name of a layer or a class, e.g. {name!r}."
            )
        settings = (self.weight_bits, self.activation_bits, self.quantize, self.open)
        if all(setting is None for setting in settings):
            raise ValueError(
                f"override({self.layers!r}) changes nothing. Pass at least one of "
                f"weight_bits=, activation_bits=, quantize= and open=."
            )
        for name in ("weight_bits", "activation_bits"):
            bits = getattr(self, name)
            if bits is not None:
                object.__setattr__(self, name, specs.check_bits(bits))


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Description of how a model is quantized.

    Args:
        name: the name in reports.
        placement: the rules that decide which tensors are quantized: "int8" or "contrib".
        weights: specification of weights.
        activations: specification of activations.
        fold: how training folds BatchNormalization into quantized weights: "per_channel",
            "per_tensor", or "correction", as `tf.contrib.quantize` does.
        folded_weights: specification of weights with a folded BatchNormalization, if it differs.
        quant_delay: first training step, counted from 1, that quantizes; `callbacks.QuantDelay`
            overrides it.
        freeze_bn_delay: first training step that freezes BatchNormalization, or None;
            `callbacks.FreezeBatchNorm` overrides it.
        overrides: settings that differ for some layers; later overrides win. See `override`.
        end_bits: bits of the weights, inputs and outputs of the first and last layers, and of
            activations that are not multiplied, such as the terms of a sum. No activation has fewer
            bits than `activations`. None for the same bits as elsewhere.
        unpacked_bits: bits of weights that files cannot pack: the weights of all layers except
            convolutions and dense layers. None for the same bits as other weights.
        without_float: whether normalization layers and computed indices also use integers. This is
            slower on targets with float, and rounding may change indices. Targets without float and
            `strict=True` set it.
    """

    name: str
    placement: str
    weights: QuantSpec
    activations: QuantSpec
    fold: str
    folded_weights: QuantSpec | None = None
    quant_delay: int = 0
    freeze_bn_delay: int | None = None
    overrides: tuple[Override, ...] = ()
    end_bits: int | None = None
    unpacked_bits: int | None = None
    without_float: bool = False

    def __post_init__(self) -> None:
        for name in ("end_bits", "unpacked_bits"):
            bits = getattr(self, name)
            if bits is not None:
                object.__setattr__(self, name, specs.check_bits(bits))
        for name in ("quant_delay", "freeze_bn_delay"):
            steps = getattr(self, name)
            if steps is not None:
                object.__setattr__(self, name, check_count(name, steps, least=0))
        wide = self.activations.bits == 16
        for override in self.overrides:
            if override.activation_bits is not None and wide:
                raise ValueError(
                    f"activation_bits={override.activation_bits} for '{override.layers}': all "
                    f"activations of recipe '{self.name}' have 16 bits, and TFLite's kernels do "
                    f"not mix widths. Keep a layer in float with quantize=False."
                )

    def override(
        self,
        layers: str,
        *,
        weight_bits: int | None = None,
        activation_bits: int | None = None,
        quantize: bool | None = None,
        open: bool | None = None,
    ) -> Recipe:
        """Returns a copy of the recipe with other settings for some layers. Later calls win.

        The recipe itself does not change: assign the result, or pass it to `quantize_model`.

        Args:
            layers: a layer's name, a prefix of names, a pattern with `*`, or a class name.
            weight_bits: 2 to 8, or None for the recipe's bits.
            activation_bits: 2 to 8, or None for the recipe's bits.
            quantize: False keeps the layers in float. True reverts an earlier False, and quantizes
                layers that stay in float by default: LayerNormalization and GroupNormalization.
            open: whether to trace custom layers, to quantize their operations. False keeps them in
                float. True also traces layers that normalize; the default, None, does not.

        Raises:
            ValueError: on bits outside 2 to 8, or if no setting is passed.

        Example:
            >>> recipe = keras_qat.recipes.int8().override("Dense", weight_bits=4)
            >>> recipe = recipe.override("head*", quantize=False)
        """
        override = Override(layers, weight_bits, activation_bits, quantize, open)
        result = dataclasses.replace(self, overrides=(*self.overrides, override))
        _note_result(self, result, layers)
        return result

    def preserve(self, what: specs.Preserve) -> Recipe:
        """Returns a copy of the recipe that preserves zeros or clusters of weights in training.

        Args:
            what: "zeros" keeps zero weights at zero, so a pruned model stays pruned. "clusters"
                also keeps equal weights of a layer equal, as in a clustered model. The file only
                keeps weights of the same output channel equal, because each channel has its own
                scale. Preserving clusters slows down training.

        Raises:
            ValueError: if the recipe has one range for all weights of a layer.

        Example:
            >>> recipe = keras_qat.recipes.int8().preserve("zeros")
        """
        if self.fold != "per_channel":
            raise ValueError(
                f"Recipe '{self.name}' has one range for all weights of a layer. To preserve "
                f"{what}, use a recipe with one range per channel, such as recipes.int8()."
            )
        return dataclasses.replace(self, weights=dataclasses.replace(self.weights, preserve=what))

    def to_config(self) -> dict[str, Any]:
        """Returns the recipe as JSON data."""
        config = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        overrides = [dataclasses.asdict(override) for override in self.overrides]
        return (
            config
            | {part: specs.to_config(config[part]) for part in _SPECS}
            | {"overrides": overrides}
        )

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Recipe:
        """Creates a recipe from the result of `to_config`."""
        parts = {part: specs.from_config(config[part]) for part in _SPECS}
        overrides = tuple(Override(**settings) for settings in config.get("overrides", ()))
        return cls(**{**config, **parts, "overrides": overrides})


_SPECS = ("weights", "activations", "folded_weights")


_USED, _LOST = "_is_used", "_lost"
"""Names of two attributes of a recipe: a list that is empty until the recipe is used, and the
layers of overrides whose results were never used."""


def _note_result(recipe: Recipe, result: Recipe, layers: str) -> None:
    """Remember that `recipe.override(layers, ...)` returned `result`, to warn if it is unused."""
    _note_use(recipe)
    is_used: list[bool] = []
    vars(result)[_USED] = is_used
    weakref.finalize(result, _forget, weakref.ref(recipe), is_used, layers).atexit = False


def note_use(recipe: Recipe) -> None:
    """Records that a recipe is used, and warns if results of its `override` were never used."""
    _note_use(recipe)
    lost = vars(recipe).pop(_LOST, None)
    if lost:
        warn_caller(
            f"recipe.override({lost[0]!r}, ...) returns a new recipe, which was not used. The "
            f"recipe in use has no such override. Write recipe = recipe.override({lost[0]!r}, ...)."
        )


def _note_use(recipe: Recipe) -> None:
    vars(recipe).get(_USED, []).append(True)


def _forget(recipe: weakref.ref[Recipe], is_used: list[bool], layers: str) -> None:
    """Record that the result of a recipe's override was deleted, unless it was used."""
    parent = recipe()
    if parent is not None and not is_used:
        vars(parent).setdefault(_LOST, []).append(layers)
