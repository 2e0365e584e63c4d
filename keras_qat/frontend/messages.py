"""Builds parts of messages."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """Returns a number with its noun, in the plural unless the number is 1: "3 layers"."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
