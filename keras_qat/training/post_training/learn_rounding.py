"""Learned rounding (AdaRound): rounds each weight up or down for the sake of the layer's output."""

from __future__ import annotations

from typing import Literal

import numpy as np

from keras_qat.config.arguments import answers_unknown
from keras_qat.helper_layers.keras_variants import has_computed_kernel
from keras_qat.io.counts import check_counts
from keras_qat.keras2.backend import keras, one_at_a_time
from keras_qat.training.post_training.bias_correction import compute_float_means, correct
from keras_qat.training.post_training.reconstruction import Levels, Reconstruction
from keras_qat.training.post_training.sweep import Part, Tensors, sweep
from keras_qat.training.schedule import get_recipe


@one_at_a_time
@answers_unknown(
    bits="them to the recipe, such as recipes.int4_weights()",
    epochs="iterations=500, of each layer",
)
def learn_rounding(
    model: keras.Model,
    data: object,
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

    Rounding to the nearest is best for a single weight, but not for a sum of many. From the first
    layer to the last, `learn_rounding` looks for the rounding that brings a layer's output closest
    to the float model's, after the layers before it have new weights. Weights move to the chosen
    levels, so `predict`, `simulate` and files follow, and training may continue. Biases are
    corrected as by `bias_correction`. Use it with fewer than 8 bits; 4 or fewer gain most.

    With blocks, the layers of a residual block are learned together, with quantized activations
    between them, so one layer can compensate for another. A layer of a chain is a separate block.
    Use blocks with 2 bits, in depthwise networks.

    A layer or block keeps rounding to the nearest if that has the smaller error on the data. So do
    layers that are called several times.

    Under a strategy the replicas share the examples of each step. In a cluster all workers have to
    call it, with the same data. Gradients are then summed in another order than on one device, and
    a weight between two levels may be rounded differently. All replicas round alike.

    Args:
        model: a calibrated quantization-aware model; its weights change. They have to be the float
            model's, because they are reproduced: not changed by `calibrate(..., weights="mse")` or
            an earlier call. Zeros that its recipe preserves stay zero.
        data: a few hundred inputs without labels, all held in memory: an array, a list or dict of
            arrays, a `tf.data.Dataset`, a `keras.utils.Sequence`, or a generator of batches.
        steps: how many batches to read; all by default. An endless dataset needs it.
        batch_size: examples per batch of arrays, 32 by default.
        iterations: training steps for each layer or block, each with 32 examples, or fewer if
            tensors are large.
        learning_rate: the learning rate of Adam.
        weights: ranges of weights: "mse" for the least squared error, "minmax" for the extremes.
        reconstruct: "layer" or "block": the part that has to reproduce its float output.
        seed: the seed for the order of the examples.
        verbose: 1 shows progress.

    Raises:
        ValueError: if the model is not quantized or calibrated, or its recipe is
            `recipes.contrib`, the data does not fit the model, or an option is unknown.

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
    check_counts(steps=steps, batch_size=batch_size, iterations=iterations)
    recipe = get_recipe(model)
    if recipe is not None and recipe.fold == "correction":
        raise ValueError(
            f"Recipe '{recipe.name}' keeps the ranges of weights from training, and rounding can "
            f"only be learned in a range that follows the weights, as in recipes.int4_weights()."
        )
    draw = np.random.default_rng(seed)

    def visit(part: Part, in_float: list[Tensors], quantized: list[Tensors]) -> None:
        means = compute_float_means(part, in_float)
        levels = {
            wrapper: Levels(wrapper, weights)
            for wrapper in means
            if len(wrapper.weight_quantizers) == 1 and not has_computed_kernel(wrapper.layer)
        }
        if levels:
            reconstruction = Reconstruction(part, levels, in_float, quantized)
            part_seed = int(draw.integers(2**31))
            reconstruction.learn(iterations, learning_rate, part_seed, model.distribute_strategy)
        # Layers within a block compensate for each other, so only its outputs are corrected.
        between = {value for call in part.alone for value in call.inputs}
        within = {call.layer for call in part.alone if call.output in between}
        correct(part, quantized, {layer: means[layer] for layer in means.keys() - within})

    blocks = reconstruct == "block"
    sweep(model, data, visit, "Learned rounding", steps, batch_size, verbose, blocks=blocks)
