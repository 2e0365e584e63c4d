"""Functions that create recipes, and `get`, which returns a recipe by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, get_args

from keras_qat.config.recipe import Override, Recipe, note_use
from keras_qat.config.specs import QuantSpec
from keras_qat.messages import suggest, warn_caller

__all__ = [
    "Override",
    "Recipe",
    "contrib",
    "get",
    "int4_weights",
    "int8",
    "int16x8",
    "low_bits",
    "power_of_two",
    "symmetric",
]


Ranges = Literal["moving_average", "learned", "learned_clipping"]


def int8(
    weight_bits: int = 8,
    activation_bits: int = 8,
    ema_decay: float = 0.999,
    *,
    per_channel: bool = True,
    ranges: Ranges = "moving_average",
) -> Recipe:
    """Returns the default recipe, for TFLite's int8 kernels.

    Weights have one symmetric range per output channel. The weight with the largest magnitude
    becomes 127 or -127 with 8 bits. Activations, inputs and outputs have one asymmetric range per
    tensor. The range is the moving average of the minimum and the maximum of batches.

    Args:
        weight_bits: 2 to 8.
        activation_bits: 2 to 8.
        ema_decay: decay per step of the moving averages. 0.999 averages about the last 1,000
            batches. Before batch 10,000, it averages about the last tenth of all batches so far,
            because weights change quickly at first.
        per_channel: False for one range per weight tensor, after BatchNormalization is folded in.
            Some NPUs require this. Other NPUs run several times as fast with it. The model then
            needs training, because `calibrate` alone loses accuracy.
        ranges: how ranges are found. "moving_average" averages observed extremes. "learned" trains
            the ranges of activations and per-channel weights (LSQ), for 4 bits and fewer.
            "learned_clipping" trains only the ranges of activations. Its gradients ignore rounding
            errors (PACT). Before you train ranges, call `calibrate(qat, x, method="mse")`.

    Raises:
        ValueError: on bits outside 2 to 8 or unknown `ranges`.

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


def symmetric(ema_decay: float = 0.999, *, ranges: Ranges = "moving_average") -> Recipe:
    """Returns a recipe with symmetric int8 activations: all zero points are 0.

    TensorRT supports only such files. On other runtimes, `int8` is more accurate, because symmetric
    tensors after a ReLU use half of the 256 levels.

    Args:
        ema_decay: decay per step of the moving averages that set the ranges of activations.
        ranges: "moving_average", "learned" or "learned_clipping". See `int8`.

    Raises:
        ValueError: on unknown `ranges`.

    Example:
        >>> qat = keras_qat.quantize_model(model, keras_qat.recipes.symmetric())
    """
    base = int8(ema_decay=ema_decay, ranges=ranges)
    activations = dataclasses.replace(base.activations, symmetric=True)
    return dataclasses.replace(base, name="symmetric", activations=activations)


def power_of_two(ema_decay: float = 0.999) -> Recipe:
    """Returns a recipe with one power-of-two scale per tensor, and zero points of 0.

    It is for chips that rescale with shifts, such as Espressif's chips with ESP-DL. Weights and
    activations have 8 bits. Scales are rounded up to the next power of two. This costs up to one
    bit of precision, so train the model, or call `calibrate(qat, x, method="mse")`. Exported files
    are ordinary int8 files. LSTM, GRU, PReLU and normalization layers also need scales that are
    not powers of two.

    Args:
        ema_decay: decay per step of the moving averages that set the ranges of activations.

    Example:
        >>> qat = keras_qat.quantize_model(model, keras_qat.recipes.power_of_two())
    """
    base = int8(ema_decay=ema_decay, per_channel=False)
    return dataclasses.replace(
        base,
        name="power_of_two",
        weights=dataclasses.replace(base.weights, power_of_two=True),
        activations=dataclasses.replace(base.activations, symmetric=True, power_of_two=True),
    )


