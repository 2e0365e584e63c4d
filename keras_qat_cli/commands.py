"""Gathers the commands."""

from keras_qat_cli import comparing, making, planning
from keras_qat_cli.group import cli

__all__ = ["cli", "comparing", "making", "planning"]
