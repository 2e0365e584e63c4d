"""Describes errors that a user's own code raises."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf


def describe_error(error: Exception) -> str:
    """Describes an error in a layer's own code, with the line of that code."""
    foreign = ("site-packages", str(Path(__file__).parent.parent), "<", "__autograph_generated")
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(part in frame.filename for part in foreign)]
    where = f" in `{own[-1].line}` (line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}{where}: {first_line(error)}"


@contextlib.contextmanager
def reading_config() -> Iterator[None]:
    """Runs a block that makes a model of its configuration, and says so if that is damaged.

    Raises:
        ValueError: if the block raises what Python or TensorFlow do where entries are missing or of
            other types. Keras' own errors of unknown classes stay.
    """
    try:
        yield
    except (TypeError, LookupError, AttributeError, tf.errors.InvalidArgumentError) as error:
        if "Could not locate" in str(error):
            raise
        cause = str(error).rsplit("Exception encountered: ", 1)[-1]
        raise ValueError(
            f"The model's configuration is damaged or was changed: {type(error).__name__}, "
            f"{first_line(ValueError(cause))} Save the model again. If it has layers of your own, "
            f"see that their from_config takes what their get_config returns."
        ) from error


def first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    return text if len(text) < 120 else text[:117] + "..."
