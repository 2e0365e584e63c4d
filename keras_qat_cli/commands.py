"""All commands of the command line."""

from keras_qat_cli import comparing, making, planning, tuning
from keras_qat_cli.group import cli

__all__ = ["cli", "comparing", "making", "planning", "tuning"]
