"""Tests float layers with quantized weights: wrappers, and weights alone."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tensorflow.lite.python import schema_py_generated as schema

from keras_qat.layers import QuantizeWeights, QuantizeWrapper
from keras_qat.specs import QuantSpec
from keras_qat.tflite.interpreter import FileInterpreter
from keras_qat.tflite.schema import TYPES, new, unpack
from keras_qat.tflite.weight_packing import pack_weights
from tests.tflite.islands import check, layers, made

WEIGHTS = QuantSpec(
    symmetric=True, narrow_range=True, per_channel=True, observer="current_value", delayed=False
)


@pytest.mark.slow
def test_weights_only():
    def build(x: Any) -> Any:
        layer = layers.LSTM(16, return_sequences=True)
        paths = dict.fromkeys(("cell.kernel", "cell.recurrent_kernel"), ())
        x = QuantizeWeights(layer, paths, WEIGHTS)(x)
        return QuantizeWeights(layers.Conv1D(8, 3), {"kernel": ()}, WEIGHTS)(x)

    model = unpack(check(made(build, (6, 32))))
    sizes: dict[int, list[int]] = {schema.TensorType.FLOAT32: [], schema.TensorType.INT8: []}
    for tensor in (tensor for graph in model.subgraphs for tensor in graph.tensors):
        data = model.buffers[tensor.buffer].data
        if data is not None and tensor.type in sizes:
            sizes[tensor.type].append(len(data))
    assert max(sizes[schema.TensorType.FLOAT32]) == 4 * 64  # A bias.
    assert set(sizes[schema.TensorType.INT8]) == {32 * 64, 16 * 64, 3 * 16 * 8}


WRAPPED: dict[str, tuple[Callable[[], Any], dict[str, Any], tuple[int, ...]]] = {
    "conv": (lambda: layers.Conv2D(4, 3, strides=2), {"kernel": (-1,)}, (8, 8, 3)),
    "dilated": (lambda: layers.Conv2D(4, 3, dilation_rate=2), {"kernel": (-1,)}, (8, 8, 3)),
    "grouped": (lambda: layers.Conv2D(4, 3, groups=2), {"kernel": (-1,)}, (8, 8, 4)),
    "depthwise": (
        lambda: layers.DepthwiseConv2D(3, depth_multiplier=2, dilation_rate=2),
        {"depthwise_kernel": (-2, -1)},
        (8, 8, 3),
    ),
    "causal": (lambda: layers.Conv1D(4, 3, padding="causal"), {"kernel": (-1,)}, (8, 3)),
    "depthwise1d": (lambda: layers.DepthwiseConv1D(3), {"depthwise_kernel": (-2, -1)}, (8, 3)),
    "transpose": (lambda: layers.Conv2DTranspose(4, 3, strides=2), {"kernel": ()}, (5, 6, 3)),
    "transpose1d": (lambda: layers.Conv1DTranspose(4, 3, strides=2), {"kernel": ()}, (5, 3)),
    "dense": (lambda: layers.Dense(4), {"kernel": (-1,)}, (5, 3)),
    "einsum": (
        lambda: layers.EinsumDense("abc,cde->abde", (None, 2, 3), bias_axes="de"),
        {"kernel": ()},
        (5, 4),
    ),
    "embedding": (lambda: layers.Embedding(30, 16), {"embeddings": ()}, (5,)),
    "rescaling": (lambda: layers.Rescaling(0.3, 0.5), {}, (5, 4)),
    "normalization": (
        lambda: layers.Normalization(mean=[0.1, 1.0, 2.0], variance=[1.0, 2.0, 3.0]),
        {},
        (5, 3),
    ),
    "batch_normalization": (lambda: layers.BatchNormalization(), {}, (5, 3)),
}

FOLDING = ("conv", "depthwise", "causal", "depthwise1d", "dense")


def scrambled(model: Any) -> Any:
    numbers = np.random.default_rng(3)
    for weight in model.weights:
        if "kernel" not in weight.name and weight.dtype.is_floating:
            weight.assign(numbers.uniform(0.3, 2.0, weight.shape))
    return model


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", WRAPPED)
def test_wrappers(name):
    layer, weights, shape = WRAPPED[name]
    dtype = "int32" if name == "embedding" else "float32"
    spec = WEIGHTS if weights else None
    relu = None if name == "embedding" else layers.ReLU(4.0)
    model = made(
        lambda x: QuantizeWrapper(layer(), weights, spec, activation=relu)(x), shape, dtype=dtype
    )
    contents = check(scrambled(model))
    if name == "embedding":
        assert "DEQUANTIZE" in [
            operation for operation, _, _ in FileInterpreter(contents).operations()
        ]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("fold", "quantized"),
    [
        *((fold, True) for fold in ("per_channel", "per_tensor", "correction")),
        *((fold, False) for fold in ("per_channel", "correction")),
    ],
)
@pytest.mark.parametrize("name", FOLDING)
def test_folded_wrappers(name, fold, quantized):
    layer, weights, shape = WRAPPED[name]
    spec = dataclasses.replace(WEIGHTS, per_channel=fold == "per_channel")
    if fold == "correction":
        spec = dataclasses.replace(spec, symmetric=False, observer="current_value")
    inner = layer()
    if fold == "correction" and getattr(inner, "use_bias", False):
        inner.use_bias = False
    norm = layers.BatchNormalization()
    wrapper = QuantizeWrapper(inner, weights, spec if quantized else None, norm, fold=fold)
    check(scrambled(made(wrapper, shape)))


def test_constants_past_127_steps_take_a_wider_scale():
    """The constants are multiples of both scales. With the smaller scale, they need over 8 bits."""
    values = (np.arange(-100, 101) * 0.5).astype(np.float32)
    tensor = new("TensorT", name=b"kernel", shape=[201], type=TYPES["float32"], buffer=1)
    model = new(
        "ModelT",
        buffers=[new("BufferT"), new("BufferT", data=values.view(np.uint8))],
        operatorCodes=[],
        subgraphs=[new("SubGraphT", tensors=[tensor], operators=[])],
    )
    pack_weights(model, [0.25, 0.5])
    codes = np.asarray(model.buffers[-1].data).view(np.int8)
    (packed,) = [item for item in model.subgraphs[0].tensors if item.type == TYPES["int8"]]
    np.testing.assert_array_equal(codes * np.float32(packed.quantization.scale[0]), values)
