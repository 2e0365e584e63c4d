"""Describes errors that a user's own code raises."""

from __future__ import annotations

import traceback
from pathlib import Path


def describe_error(error: Exception) -> str:
    """Describes an error in a layer's own code, with the line of that code."""
    foreign = ("site-packages", str(Path(__file__).parent.parent), "<", "__autograph_generated")
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(part in frame.filename for part in foreign)]
    where = f" in `{own[-1].line}` (line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}{where}: {first_line(error)}"


def first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    return text if len(text) < 120 else text[:117] + "..."
