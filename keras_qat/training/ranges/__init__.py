"""Ranges: what is observed of a tensor, and the range that a method or training makes of it."""
