"""Tests training steps that XLA compiles against the same steps without XLA."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from benchmarks import operations
from keras_qat.arithmetic import plain_operations
from tests.helpers import keras, layers, quantize_on, rng

X = rng(3).uniform(-1.0, 1.0, (8, 6, 6, 2)).astype(np.float32)
Y = rng(4).normal(size=(8, 3)).astype(np.float32)

RECIPES = {
    "int8": keras_qat.recipes.int8,
    "contrib": keras_qat.recipes.contrib,
    "int16x8": keras_qat.recipes.int16x8,
    "learned": lambda: keras_qat.recipes.int8(ranges="learned"),
    "per tensor": lambda: keras_qat.recipes.int8(per_channel=False),
}
PHASES = {
    "float": lambda qat: keras_qat.set_quantization(qat, enabled=False),
    "quantizing": lambda qat: None,
    "frozen statistics": keras_qat.freeze_batch_norm,
    "frozen ranges": keras_qat.freeze_ranges,
}


def net():
    """Returns convolutions, a sum and a dense layer, with and without ReLU."""
    image = keras.Input((6, 6, 2))
    x = layers.ReLU(6.0)(layers.BatchNormalization()(layers.Conv2D(4, 3, use_bias=False)(image)))
    y = layers.BatchNormalization()(layers.DepthwiseConv2D(3, padding="same", use_bias=False)(x))
    x = layers.Add()([x, layers.Conv2D(4, 1)(layers.ReLU()(y))])
    return keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))


LAST_BIT = 2.0**-23
"""Error of a sum in another order, relative to the largest value of its tensor."""
SUMS = 2 * len(X) * (4 * 64 + 4 + 3)
"""Values that two steps sum and quantize: four tensors of 4x4x4, the averages, the outputs."""


def codes_moved(bits):
    """Returns how many values an error of a last bit is expected to move to another level.

    A value is that close to a tie with a probability of two last bits per step. The largest value
    has about 2^(bits - 1) steps. With 8 bits, an eighth of a value moves in two steps, so all must
    be equal. With 16 bits, thirty values move.
    """
    return int(SUMS * 2 * LAST_BIT * 2.0 ** (bits - 1))


def one_level_of_loss(qat):
    """Returns how much the loss changes if an output (not an inner value) moves by a level."""
    output = keras_qat.quantizers(qat)[-1]
    level = (output.maximum - output.minimum) / (2.0**output.spec.bits - 1)
    return 2 * level * (np.abs(Y).max() + output.maximum) / Y.size


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_by_xla_equals_one_without(recipe, phase):
    keras.utils.set_random_seed(0)
    model, trained, losses = net(), [], []
    for jit_compile in (False, True):
        qat = quantize_on(model, X, RECIPES[recipe]())
        PHASES[phase](qat)
        qat.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=jit_compile)
        losses.append([qat.train_on_batch(X, Y) for _ in range(2)])
        trained.append(qat)
    quantized, bits = phase != "float", keras_qat.quantizers(trained[0])[-1].spec.bits
    moved = codes_moved(bits) if quantized else 0
    # The loss sums 24 squares: at most 12 last bits, and the differences of outputs. Values move
    # up as often as down, so together they move the loss by the root of their count.
    atol = moved**0.5 * one_level_of_loss(trained[0])
    np.testing.assert_allclose(losses[1], losses[0], rtol=16 * LAST_BIT, atol=atol)
    # Gradients are longer sums. A range follows a moved value if that is the largest.
    last_bits = 32 * LAST_BIT + (2.0 ** (1 - bits) if moved else 0.0)
    for one, other in zip(trained[0].weights, trained[1].weights, strict=True):
        size = max(1e-3, float(np.abs(one.numpy()).max()))
        np.testing.assert_allclose(other, one, rtol=0, atol=last_bits * size, err_msg=one.name)
    if quantized and recipe != "contrib":  # Inference of contrib is a simulation.
        contents = keras_qat.export_tflite(trained[1])
        assert keras_qat.verify(trained[1], contents, X).identical == 1.0


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_as_it_is_traced_for_gpus_is_the_same(recipe, phase, monkeypatch):
    """On a CPU, the operations for GPUs compute every weight and range bit-exactly.

    Sums of contrib have another order. No operation waits for a value from the GPU.
    """
    keras.utils.set_random_seed(0)
    model, trained = net(), []
    for has_gpu in (False, True):
        monkeypatch.setattr(plain_operations, "has_gpu", lambda has_gpu=has_gpu: has_gpu)
        qat = quantize_on(model, X, RECIPES[recipe]())
        PHASES[phase](qat)
        qat.compile(keras.optimizers.SGD(0.01), "mse")
        graph = operations.optimized_graph(lambda qat=qat: qat.train_on_batch(X, Y))
        trained.append([qat.train_on_batch(X, Y), *qat.get_weights()])
    for one, other in zip(*trained, strict=True):
        size = max(1e-3, float(np.abs(one).max()))
        atol = 32 * LAST_BIT * size if recipe == "contrib" else 0.0
        np.testing.assert_allclose(one, other, rtol=0, atol=atol)
    if tf.test.is_built_with_cuda():  # Otherwise TensorFlow has no kernels for GPUs.
        on_host = operations.count(graph).host_reads
        assert all(kind.startswith("_") for kind in on_host), on_host  # Only CPUs fuse these.
