"""Passes: each takes a resolved graph and returns a changed one."""
