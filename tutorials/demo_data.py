"""The real images that the demo trains on."""

from __future__ import annotations

import dataclasses
import gzip
from pathlib import Path

import numpy as np

from keras_qat.keras2.backend import keras

__all__ = ["DATA", "Data"]

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts its files."""


@dataclasses.dataclass(frozen=True)
class Data:
    """Images from 0 to 1, shaped [count, height, width, 1], and the number of their class."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray

    def subset(self, train: int, test: int) -> Data:
        """The first so many examples."""
        return Data(
            self.x_train[:train], self.y_train[:train], self.x_test[:test], self.y_test[:test]
        )


def digits() -> Data:
    """Scikit-learn's 1797 handwritten digits, 8x8 pixels.

    Thirteen people wrote them, one after the other. They are split in that order and not
    shuffled, so the digits of the test set were written by hands that training has not seen.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    return Data(images[:1200], labels[:1200], images[1200:], labels[1200:])


def fashion_mnist(count: int = 20_000) -> Data:
    """Photos of clothes, 28x28 pixels: some of 60 000 training images, and all 10 000 test images.

    Args:
        count: how many training images.

    Raises:
        SystemExit: if neither Debian's package nor Keras' download can be had.
    """
    if DEBIAN.is_dir():
        arrays = [
            _read_idx(DEBIAN / f"{part}-{kind}-ubyte")
            for part in ("train", "t10k")
            for kind in ("images-idx3", "labels-idx1")
        ]
    else:
        try:
            train, test = keras.datasets.fashion_mnist.load_data()
        except Exception as error:
            raise SystemExit(
                f"Fashion-MNIST is not in {DEBIAN} and Keras could not download it ({error}).\n"
                f"On Debian and Ubuntu: apt-get install dataset-fashion-mnist"
            ) from error
        arrays = [*train, *test]
    x_train, y_train, x_test, y_test = arrays
    x_train, x_test = ((x[..., None] / 255).astype(np.float32) for x in (x_train, x_test))
    return Data(x_train, y_train, x_test, y_test).subset(count, 10_000)


def _read_idx(path: Path) -> np.ndarray:
    """Reads an IDX file of bytes, packed or not: magic number, sizes, contents."""
    packed = path.with_name(path.name + ".gz")
    contents = gzip.decompress(packed.read_bytes()) if packed.exists() else path.read_bytes()
    sizes = np.frombuffer(contents, ">u4", count=contents[3], offset=4)
    return np.frombuffer(contents, np.uint8, offset=4 + 4 * len(sizes)).reshape(sizes)


DATA = {"digits": digits, "fashion-mnist": fashion_mnist}
"""Name on the command line -> what loads it."""
