"""Learned rounding (AdaRound): each weight goes up or down, whichever serves the layer's output."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from keras_qat.frontend.keras2.backend import one_at_a_time
from keras_qat.training.post_training.bias_correction import correct, means_in_float
from keras_qat.training.post_training.reconstruction import Reconstruction
from keras_qat.training.post_training.rounding_levels import Levels
from keras_qat.training.post_training.sweep import Part, Tensors, sweep
from keras_qat.training.schedule import recipe_of

__all__ = ["learn_rounding"]


@one_at_a_time
def learn_rounding(
    model: Any,
    data: Any,
    steps: int | None = None,
    batch_size: int | None = None,
    *,
    iterations: int = 500,
    learning_rate: float = 0.02,
    weights: Literal["mse", "minmax"] = "mse",
    reconstruct: Literal["layer", "block"] = "layer",
    seed: int = 0,
    verbose: int = 0,
) -> None:
    """Learns which way to round each weight, from a few hundred examples without labels.

    Rounding to the nearest is best for a weight by itself, not for the sum that it is part of. From
    the first layer to the last, the rounding is learned with which a layer's output comes nearest
    to that of the float model, its input being what the layers before it give by then. Weights move
    onto the levels that were found: `predict`, files and `simulate` follow, and training may go on.
    Biases are corrected as by `bias_correction`. Pays with fewer than 8 bits, most with 4 or less.

    Block by block the layers between two tensors that everything passes through are learned
    together, with quantized activations between them, so that one makes up for another: those of a
    residual block, and each layer of a chain by itself. Pays with 2 bits, in depthwise networks.

    A layer or block keeps its rounding to the nearest where that is better on the data. Layers that
    are called several times do, too.

    Args:
        model: a calibrated quantization-aware model; its weights change. Zeros that its recipe
            preserves stay.
        data, steps, batch_size: as in `calibrate`: a few hundred examples, all held in memory.
        iterations: steps for each layer or block, of 32 examples, or fewer where tensors are large.
        learning_rate: of Adam.
        weights: ranges of the weights: those of the least squared error, or their extremes.
        reconstruct: whose output is to come near to that in float: "layer" or "block".
        seed: of the order of the examples.
        verbose: 1 shows progress.

    Raises:
        ValueError: if the model is not quantized or calibrated, or by `recipes.contrib`, the data
            is not what it takes, or an option is none of those.

    Example:
        >>> qat = keras_qat.quantize_model(model, "int4_weights")
        >>> keras_qat.calibrate(qat, x_train[:256], method="mse")
        >>> keras_qat.learn_rounding(qat, x_train[:256], verbose=1)

    Source: Nagel et al. 2020 (arXiv:2004.10568); blocks: Li et al. 2021 (arXiv:2102.05426).
    """
    if weights not in ("mse", "minmax"):
        raise ValueError(f"weights={weights!r}: use 'mse' or 'minmax'.")
    if reconstruct not in ("layer", "block"):
        raise ValueError(f"reconstruct={reconstruct!r}: use 'layer' or 'block'.")
    recipe = recipe_of(model)
    if recipe is not None and recipe.fold == "correction":
        raise ValueError(
            f"Recipe '{recipe.name}' has weights in the range that training gave them; rounding is "
            f"learned of those in a range of their own, as of recipes.int4_weights()."
        )
    numbers = np.random.default_rng(seed)

    def visit(part: Part, in_float: list[Tensors], quantized: list[Tensors]) -> None:
        wanted = means_in_float(part, in_float)
        levels = {
            wrapper: Levels(wrapper, weights)
            for wrapper in wanted
            if len(wrapper.weight_quantizers) == 1
        }
        if levels:
            found = Reconstruction(part, levels, in_float, quantized)
            found.learn(iterations, learning_rate, int(numbers.integers(2**31)))
        # Within a block the layers make up for each other: what it gives is to be right.
        between = {value for call in part.alone for value in call.inputs}
        within = {call.layer for call in part.alone if call.output in between}
        correct(part, quantized, {each: wanted[each] for each in wanted.keys() - within})

    options = {"steps": steps, "batch_size": batch_size, "verbose": verbose}
    blocks = reconstruct == "block"
    sweep(model, data, visit, "Learned rounding", blocks=blocks, **options)  # type: ignore[arg-type]
