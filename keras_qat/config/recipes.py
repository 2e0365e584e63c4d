"""Recipes: how a model is quantized, as data.

A recipe names its placement (which tensors get a quantizer) and the specifications for weights
and activations. `int8` is what TFLite's int8 kernels compute.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, get_args

from keras_qat.config import specs
from keras_qat.config.specs import QuantSpec

__all__ = ["Override", "Recipe", "contrib", "get", "int4_weights", "int8", "int16x8", "low_bits"]


Ranges = Literal["moving_average", "learned", "learned_clipping"]


@dataclasses.dataclass(frozen=True)
class Override:
    """Other settings for some layers.

    Args:
        layers: a layer's name, the beginning of names, a pattern with `*`, or a class name.
        weight_bits: 2 to 8, or None for the recipe's.
        activation_bits: 2 to 8, or None for the recipe's.
        quantize: False to leave the layers in float; True to take back an earlier False, and to
            have integers for layers that are in float unless asked for: LayerNormalization and
            GroupNormalization.
        open: whether custom layers are opened: False to compute them in float as a whole, True to
            open also those that normalize, None for what is usual.
    """

    layers: str
    weight_bits: int | None = None
    activation_bits: int | None = None
    quantize: bool | None = None
    open: bool | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.layers, str) and self.layers):
            name = getattr(self.layers, "__name__", getattr(self.layers, "name", "Dense"))
            raise ValueError(
                f"override({self.layers!r}): layers are named here, or their class: {name!r}."
            )
        settings = (self.weight_bits, self.activation_bits, self.quantize, self.open)
        if all(each is None for each in settings):
            raise ValueError(
                f"override({self.layers!r}) changes nothing. Say what differs for these layers: "
                f"weight_bits=, activation_bits=, quantize=, open=."
            )
        for bits in (self.weight_bits, self.activation_bits):
            if bits is not None:
                specs.check_bits(bits)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a model is quantized.

    Args:
        name: what reports call it.
        placement: name of the rules that say which tensors are quantized, in `placement.RULES`.
        weights: specification of kernels.
        activations: specification of activations.
        fold: how BatchNormalization and weight quantization go together, in `folding.FOLDS`.
        folded_weights: specification of kernels that a BatchNormalization is folded into, where
            it differs.
        quant_delay: first training step, counted from 1, that quantizes; `callbacks.QuantDelay`
            overrides it.
        freeze_bn_delay: first training step that freezes BatchNormalization, None for never;
            `callbacks.FreezeBatchNorm` overrides it.
        overrides: other settings for some layers; later ones win. See `override`.
        end_bits: bits of the first and the last layers, None for those of the rest: of their
            weights, of what they read and give, and of other activations that no layer with
            weights multiplies, such as those that are added up. Never fewer than `activations`.
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

    def __post_init__(self) -> None:
        if self.end_bits is not None:
            specs.check_bits(self.end_bits)
        wide = self.activations.bits == 16
        for each in self.overrides:
            if each.activation_bits is not None and wide:
                raise ValueError(
                    f"activation_bits={each.activation_bits} for '{each.layers}': in recipe "
                    f"'{self.name}' all activations have 16 bits, as kernels take no mixture. "
                    f"Leave layers in float with quantize=False."
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
        """The recipe with other settings for some layers. Later calls win.

        Args and errors: as for `Override`.

        Example:
            >>> recipe = keras_qat.recipes.int8().override("Dense", weight_bits=4)
            >>> recipe = recipe.override("head*", quantize=False)
        """
        more = Override(layers, weight_bits, activation_bits, quantize, open)
        return dataclasses.replace(self, overrides=(*self.overrides, more))

    def preserve(self, what: specs.Preserve) -> Recipe:
        """The recipe with training that keeps zeros or clusters of the float model's weights.

        Args:
            what: "zeros": weights that are zero stay zero, and are in the file, so that a pruned
                model stays pruned. "clusters": equal weights of a layer stay equal, as those of a
                clustered model; in the file those of one output channel are, which has a scale of
                its own. Looking for them takes time in each step.

        Raises:
            ValueError: if the recipe quantizes folded weights: with one range for the tensor.

        Example:
            >>> recipe = keras_qat.recipes.int8().preserve("zeros")
        """
        if self.fold != "per_channel":
            raise ValueError(
                f"Recipe '{self.name}' has one range for all weights of a layer; {what} are kept "
                f"with one for each channel, as in recipes.int8()."
            )
        return dataclasses.replace(self, weights=dataclasses.replace(self.weights, preserve=what))

    def to_config(self) -> dict[str, Any]:
        """The recipe as JSON data."""
        config = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        overrides = [dataclasses.asdict(each) for each in self.overrides]
        return (
            config
            | {part: specs.to_config(config[part]) for part in _SPECS}
            | {"overrides": overrides}
        )

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Recipe:
        """The inverse of `to_config`."""
        parts = {part: specs.from_config(config[part]) for part in _SPECS}
        overrides = tuple(Override(**each) for each in config.get("overrides", ()))
        return cls(**{**config, **parts, "overrides": overrides})


_SPECS = ("weights", "activations", "folded_weights")


def int8(
    weight_bits: int = 8,
    activation_bits: int = 8,
    ema_decay: float = 0.999,
    *,
    per_channel: bool = True,
    ranges: Ranges = "moving_average",
) -> Recipe:
    """What TFLite's int8 kernels compute: the default.

    Weights are symmetric with one range per output channel and a narrow range, taken from the
    current values. Activations, the model's inputs and its outputs are asymmetric per tensor,
    with a moving average of the batches' extremes.

    Args:
        weight_bits: 2 to 8.
        activation_bits: 2 to 8.
        ema_decay: decay per step of the moving averages, corrected for their start at zero:
            with 0.999 a range is the plain average of its first few hundred batches.
        per_channel: False for weights with one range for the tensor, that of the kernel with its
            BatchNormalization folded in: for NPUs that take nothing else, or take it several times
            as fast. It needs training; `calibrate` alone loses accuracy.
        ranges: what ranges are made of. "moving_average" follows what is seen. "learned" trains
            them with the weights, by the errors of rounding and clipping (LSQ), those of weights
            with a range for each channel too: for 4 bits and fewer. "learned_clipping" trains
            those of activations, by what is clipped (PACT). Both start from `calibrate`, best with
            method="mse".

    Raises:
        ValueError: on bits outside 2 to 8, and ranges that do not exist.

    Source: Krishnamoorthi 2018 (arXiv:1806.08342) and the TFLite 8-bit specification.
    """
    if ranges not in get_args(Ranges):
        names = ", ".join(map(repr, get_args(Ranges)))
        raise ValueError(f"ranges={ranges!r}: use one of {names}.")
    return Recipe(
        name="int8",
        placement="int8",
        weights=QuantSpec(
            weight_bits,
            symmetric=True,
            narrow_range=True,
            per_channel=per_channel,
            observer="learned" if ranges == "learned" and per_channel else "current_value",
        ),
        activations=QuantSpec(activation_bits, observer=ranges, ema_decay=ema_decay),
        fold="per_channel" if per_channel else "per_tensor",
    )


def int16x8(weight_bits: int = 8, ema_decay: float = 0.999, *, per_channel: bool = True) -> Recipe:
    """Activations in int16, weights in int8: what TFLite's 16x8 kernels compute.

    For models whose activations need more than 256 levels (audio, regression, super-resolution):
    65 536 of them, symmetric around zero. Files are hardly larger, as they hold weights; kernels
    are slower than int8 ones, and XNNPACK has none. Hard swish and PReLU have no int16
    kernel and compute in float. At inference layers with a kernel compute in float64, and give
    the file's codes.

    Args:
        weight_bits: 2 to 8.
        ema_decay, per_channel: as in `int8`.

    Raises:
        ValueError: on bits outside 2 to 8.

    Source: the TFLite 16x8 quantization specification.
    """
    return dataclasses.replace(
        int8(weight_bits, ema_decay=ema_decay, per_channel=per_channel),
        name="int16x8",
        activations=QuantSpec(16, symmetric=True, ema_decay=ema_decay),
    )


def int4_weights(
    activation_bits: int = 8,
    ema_decay: float = 0.999,
    *,
    per_channel: bool = True,
    ranges: Ranges = "moving_average",
    end_bits: int | None = None,
) -> Recipe:
    """Weights in 4 bits, activations in int8: half of the size of `int8`.

    `export_tflite` writes the weights in int8 codes, which every kernel takes at full speed, or
    with `pack_int4=True` two in a byte. `learn_rounding` or training is a must. Other bits for
    sensitive layers: `end_bits`, `override(name, weight_bits=8)`, `search_bits`.

    Args:
        activation_bits, ema_decay, per_channel, ranges: as in `int8`.
        end_bits: bits of the first and the last layers, often 8, as in `low_bits`; 4 by default.

    Raises:
        ValueError: on bits outside 2 to 8.
    """
    base = int8(4, activation_bits, ema_decay, per_channel=per_channel, ranges=ranges)
    return dataclasses.replace(base, name="int4_weights", end_bits=end_bits)


def low_bits(
    weights: int = 4,
    activations: int = 4,
    *,
    ranges: Ranges = "learned",
    end_bits: int | None = 8,
) -> Recipe:
    """Few bits for weights and activations, as research has them: learned ranges, 8 bits at ends.

    Few bits are for what costs: products of weights and activations. The first and the last layers
    have 8, and so have activations that are added up or averaged, and none of them multiplied.

    Files hold activations in int8, of which 2^bits values occur: for hardware that has kernels of
    fewer bits, and for comparisons. Training is a must, after `calibrate(qat, x, method="mse")`.

    Args:
        weights: bits, 2 to 8.
        activations: bits, 2 to 8.
        ranges: as in `int8`.
        end_bits: bits of the first and the last layers and of activations that no layer with
            weights multiplies, None for those of the rest.

    Raises:
        ValueError: on bits outside 2 to 8.
    """
    base = int8(weights, activations, ranges=ranges)
    return dataclasses.replace(base, name="low_bits", end_bits=end_bits)


def contrib(
    weight_bits: int = 8,
    activation_bits: int = 8,
    symmetric: bool = False,
    ema_decay: float = 0.999,
    quant_delay: int | None = None,
    freeze_bn_delay: int | None = None,
    *,
    weight_narrow_range: bool = True,
    quantize_folded_weights_use_ema: bool = False,
    delay_weights: bool = True,
) -> Recipe:
    """What `tf.contrib.quantize` of TensorFlow 1.15 did, number by number.

    Weights have one range per tensor, that of the kernel folded with its BatchNormalization,
    from the last batch. Activations are quantized where the original placed quantizers; the
    model's input is not.

    Args:
        weight_bits: 2 to 8.
        activation_bits: 2 to 8.
        symmetric: whether ranges are symmetric. Those behind Add and Multiply layers never are.
        ema_decay: decay per step of the activations' moving averages.
        quant_delay: first training step, counted from 1, that quantizes. Ranges are observed
            from the start.
        freeze_bn_delay: first training step that takes BatchNormalization's moving statistics;
            None for never.
        weight_narrow_range: whether weights leave out the lowest code. False in the first version
            of the rewriter.
        quantize_folded_weights_use_ema: whether the range of folded weights is a moving average,
            an option of the first version. They are then delayed like activations.
        delay_weights: whether `quant_delay` holds for weights too. In the first version it did
            not, except for folded weights with a moving average.

    Raises:
        ValueError: on bits outside 2 to 8 or a decay outside 0 to 1.
    """
    weights = QuantSpec(
        weight_bits,
        symmetric=symmetric,
        narrow_range=weight_narrow_range,
        observer="last_value",
        delayed=delay_weights,
        initial_range=(-6.0, 6.0),
    )
    folded_weights = dataclasses.replace(
        weights, observer="shadowed_moving_average", ema_decay=ema_decay, delayed=True
    )
    return Recipe(
        name="contrib",
        placement="contrib",
        weights=weights,
        activations=QuantSpec(
            activation_bits,
            symmetric=symmetric,
            observer="shadowed_moving_average",
            ema_decay=ema_decay,
            initial_range=(0.0, 6.0),
        ),
        fold="correction",
        folded_weights=folded_weights if quantize_folded_weights_use_ema else None,
        quant_delay=quant_delay or 0,
        freeze_bn_delay=freeze_bn_delay,
    )


NAMED: dict[str, Callable[..., Recipe]] = {
    "int8": int8,
    "int16x8": int16x8,
    "int4_weights": int4_weights,
    "low_bits": low_bits,
    "contrib": contrib,
}


def get(recipe: str | Recipe) -> Recipe:
    """A recipe by name, or the recipe itself.

    Raises:
        ValueError: on an unknown name.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str) and recipe in NAMED:
        return NAMED[recipe]()
    name = getattr(recipe, "__name__", None)
    if name in NAMED:
        raise ValueError(f"recipes.{name} is the function that makes a recipe: pass {name}().")
    raise ValueError(
        f"There is no recipe {recipe!r}. Use one of {sorted(NAMED)}, or a Recipe made by a "
        f"function in keras_qat.recipes."
    )
