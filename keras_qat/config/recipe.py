"""Recipes: descriptions of how to quantize a model, as data."""

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
        quantize: False keeps the layers in float. True reverts an earlier False. True also
            quantizes LayerNormalization and GroupNormalization, which stay in float by default.
        open: whether to trace custom layers and quantize their operations. False keeps custom
            layers in float. None traces custom layers, except layers that normalize. True also
            traces layers that normalize.
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
        placement: the rules that choose the quantized tensors: "int8" or "contrib".
        weights: specification of weights.
        activations: specification of activations.
        fold: how training folds BatchNormalization into quantized weights: "per_channel",
            "per_tensor", or "correction". `tf.contrib.quantize` uses "correction".
        folded_weights: specification of weights with a folded BatchNormalization. None means
            `weights`.
        quant_delay: first training step that quantizes, counted from 1. `callbacks.QuantDelay`
            overrides it.
        freeze_bn_delay: first training step that freezes BatchNormalization, or None.
            `callbacks.FreezeBatchNorm` overrides it.
        overrides: settings that differ for some layers. Later overrides win. See `override`.
        end_bits: bits of weights, inputs and outputs of the first and last layers. Activations that
            no convolution or matrix product reads, such as the inputs of an Add, also have these
            bits. Activations never get fewer bits than the specification `activations` has. None
            means the same bits as elsewhere.
        unpacked_bits: bits of weights that files cannot store as int4, such as depthwise kernels.
            Files have int4 only in convolutions and dense layers. None means the same as elsewhere.
        without_float: True to quantize also LayerNormalization and similar layers, and computations
            of indices. On targets with float, this is slower, and rounding may change an index.
            `strict=True` and targets without float set it to True.
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

        The recipe itself does not change. Assign the result, or pass it to `quantize_model`.

        Args:
            layers: a layer's name, a prefix of names, a pattern with `*`, or a class name.
            weight_bits: 2 to 8, or None for the recipe's bits.
            activation_bits: 2 to 8, or None for the recipe's bits.
            quantize: False keeps the layers in float. True reverts an earlier False. True also
                quantizes LayerNormalization and GroupNormalization, which stay in float by default.
            open: whether to trace custom layers and quantize their operations. False keeps custom
                layers in float. None traces custom layers, except layers that normalize. True also
                traces layers that normalize.

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
        """Returns a copy of the recipe that keeps zero weights zero, or equal weights equal.

        Args:
            what: "zeros" keeps zero weights at zero, for pruned models. "clusters" also keeps equal
                weights of a layer equal, for clustered models. "clusters" slows down training. In
                the file, only weights of the same output channel stay equal, because each channel
                has its own scale.

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
"""Attributes of a recipe, to warn if a user calls `recipe.override(...)` but ignores the result.
`_is_used` is a list, because `_forget` reads it after the recipe is deleted. It is empty until the
recipe is used. `_lost` lists the ignored overrides."""


def _note_result(recipe: Recipe, result: Recipe, layers: str) -> None:
    """Watch whether `result` of `recipe.override(layers, ...)` is deleted without being used."""
    _note_use(recipe)
    is_used: list[bool] = []
    vars(result)[_USED] = is_used
    weakref.finalize(result, _forget, weakref.ref(recipe), is_used, layers).atexit = False


def note_use(recipe: Recipe) -> None:
    """Records that a recipe is used. Warns if a user ignored a result of `recipe.override`."""
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
    """Called when a result of `recipe.override` is deleted. Record `layers` if it was not used."""
    parent = recipe()
    if parent is not None and not is_used:
        vars(parent).setdefault(_LOST, []).append(layers)
