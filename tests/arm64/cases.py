"""Single operators that LiteRT computes differently on 64-bit ARM than on x86.

Softmax has a different kernel, and means are rounded less often. Other operators round halves
differently: scales that are powers of two produce halves.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.graph.read_model import read_model
from keras_qat.helper_layers.operations import HardSwish
from keras_qat.ops.node import Node
from tests.helpers import keras, layers
from tests.ops.harness import make_node

Case = tuple[Node, dict[str, np.ndarray]]


def node_of(layer: Any, shapes: list[tuple[int, ...]], *params: tuple[float, int]) -> Node:
    """Returns a layer's node. `params` are (scale, zero point) of the inputs and of the output."""
    inputs = [keras.Input(shape) for shape in shapes]
    model = keras.Model(inputs, layer(inputs if len(inputs) > 1 else inputs[0]))
    *_, call = read_model(model).calls
    node = make_node(call, 8, np.random.default_rng(0), per_channel=False)
    tensors = [
        dataclasses.replace(tensor, name=name, params=QuantParams(np.float32(scale), zero, 8))
        for name, tensor, (scale, zero) in zip(
            [*map("input_{}".format, range(len(inputs))), "output"],
            [*node.inputs, node.output],
            params,
            strict=True,
        )
    ]
    return dataclasses.replace(node, inputs=tuple(tensors[:-1]), outputs=(tensors[-1],))


def cases() -> Iterator[tuple[str, Case]]:
    """Yields the name, the node and the quantized inputs of each case."""
    numbers = np.random.default_rng(0)
    every = np.arange(-128, 128).astype(np.int8)
    for classes in (2, 3, 10, 100):
        for scale in (0.003, 0.0625, 0.1, 0.37, 1.0):
            node = node_of(layers.Softmax(), [(classes,)], (scale, 0), (1 / 256, -128))
            q = numbers.integers(-128, 128, (1024 // classes, classes)).astype(np.int8)
            yield f"softmax of {classes} by {scale}", (node, {"input_0": q})
    first, second = np.meshgrid(every, every[::4])
    pairs = {"input_0": first.reshape(1, -1), "input_1": second.reshape(1, -1)}
    for bits in (1, 2, 7, 8):
        node = node_of(
            layers.Multiply(),
            [(first.size,)] * 2,
            (1 / 256, -128),
            (0.1, 3),
            (0.1 * 2**bits / 256, 7),
        )
        yield f"product by 2^-{bits}", (node, pairs)
    for size in (256, 39):
        for bits in (4, 5, 7):
            scale = 2.0**-bits
            node = node_of(HardSwish(), [(size,)], (scale, 5), (scale / 2, -20))
            yield f"hard swish of {size} by 2^-{bits}", (node, {"input_0": every[None, :size]})
    for bits in (2, 3):
        node = node_of(layers.Conv2D(8, 3), [(9, 9, 4)], (2.0**-4, 9), (2.0 ** (bits - 9), -5))
        assert node.weights is not None
        weights = dataclasses.replace(
            node.weights,
            q=numbers.integers(-3, 4, (3, 3, 4, 8)).astype(np.float64),
            scale=np.full((1, 1, 1, 1), 2.0**-5),
            bias=numbers.integers(-20, 21, 8).astype(np.float64),
            packed=True,
        )
        x = numbers.integers(-128, 128, (4, 9, 9, 4)).astype(np.int8)
        node = dataclasses.replace(node, weights=weights)
        yield f"convolution of int4 by 2^-{bits}", (node, {"input_0": x})
    for count in (6, 10, 49):
        for params in (((1 / 255, -128), (1 / 255, -128)), ((0.05, 3), (0.05, -7))):
            node = node_of(layers.GlobalAveragePooling1D(), [(count, 8)], *params)
            q = numbers.integers(-128, 128, (64, count, 8)).astype(np.int8)
            yield f"mean of {count} with {params[0][1]}", (node, {"input_0": q})
