"""The command line `keras-qat`, which runs the library's functions on files.

Importing keras_qat imports TensorFlow, which needs seconds. Help and completion are faster, because
this package imports keras_qat only when a command runs.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Runs the command line."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        from keras_qat_cli.commands import cli
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        sys.exit("The command line needs Click. Install it with: pip install 'keras-qat[cli]'")
    cli(prog_name="keras-qat")