def int16x8(weight_bits: int = 8, ema_decay: float = 0.999, *, per_channel: bool = True) -> Recipe:
    """Returns a recipe with int16 activations and int8 weights, for TFLite's 16x8 kernels.

    Use it for models whose activations need more than 256 levels, such as audio, regression or
    super-resolution. Activations have 65,536 levels, symmetric around zero. Files are hardly larger
    than with int8, but slower. XNNPACK has no 16x8 kernels. A few layers, such as PReLU, stay in
    float. `predict` returns the same quantized values as the file.

    Args:
        weight_bits: 2 to 8.
        ema_decay: decay per step of the moving averages that set the ranges of activations.
        per_channel: False for one range per weight tensor, after BatchNormalization is folded in.
            Some NPUs need this.

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
    """Returns a recipe with 4-bit weights and int8 activations: half the size of `int8`.

    By default, `export_tflite` stores one weight per byte. All kernels run such files at full
    speed. After `qat.pack_int4 = True`, it packs two weights into a byte, but only in convolutions
    and dense layers. Other weights, such as depthwise kernels, keep 8 bits, because 4 bits would
    not make the file smaller. `int8(weight_bits=4)` uses 4 bits for all weights. The model needs
    `learn_rounding` or training. To give sensitive layers more bits, use `end_bits` or
    `override(name, weight_bits=8)`.

    Args:
        activation_bits: 2 to 8.
        ema_decay: decay per step of the moving averages that set the ranges of activations.
        per_channel: False for one range per weight tensor, after BatchNormalization is folded in.
            Some NPUs need this.
        ranges: "moving_average", "learned" or "learned_clipping". See `int8`.
        end_bits: bits of the first and last layers, such as 8. The default is 4, as elsewhere.

    Raises:
        ValueError: on bits outside 2 to 8.
    """
    base = int8(4, activation_bits, ema_decay, per_channel=per_channel, ranges=ranges)
    return dataclasses.replace(base, name="int4_weights", end_bits=end_bits, unpacked_bits=8)


def low_bits(
    weight_bits: int = 4,
    activation_bits: int = 4,
    *,
    ranges: Ranges = "learned",
    end_bits: int | None = 8,
    weights: int | None = None,
    activations: int | None = None,
) -> Recipe:
    """Returns a recipe for few bits, with learned ranges and 8 bits in the first and last layers.

    Activations that no convolution or matrix product reads, such as the inputs of an Add, also have
    8 bits. Fewer bits would save little there. The recipe is for research and for hardware with
    low-bit kernels. Files store activations as int8, but use only 2^bits values. Call
    `calibrate(qat, x, method="mse")`, then train the model.

    Args:
        weight_bits: 2 to 8.
        activation_bits: 2 to 8.
        ranges: "learned", "learned_clipping" or "moving_average". See `int8`.
        end_bits: bits of the first and last layers, and of activations that no convolution or
            matrix product reads. None means the same bits as elsewhere.
        weights, activations: deprecated names of `weight_bits` and `activation_bits`.

    Raises:
        ValueError: on bits outside 2 to 8.
    """
    if weights is not None or activations is not None:
        advice = "use weight_bits= and activation_bits=."
        warn_caller(f"low_bits(weights=, activations=) is deprecated: {advice}", DeprecationWarning)
        weight_bits = weight_bits if weights is None else weights
        activation_bits = activation_bits if activations is None else activations
    base = int8(weight_bits, activation_bits, ranges=ranges)
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
    """Returns a recipe that quantizes like `tf.contrib.quantize` of TensorFlow 1.15.

    BatchNormalization is folded into weights. Each weight tensor has one range, from its
    minimum to its maximum in the last training batch. The recipe quantizes the same activations as
    TensorFlow 1.15. It does not quantize inputs.

    Args:
        weight_bits: 2 to 8.
        activation_bits: 2 to 8.
        symmetric: whether ranges are symmetric, except after Add and Multiply layers.
        ema_decay: decay per step of the activations' moving averages.
        quant_delay: the first training step that quantizes, counted from 1. Earlier steps only
            observe ranges.
        freeze_bn_delay: first training step that uses BatchNormalization's moving statistics, or
            None.
        weight_narrow_range: True to quantize 8-bit weights to the values 1 to 255, not 0 to 255.
            For the first version of `tf.contrib.quantize`, pass False.
        quantize_folded_weights_use_ema: whether the range of weights with a folded
            BatchNormalization is a moving average. The first version had this option. With it,
            `quant_delay` also applies to these weights.
        delay_weights: whether `quant_delay` applies to all weights. For the first version, pass
            False.

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
    "power_of_two": power_of_two,
    "symmetric": symmetric,
    "contrib": contrib,
}


def get(recipe: str | Recipe) -> Recipe:
    """Returns a recipe by name, or the recipe itself.

    Args:
        recipe: "int8", "int16x8", "int4_weights", "low_bits", "symmetric", "power_of_two",
            "contrib", or a recipe.

    Raises:
        ValueError: on an unknown name.
    """
    if isinstance(recipe, Recipe):
        note_use(recipe)
        return recipe
    if isinstance(recipe, str) and recipe in NAMED:
        return NAMED[recipe]()
    if hasattr(recipe, "shape"):
        raise ValueError(
            f"Expected a recipe, got {type(recipe).__name__}. quantize_model needs no data. Pass "
            f"data to calibrate or fit."
        )
    name = getattr(recipe, "__name__", None)
    if name in NAMED:
        raise ValueError(f"recipes.{name} is the function that makes a recipe: pass {name}().")
    raise ValueError(
        f"There is no recipe {recipe!r}.{suggest(recipe, NAMED)} Use one of {sorted(NAMED)}, or "
        f"a Recipe made by a function in keras_qat.recipes, such as recipes.int8(weight_bits=4)."
    )
