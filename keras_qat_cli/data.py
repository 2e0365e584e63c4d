"""Loads data from files and modules."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ["PIXELS", "Options", "load"]

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif")

PIXELS: dict[str, tuple[float, float]] = {
    "0..255": (1.0, 0.0),
    "0..1": (1 / 255, 0.0),
    "-1..1": (2 / 255, -1.0),
}
"""Range of pixels that a model was trained on -> factor and offset for pixels of 0 to 255."""


class Options(NamedTuple):
    """Options for reading data.

    Args:
        key: name of an array in an `.npz` file.
        drop: columns of a table that are not inputs: names, or numbers from 0.
        pixels: one of `PIXELS`.
        batch_size: examples at a time.
        limit: the most examples to read.
    """

    key: str | None = None
    drop: tuple[str, ...] = ()
    pixels: str = "0..255"
    batch_size: int = 32
    limit: int | None = None


class Batches:
    """Batches of a model's inputs: arrays in the model's order.

    Args:
        parts: yields the batches.
        total: number of batches, if it is known.
    """

    def __init__(self, parts: Iterator[list[np.ndarray]], total: int | None) -> None:
        self.parts, self.total = parts, total

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        return self.parts


def load(source: str, model: Any, options: Options) -> Batches:
    """Loads batches of a model's inputs.

    Args:
        source: path of an `.npy`, `.npz` or `.csv` file or of a directory of images, or
            `module:name` of an array, a dataset or a function that returns batches.
        model: the model that the data is for.
        options: options for reading.

    Raises:
        ValueError: if there is no such data, or it does not fit the model.
    """
    data = _source_data(source, model, options)
    count = len(data) if isinstance(data, (np.ndarray, _Images)) else None
    if count is not None:
        count = -(-min(count, options.limit or count) // options.batch_size)
    return Batches(_limited(model, data, options), count)


def _limited(model: Any, data: Any, options: Options) -> Iterator[list[np.ndarray]]:
    from keras_qat.io.data import batches

    left = options.limit
    for batch in batches(model, data, options.batch_size):
        part = batch if left is None else [array[:left] for array in batch]
        yield part
        if left is not None:
            left -= len(part[0])
            if left <= 0:
                return


def _source_data(source: str, model: Any, options: Options) -> Any:
    path = Path(source)
    if path.is_dir():
        return _images(path, model, options)
    if not path.exists():
        if ":" in source:
            return _from_module(source)
        raise ValueError(
            f"There is no file {source}. Data is an .npy, .npz or .csv file, a directory of "
            f"images, or module:name."
        )
    readers = {".npy": _array, ".npz": _arrays, ".csv": _table, ".tsv": _table}
    if path.suffix not in readers:
        raise ValueError(f"{source}: data is read from {', '.join(readers)} and directories.")
    return readers[path.suffix](path, model, options)


def _array(path: Path, model: Any, options: Options) -> Any:
    return np.load(path, mmap_mode="r", allow_pickle=False)


def _arrays(path: Path, model: Any, options: Options) -> Any:
    with np.load(path, allow_pickle=False) as file:
        names = file.files
        if options.key is None and set(model.input_names) <= set(names):
            return {name: file[name] for name in model.input_names}
        key = options.key or next(
            iter({"x"} & set(names) or (names if len(names) == 1 else [])), ""
        )
        if key in names:
            return file[key]
    raise ValueError(
        f"{path} has the arrays {', '.join(names)}: choose one with --key, or name them as the "
        f"model's inputs: {', '.join(model.input_names)}."
    )


def _table(path: Path, model: Any, options: Options) -> Any:
    """Reads rows of numbers, one per example, with or without names in the first line."""
    separator = "\t" if path.suffix == ".tsv" else ","
    with path.open() as file:
        first = [cell.strip().strip('"') for cell in file.readline().split(separator)]
    has_names = not all(map(_is_number, first))
    names = first if has_names else [str(number) for number in range(len(first))]
    unknown = [column for column in options.drop if column not in names]
    if unknown:
        raise ValueError(f"{path} has no column {', '.join(unknown)}, but {', '.join(names)}.")
    kept = [number for number, name in enumerate(names) if name not in options.drop]
    try:
        table = np.loadtxt(
            path, np.float32, delimiter=separator, skiprows=int(has_names), usecols=kept, ndmin=2
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}. Leave columns out with --drop.") from error
    by_name = {names[number]: table[:, column] for column, number in enumerate(kept)}
    if len(model.input_names) > 1:
        return by_name
    shape = model.inputs[0].shape[1:]
    sizes = [size for size in shape if size is not None]
    if len(sizes) == len(shape) and int(np.prod(sizes)) != table.shape[1]:
        raise ValueError(
            f"{path} has {table.shape[1]} numbers in a row, but the model takes "
            f"{int(np.prod(sizes))} ({' x '.join(map(str, shape))}). Leave columns out with --drop."
        )
    return table.reshape(-1, *(-1 if size is None else size for size in shape))


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _images(folder: Path, model: Any, options: Options) -> Any:
    """Finds the images of a directory and its subdirectories, sorted by name."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGES)
    if not paths:
        raise ValueError(f"{folder} has no images ({', '.join(IMAGES)}).")
    if len(model.inputs) != 1 or len(model.inputs[0].shape) != 4:
        raise ValueError(
            f"{folder} is a directory of images, but the model does not have one input of images."
        )
    return _Images(paths, model.inputs[0].shape[1:], options.pixels)


class _Images:
    """Image files, read one by one."""

    def __init__(self, paths: list[Path], shape: Any, pixels: str) -> None:
        self.paths, self.shape, self.pixels = paths, shape, pixels

    def __len__(self) -> int:
        return len(self.paths)

    def __iter__(self) -> Iterator[np.ndarray]:
        return map(self.read, self.paths)

    def read(self, path: Path) -> np.ndarray:
        import tensorflow as tf

        height, width, channels = self.shape
        factor, offset = PIXELS[self.pixels]
        try:
            image = tf.io.decode_image(path.read_bytes(), channels or 3, expand_animations=False)
        except tf.errors.InvalidArgumentError as error:
            raise ValueError(f"{path} is not an image that can be read.") from error
        size = height or image.shape[0], width or image.shape[1]
        if tuple(image.shape[:2]) != size:
            image = tf.image.resize(image, size, antialias=True)
        return np.asarray(image, np.float32) * np.float32(factor) + np.float32(offset)


def _from_module(source: str) -> Any:
    from keras_qat_cli.models import import_modules

    module, _, name = source.partition(":")
    import_modules(())
    try:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(
            f"{source}: {error}. Pass module:name, as in prepare:representative."
        ) from error
    return value
