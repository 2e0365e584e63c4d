"""Loads data from files and modules."""

from __future__ import annotations

import contextlib
import importlib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from keras_qat_cli.models import check_modules, import_modules, takes_pixels

__all__ = ["PIXELS", "Batches", "Source", "open_array"]

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif")

PIXELS: dict[str, tuple[float, float]] = {
    "0..255": (1.0, 0.0),
    "0..1": (1 / 255, 0.0),
    "-1..1": (2 / 255, -1.0),
}
"""Maps a range of inputs to the factor and the offset that scale pixels to the range."""


class Source(NamedTuple):
    """The location of a user's data, and options for reading it.

    Args:
        path: an `.npy`, `.npz`, `.csv` or `.tsv` file, a directory of images, or `module:name`. The
            name belongs to an array, a dataset or a function that returns batches.
        key: name of an array in an `.npz` file.
        drop: columns of a table that are not inputs: names, or indices from 0.
        pixels: one of `PIXELS`, or None.
        batch_size: examples per batch.
        limit: maximum number of examples.
    """

    path: str
    key: str | None = None
    drop: tuple[str, ...] = ()
    pixels: str | None = None
    batch_size: int = 32
    limit: int | None = None

    def check(self, model: Path) -> None:
        """Raises a `ValueError` if the data does not exist. Does not import TensorFlow."""
        path = Path(self.path)
        if path.is_dir():
            self.images()
            if self.pixels is None and not takes_pixels(model):
                raise ValueError(
                    f"{path} contains images, but the range of pixels that {model} expects is "
                    f"unknown. Pass the range used in training: add --pixels 0..255, 0..1 or -1..1."
                )
        elif path.exists():
            if path.suffix not in READERS:
                raise ValueError(
                    f"{path} has an unknown format. Data can be {', '.join(READERS)} files or "
                    f"directories of images."
                )
            if self.key is not None:
                self.arrays_named([self.key])
            if self.drop:
                self.columns()
        elif ":" in self.path:
            try:
                check_modules((self.path.partition(":")[0],))
            except ValueError as error:
                raise ValueError(f"{self.path}: {error}") from error
        else:
            raise ValueError(
                f"There is no file {path}. Data can be an .npy, .npz or .csv file, a directory of "
                f"images, or module:name."
            )

    def load(self, model: Any) -> Batches:
        """Loads batches of a model's inputs.

        Raises:
            ValueError: if the data does not match the model.
        """
        path = Path(self.path)
        if path.is_dir():
            data = self.for_images(model)
        elif path.exists():
            data = READERS[path.suffix](self, model)
        else:
            data = _from_module(self.path)
        count = len(data) if isinstance(data, (np.ndarray, _Images)) else None
        if count is not None:
            count = -(-min(count, self.limit or count) // self.batch_size)
        return Batches(self, model, data, count)

    def array(self, model: Any) -> Any:
        """Opens the array of an .npy file."""
        return open_array(self.path, mmap_mode="r")

    def arrays(self, model: Any) -> Any:
        """Reads the model's inputs from an .npz file."""
        with open_array(self.path) as file:
            names = set(file.files)
        if self.key is None and set(model.input_names) <= names:
            return self.arrays_named(model.input_names)
        only = names if len(names) == 1 else {"x"} & names
        key = self.key or next(iter(only), None)
        if key is None:
            raise ValueError(
                f"{self.path} contains the arrays {', '.join(sorted(names))}. Choose one with "
                f"--key, or name the arrays like the model's inputs: "
                f"{', '.join(model.input_names)}."
            )
        return self.arrays_named([key])[key]

    def arrays_named(self, names: list[str]) -> dict[str, np.ndarray]:
        """Reads arrays of an .npz file."""
        with open_array(self.path) as file:
            missing = [name for name in names if name not in file.files]
            if missing:
                raise ValueError(
                    f"{self.path} has no array {missing[0]}. Its arrays are: "
                    f"{', '.join(file.files)}."
                )
            with _explain_errors(self.path):
                return {name: file[name] for name in names}

    def columns(self) -> tuple[list[str], bool]:
        """Returns the names of a table's columns, and whether the first line contains names."""
        with open(self.path, encoding="utf-8-sig") as file:
            first = [cell.strip().strip('"') for cell in file.readline().split(self.separator)]
        has_names = not all(map(_is_number, first))
        names = first if has_names else [str(number) for number in range(len(first))]
        unknown = [column for column in self.drop if column not in names]
        if unknown:
            raise ValueError(
                f"{self.path} has no column {', '.join(unknown)}. Its columns are: "
                f"{', '.join(names)}."
            )
        return names, has_names

    @property
    def separator(self) -> str:
        """The character between the columns of a table."""
        return "\t" if self.path.endswith(".tsv") else ","

    def table(self, model: Any) -> Any:
        """Reads a table with one row per example."""
        names, has_names = self.columns()
        used = [number for number, name in enumerate(names) if name not in self.drop]
        try:
            table = np.loadtxt(
                self.path,
                np.float32,
                delimiter=self.separator,
                skiprows=int(has_names),
                usecols=used,
                ndmin=2,
                encoding="utf-8-sig",
            )
        except ValueError as error:
            words = str(error).rstrip(".")
            raise ValueError(f"{self.path}: {words}. Leave columns out with --drop.") from error
        if len(model.input_names) > 1:
            return {names[number]: table[:, column] for column, number in enumerate(used)}
        shape = model.inputs[0].shape[1:]
        sizes = [size for size in shape if size is not None]
        if len(sizes) == len(shape) and int(np.prod(sizes)) != table.shape[1]:
            raise ValueError(
                f"{self.path} has {table.shape[1]} values per row, but the model expects "
                f"{int(np.prod(sizes))} ({' x '.join(map(str, shape))}). Leave columns out with "
                f"--drop."
            )
        return table.reshape(-1, *(-1 if size is None else size for size in shape))

    def images(self) -> list[Path]:
        """Returns the images of a directory and its subfolders, sorted by name."""
        files = sorted(file for file in Path(self.path).rglob("*") if file.suffix.lower() in IMAGES)
        if not files:
            raise ValueError(f"{self.path} contains no images ({', '.join(IMAGES)}).")
        return files

    def list_subfolders(self) -> set[str]:
        """Returns the subfolders of a directory that contain images."""
        path = Path(self.path)
        files = self.images() if path.is_dir() else []
        return {file.relative_to(path).parts[0] for file in files if file.parent != path}

    def for_images(self, model: Any) -> _Images:
        """Returns the images of a directory as the input of a model."""
        if len(model.inputs) != 1 or len(model.inputs[0].shape) != 4:
            raise ValueError(
                f"{self.path} is a directory of images, but the model does not have exactly one "
                f"image input."
            )
        return _Images(self.images(), model.inputs[0].shape[1:], self.pixels or "0..255")


READERS: dict[str, Callable[[Source, Any], Any]] = {
    ".npy": Source.array,
    ".npz": Source.arrays,
    ".csv": Source.table,
    ".tsv": Source.table,
}
"""Maps the suffix of a file to the function that reads the file."""


class Batches:
    """Batches of a model's inputs. A batch has an array for each input, in the model's order.

    Args:
        source: location of the data.
        model: the model.
        data: the data.
        total: number of batches, or None if unknown.
    """

    def __init__(self, source: Source, model: Any, data: Any, total: int | None) -> None:
        self.source, self.model, self.data, self.total = source, model, data, total
        self.examples = 0

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        """Yields the batches, and counts the examples."""
        from keras_qat.io.data import read_batches

        left = self.source.limit
        self.examples = 0
        try:
            for batch in read_batches(self.model, self.data, self.source.batch_size):
                part = [array[:left] for array in batch]
                self.examples += len(part[0])
                yield part
                if left is not None:
                    left -= len(part[0])
                    if left <= 0:
                        return
        except ValueError as error:
            raise ValueError(f"{self.source.path}: {error}") from error


def open_array(path: str, mmap_mode: Literal["r"] | None = None) -> Any:
    """Opens an `.npy` or `.npz` file.

    Raises:
        ValueError: if the file is damaged, or contains Python objects.
    """
    with _explain_errors(path):
        return np.load(path, mmap_mode=mmap_mode, allow_pickle=False)


@contextlib.contextmanager
def _explain_errors(path: str) -> Iterator[None]:
    try:
        yield
    except (EOFError, ValueError, OverflowError, MemoryError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} contains no readable array of numbers: {error}") from error


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


class _Images:
    """The images of a directory as a sequence of arrays, read one by one."""

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
            raise ValueError(f"{path} is not a readable image.") from error
        size = height or image.shape[0], width or image.shape[1]
        if tuple(image.shape[:2]) != size:
            image = tf.image.resize(image, size, antialias=True)
        return np.asarray(image, np.float32) * np.float32(factor) + np.float32(offset)


def _from_module(source: str) -> Any:
    module, _, name = source.partition(":")
    import_modules(())
    try:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(
            f"{source}: {error}. Pass module:name, such as prepare:representative."
        ) from error
    return value
