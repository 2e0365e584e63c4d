"""The data of all three programs: handwritten digits, 8x8 pixels."""

import numpy as np
from sklearn.datasets import load_digits

TRAIN, VALIDATION = slice(0, 1000), slice(1000, 1300)
TEST = slice(1300, None)


def load(part: slice) -> tuple[np.ndarray, np.ndarray]:
    """Returns images of shape (examples, 8, 8, 1), 0 to 1, and their digits."""
    images, digits = load_digits(return_X_y=True)
    return images[part].reshape(-1, 8, 8, 1).astype("float32") / 16, digits[part]
