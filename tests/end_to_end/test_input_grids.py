"""Tests that usual inputs never lie halfway between two quantized values, whatever their range.

Images, audio and sensors yield integers, and programs scale them: the k-th of n equal steps of a
range, multiplied and shifted. Models of many inputs are calibrated, each input on a grid drawn at
random. Every way of rounding returns the same quantized values.
"""

from typing import NamedTuple

import numpy as np
import pytest

import keras_qat
from keras_qat.keras2.backend import keras
from keras_qat.tflite.interpreter import FileInterpreter
from tests.comparison import KERNELS

INPUTS, VALUES = 100, 8192
"""Number of inputs of a model, and of values per input. Shorter grids are repeated."""

NEAR = {
    "the last pixel in reach": (0.247640751049124, 11.127037355635442, 0),
    "the first pixel in reach": (0.185145329656311, -48.687352193632336, 0),
    "two pixels in reach": (0.10023752788432913, 7.779620129996045, 57),
    "pixels that were not seen": (0.11673857686671928, -37.60990192369269, 63),
}
"""Scale and offset of pixels, and the first observed pixel. Some lie 0.0005 steps from a tie."""


class Grid(NamedTuple):
    """Values on a grid, and the scale and offset that compute them from integers."""

    values: np.ndarray
    scale: float
    offset: float
    is_pixels: bool


def drawn(numbers: np.random.Generator) -> Grid:
    """Draws a grid: `k / 127.5 - 1`, `k / 255`, `k / 2^n`, `k / 10^n` or `k / n`, or affine."""
    powers = 2 ** numbers.integers(1, 13), 10 ** numbers.integers(1, 4)
    parts = int(numbers.choice([255, *powers, numbers.integers(1, 1001)]))
    mean, deviation = numbers.integers(300, 600) / 1000, numbers.integers(200, 300) / 1000
    whole, real = float(numbers.integers(1, 256)), numbers.uniform(0.01, 100)
    affine = [
        (1.0, 0.0),
        (2.0, -1.0),
        (1.0, -0.5),
        (1 / deviation, -mean / deviation),
        (whole, 0.0),
        (real, numbers.uniform(-1.5, 0.5) * real),
    ]
    factor, offset = affine[numbers.integers(len(affine))]
    k = np.arange(parts + 1)
    if numbers.random() < 0.2:  # Only some values of the grid were observed.
        k = k[numbers.integers(parts // 4 + 1) :]
    values = (k * (factor / parts) + offset).astype(np.float32)
    return Grid(np.resize(values, VALUES), factor / parts, offset, parts == 255)


def pixel_grid(scale: float, offset: float, first: int) -> Grid:
    values = (np.arange(first, 256) * scale + offset).astype(np.float32)
    return Grid(np.resize(values, VALUES), scale, offset, True)


def network(count: int):
    inputs = [keras.Input((1, 1), name=f"x{index}") for index in range(count)]
    return keras.Model(inputs, [keras.layers.Reshape((1,), name=f"of_{x.name}")(x) for x in inputs])


def check(grids: list[Grid]) -> None:
    """Compares quantized values of grids: NumPy's, ours, and two files'."""
    x = {f"x{index}": grid.values[:, None, None] for index, grid in enumerate(grids)}
    qat = keras_qat.quantize_model(network(len(grids)))
    keras_qat.calibrate(qat, x, batch_size=VALUES)
    inputs = keras_qat.TFLiteModel(keras_qat.export_tflite(qat)).inputs
    expected = {}
    for name, values in x.items():
        scale, zero_point = np.float32(inputs[name].scale), inputs[name].zero_point
        expected[name] = np.round(values / scale) + zero_point
        up = np.floor(values / scale + np.float32(0.5)) + zero_point
        np.testing.assert_array_equal(expected[name], up)
        np.testing.assert_array_equal(expected[name], inputs[name].quantize(values))
        assert expected[name].min() >= -128 and expected[name].max() <= 127
    in_float = keras_qat.export_tflite(qat, input_dtype="float32")
    for kernels in KERNELS:
        codes = FileInterpreter(in_float, kernels).run(x, VALUES)
        for name, wanted in expected.items():
            np.testing.assert_array_equal(codes[f"of_{name}"], wanted[:, 0])
    pixels = {name: grid for name, grid in zip(x, grids, strict=True) if grid.is_pixels}
    rescaling = {name: (grid.scale, grid.offset) for name, grid in pixels.items()}
    in_bytes = keras_qat.export_tflite(qat, input_dtype="uint8", rescaling=rescaling)
    given = {
        name: np.round((x[name] - pixels[name].offset) / pixels[name].scale).astype(np.uint8)
        if name in pixels
        else (expected[name] + 128).astype(np.uint8)
        for name in x
    }
    for kernels in KERNELS:
        codes = FileInterpreter(in_bytes, kernels).run(given, VALUES)
        for name, wanted in expected.items():
            np.testing.assert_array_equal(codes[f"of_{name}"], wanted[:, 0])


def drawn_grids(seed: int) -> list[Grid]:
    numbers = np.random.default_rng(seed)
    return [drawn(numbers) for _ in range(INPUTS)]


def test_a_file_of_pixels_gives_the_same_codes_where_some_lie_near_a_tie():
    check([pixel_grid(*numbers) for numbers in NEAR.values()])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 12))
def test_any_rounding_gives_the_same_codes_of_ten_thousand_grids(seed):
    check(drawn_grids(seed))
