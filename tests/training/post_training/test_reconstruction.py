"""Tests learned rounding by blocks: the extent of blocks, and the results."""

import numpy as np
import pytest

import keras_qat
from keras_qat import recipes
from keras_qat.graph.read_model import read_model
from keras_qat.training.post_training.sweep import sweep
from tests.helpers import images
from tests.networks import composite, convolutional
from tests.networks.small import functional, layers, residual_net, tiny_net

X = images(48, (8, 8, 1))
SLOW = pytest.mark.slow


def parts_of(qat, x, blocks=True):
    """Returns the names of the calls of each block, and how many values it reads and returns."""
    result = []

    def visit(part, in_float, quantized):
        assert all(set(part.reads) <= set(item) for item in (*in_float, *quantized))
        assert all(set(part.outputs) <= set(layer) for layer in in_float)
        result.append(([call.name for call in part.calls], len(part.reads), len(part.outputs)))

    sweep(qat, x, visit, "", blocks=blocks)
    return result


def calibrated(model, x, recipe="int4_weights"):
    qat = keras_qat.quantize_model(model, recipe)
    keras_qat.calibrate(qat, x, method="mse")
    return qat


def error(qat, wanted, x=X):
    return float(np.mean((qat.predict(x, verbose=0) - wanted) ** 2))


def test_blocks_lie_between_tensors_that_everything_passes_through():
    qat = calibrated(residual_net(), X)
    result = parts_of(qat, X)
    with_weights = [names for names, *_ in result if any("project" in name for name in names)]
    names = ["quant_depthwise", "quant_project", "quant_merge", "quant_merge_relu"]
    assert with_weights == [names]
    assert all(reads == gives == 1 for _, reads, gives in result)
    calls = [call.name for call in read_model(qat).calls]
    assert [name for names, *_ in result for name in names] == calls
    assert [names for names, *_ in parts_of(qat, X, blocks=False)] == [[name] for name in calls]


def test_a_chain_has_no_blocks_but_its_layers():
    x = images(8, (6, 6, 2))
    qat = calibrated(tiny_net(), x)
    assert parts_of(qat, x) == parts_of(qat, x, blocks=False)


@pytest.mark.slow
def test_a_block_reads_all_inputs_and_gives_all_outputs():
    def build(x, y):
        hidden = layers.Dense(4, activation="relu", name="hidden")(layers.Concatenate()([x, y]))
        return [layers.Dense(3, name="logits")(layers.Add()([hidden, x])), hidden]

    model = functional((4,), (2,), build=build)
    data = [images(20, (4,)), images(20, (2,), seed=3)]
    qat = calibrated(model, data)
    assert parts_of(qat, data)[0][1:] == (2, 2)
    keras_qat.learn_rounding(qat, data, iterations=10, reconstruct="block")
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), data).identical == 1


@pytest.mark.parametrize("bits", [(2, 8), pytest.param((3, 4), marks=SLOW)])
def test_blocks_come_nearer_to_float(bits):
    """Better than with corrected biases, which matter most with random weights."""
    model = residual_net()
    wanted = model.predict(X, verbose=0)
    plain, qat = (calibrated(model, X, recipes.low_bits(*bits)) for _ in range(2))
    keras_qat.calibrate(plain, X, method="mse", weights="mse")
    keras_qat.bias_correction(plain, X)
    keras_qat.learn_rounding(qat, X, iterations=150, reconstruct="block")
    assert error(qat, wanted) < 0.95 * error(plain, wanted)
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), X).identical == 1


def test_what_cannot_be_reconstructed():
    qat = calibrated(tiny_net(), images(4, (6, 6, 2)))
    with pytest.raises(ValueError, match="reconstruct='net': use 'layer' or 'block'"):
        keras_qat.learn_rounding(qat, images(4, (6, 6, 2)), reconstruct="net")


ALL = convolutional.FAMILIES | composite.FAMILIES


@SLOW
@pytest.mark.parametrize("name", ALL)
def test_any_layer_may_be_in_a_block(name):
    """All branches from a family's inputs form one block, with an output for each."""
    family = ALL[name]
    x = family.inputs(8)
    qat = calibrated(family.model(), x)
    keras_qat.learn_rounding(qat, x, iterations=2, reconstruct="block")
    assert all(np.isfinite(array).all() for array in qat.get_weights())
