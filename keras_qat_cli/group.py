"""Defines the group of commands, and the options in front of a command."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click

from keras_qat_cli import models
from keras_qat_cli.errors import Commands, quiet, step
from keras_qat_cli.options import Quantizing

__all__ = ["Settings", "cli", "show"]


class Settings(NamedTuple):
    """Options of all commands."""

    modules: tuple[str, ...]
    trust: bool
    verbose: int
    debug: bool

    @contextlib.contextmanager
    def library(self) -> Iterator[Any]:
        """Yields keras_qat; TensorFlow's messages are hidden while it works."""
        with quiet(self.debug):
            with self.step("Loading TensorFlow"):
                import keras_qat

                models.import_modules(self.modules)
            yield keras_qat

    def step(self, title: str) -> contextlib.AbstractContextManager[None]:
        """Shows what is going on, and then how long it took."""
        return step(title) if self.verbose else contextlib.nullcontext()

    def load(self, path: Path, compiled: bool = False) -> Any:
        """Loads a model, and with `compiled` its loss and metrics."""
        with self.step(f"Loading {path}"):
            return models.load(path, self.trust, compiled)

    def load_quantized(self, path: Path, quantizing: Quantizing) -> Any:
        """Loads a quantization-aware model, or makes one of a float model."""
        import keras_qat

        model = self.load(path)
        if models.is_quantized(path):
            return model
        recipe, scope, target = quantizing
        with self.step("Quantizing"):
            return keras_qat.quantize_model(model, recipe, scope=list(scope) or None, target=target)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--import",
    "modules",
    multiple=True,
    help="Import a module with custom layers first.",
)
@click.option("--trust", is_flag=True, help="Run code in model files, such as Lambda layers.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@click.option("--debug", is_flag=True, help="Show tracebacks of errors.")
@click.version_option(package_name="keras-qat")
@click.pass_context
def cli(
    context: click.Context, modules: tuple[str, ...], trust: bool, quiet: bool, debug: bool
) -> None:
    """Quantize Keras models, export them to int8 TFLite, and check the file against the model.

    `keras-qat convert model.keras data.npy model.tflite` does all three steps for a float model.

    Models are .keras or .h5 files or SavedModels, float or quantization-aware. Data is an .npy,
    .npz or .csv file, a directory of images, or module:name of an array, a dataset or a function
    that returns batches.

    Exit codes: 0 success; 1 a check failed; 2 arguments, files or data are not usable.
    """
    models.check_modules(modules)
    verbose = int(not quiet and sys.stderr.isatty())
    context.obj = Settings(modules, trust, verbose, debug)


def show(text: Any, data: Any, as_json: bool) -> None:
    """Prints a command's result."""
    click.echo(json.dumps(data, indent=2) if as_json else str(text))
