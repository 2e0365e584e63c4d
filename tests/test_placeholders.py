"""Kernels that TFLite's converter is not given, and that are written into its file."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import keras_qat
from keras_qat.export import placeholders
from keras_qat.export.inference import inference_module
from keras_qat.tflite import edit
from tests.models import functional, images, layers, observe, scramble

pytestmark = pytest.mark.legacy

LAYERS = {
    "Conv1D": ((8, 6), layers.Conv1D(4, 3, padding="causal")),
    "Conv2D": ((8, 8, 6), layers.Conv2D(4, (3, 2), use_bias=False)),
    "Conv2D with groups": ((8, 8, 6), layers.Conv2D(4, (3, 2), groups=2)),
    "Conv1DTranspose": ((8, 6), layers.Conv1DTranspose(4, 3, strides=2)),
    "Conv2DTranspose": ((8, 8, 6), layers.Conv2DTranspose(4, (3, 2), strides=2)),
    "Dense": ((8, 6), layers.Dense(4)),
}


def observed(shape: tuple[int, ...], build: Any) -> tuple[Any, np.ndarray]:
    """A quantization-aware model with ranges, and inputs for it."""
    x = images(32, shape)
    model = keras_qat.quantize_model(scramble(functional(shape, build=build)))
    return observe(model, x), x


def constants(contents: bytes) -> list[tuple[Any, ...]]:
    """The constants that the operations of a file read."""
    file = edit.unpack(contents)
    (graph,) = file.subgraphs
    tensors = [graph.tensors[each] for one in graph.operators for each in one.inputs]
    return [
        (each.name, each.type, tuple(each.shape), scales(each), bytes(data))
        for each in tensors
        for data in [file.buffers[each.buffer].data]
        if data is not None
    ]


def scales(tensor: Any) -> tuple[float, ...]:
    """The steps of a tensor; none of one that holds no codes."""
    quantization = tensor.quantization
    return () if quantization is None or quantization.scale is None else tuple(quantization.scale)


@pytest.mark.parametrize("name", LAYERS)
def test_the_file_is_that_of_a_converter_that_knows_the_kernel(name, monkeypatch):
    shape, layer = LAYERS[name]
    qat, x = observed(shape, layer)
    contents = keras_qat.export_tflite(qat)
    assert keras_qat.verify(qat, contents, x).identical == 1.0
    monkeypatch.setattr(placeholders, "LAYERS", set())
    assert constants(keras_qat.export_tflite(qat)) == constants(contents)


@pytest.mark.parametrize("name", LAYERS)
def test_a_kernel_that_is_not_found_again_is_given_to_the_converter(name, monkeypatch):
    # As if the converter had made another operation of the layer.
    shape, layer = LAYERS[name]
    qat, _ = observed(shape, layer)
    contents = keras_qat.export_tflite(qat)
    monkeypatch.setattr(placeholders, "AXES", {})
    assert constants(keras_qat.export_tflite(qat)) == constants(contents)


def test_kernels_with_the_same_steps_are_told_apart():
    first, second = (layers.Conv2D(6, 3, padding="same", name=name) for name in "ab")
    qat, x = observed((8, 8, 6), lambda x: second(first(x)))
    kernel = first.kernel.numpy()
    qat.get_layer("quant_a").layer.kernel.assign(kernel)
    qat.get_layer("quant_b").layer.kernel.assign(-kernel[:, ::-1])
    observe(qat, x)
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), x).identical == 1.0


def test_a_layer_that_is_called_twice_has_one_kernel():
    layer = layers.Conv2D(6, 3, padding="same")
    qat, x = observed((8, 8, 6), lambda x: layer(layer(x)))
    contents = keras_qat.export_tflite(qat)
    assert keras_qat.verify(qat, contents, x).identical == 1.0
    kernels = [data for *_, data in constants(contents) if len(data) == 9 * 6 * 6]
    assert len(kernels) == 2
    assert len(contents) < 3000 + 9 * 6 * 6


def test_the_converter_is_not_given_large_kernels():
    qat, _ = observed((8, 6), lambda x: layers.Dense(500)(layers.Dense(500)(x)))
    module = inference_module(qat, for_tflite=True, placeholders=True)
    graph = module.serve.get_concrete_function().graph.as_graph_def()
    assert graph.ByteSize() < 50_000 < 4 * qat.count_params()
