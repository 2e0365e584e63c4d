"""Runs commands in the process of the tests."""

import numpy as np
from click.testing import CliRunner

from keras_qat_cli.commands import cli
from tests.helpers import images

X = np.clip(images(40, (6, 6, 2)), -3, 3)


def run(*args, code=0):
    """Returns what a command prints, or its messages if it should exit with another code than 0."""
    done = CliRunner().invoke(cli, [str(arg) for arg in args])
    assert done.exit_code == code, (done.stdout, done.stderr, done.exception)
    assert "Traceback" not in done.output
    return done.stderr if code else done.stdout
