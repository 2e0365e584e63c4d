"""The group of all commands, with common options. Errors become messages and exit codes."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import click

from keras_qat_cli import models
from keras_qat_cli.options import Quantizing

__all__ = ["FAILED", "TROUBLE", "Commands", "Settings", "cli", "fail", "show"]

FAILED, TROUBLE = 1, 2
"""Exit codes. `FAILED`: a check failed. `TROUBLE`: arguments or files are not usable."""

LONGEST = 1500
"""Maximum number of characters in a message. Some messages of Keras contain configurations."""


def fail(message: str) -> None:
    """Prints a message, and exits with `FAILED`."""
    click.secho(message, fg="red", err=True)
    sys.exit(FAILED)


@contextlib.contextmanager
def quiet(debug: bool) -> Iterator[None]:
    """Moves Python's output to stderr. Hides TensorFlow's C++ messages unless `debug`."""
    with contextlib.ExitStack() as stack:
        errors = sys.stderr
        if not debug:
            log = logging.getLogger("tensorflow")
            stack.callback(log.setLevel, log.level)
            log.setLevel(logging.ERROR)
            errors.flush()
            terminal = os.dup(2)
            stack.callback(os.close, terminal)
            stack.callback(os.dup2, terminal, 2)
            if _writes_to_terminal(errors):
                # The stream stays open, because logging keeps a reference.
                errors = os.fdopen(os.dup(2), "w", encoding="utf-8", buffering=1)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 2)
            os.close(nowhere)
        stack.enter_context(contextlib.redirect_stderr(errors))
        stack.enter_context(contextlib.redirect_stdout(errors))
        yield


def _writes_to_terminal(stream: TextIO) -> bool:
    try:
        return bool(stream.fileno() == 2)
    except (OSError, AttributeError):  # A stream in memory, in tests.
        return False


@contextlib.contextmanager
def step(title: str) -> Iterator[None]:
    """Prints a title before a `with` block, and the duration of the block afterwards."""
    start = time.monotonic()
    click.echo(f"{title} ...", err=True, nl=False)
    try:
        yield
    finally:
        click.echo(f" {time.monotonic() - start:.1f} s", err=True)


OTHER_OPTIONS = {
    **dict.fromkeys(("--bits", "--weight-bits", "--activation-bits"), "--recipe low_bits"),
    **dict.fromkeys(("--int8", "--uint8", "--float16", "--dtype"), "--recipe"),
    "--model": "the model as the first argument",
    "--output": "the file as the last argument",
    "--data": "the data as the second argument",
    "--quantize": "no option, because convert always quantizes",
    "--samples": "--limit",
    "--epochs": "only data, because commands do not train; in Python, use quantize_model and fit",
}
"""Maps options of other tools to alternatives. Click's own suggestions would mislead."""


OTHER_COMMANDS = {
    "fit": "keras_qat.quantize_model and fit in Python",
    "help": "keras-qat COMMAND --help",
    "info": "summary",
    "predict": "simulate, which computes the file's outputs",
    "quantize": "convert, or calibrate to get a quantized Keras model",
    "run": "simulate, which computes the file's outputs",
    "test": "verify",
    "train": "keras_qat.quantize_model and fit in Python",
}
"""Maps commands of other tools to alternatives."""


class Command(click.Command):
    """A command. Its errors name the file, and explain options of other tools."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the arguments, and explains options of other tools."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name in OTHER_OPTIONS:
                message = (
                    f"There is no {error.option_name}: pass {OTHER_OPTIONS[error.option_name]}."
                )
                raise click.UsageError(message, ctx) from error
            raise
        except click.UsageError as error:
            takes_labels = any(param.name == "labels" for param in self.params)
            if takes_labels and "extra argument" in error.message:
                message = f"{error.message} Pass labels with --labels."
                raise click.UsageError(message, ctx) from error
            raise

    def invoke(self, ctx: click.Context) -> Any:
        arguments = (param.name for param in self.params if isinstance(param, click.Argument))
        files = [str(ctx.params[name]) for name in arguments if ctx.params.get(name)]
        files += [source.rpartition("=")[2] for source in ctx.params.get("labels", ())]
        with _errors_as_messages(ctx.find_root().params["debug"], files):
            return super().invoke(ctx)


class Commands(click.Group):
    """A group of commands that prints errors as messages."""

    command_class = Command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses options before a command, and explains options that belong after the command."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            owners = [
                name
                for name, command in self.commands.items()
                if any(error.option_name in param.opts for param in command.params)
            ]
            if owners:
                message = f"Put {error.option_name} after the command, such as {owners[0]}."
                raise click.UsageError(message, ctx) from error
            raise

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Finds the command, and explains commands of other tools."""
        if args[0] in OTHER_COMMANDS:
            message = f"There is no command {args[0]!r}: use {OTHER_COMMANDS[args[0]]}."
            raise click.UsageError(message, ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with _warnings_as_lines(), _errors_as_messages(ctx.params.get("debug", False)):
            return super().invoke(ctx)


class _Trouble(click.ClickException):
    exit_code = TROUBLE


@contextlib.contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Print the library's warnings without the line of code that Python adds."""

    def print_warning(message: object, category: type[Warning], *_: object, **__: object) -> None:
        if issubclass(category, UserWarning):
            click.secho(f"Warning: {message}", fg="yellow", err=True)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = print_warning
        yield


@contextlib.contextmanager
def _errors_as_messages(debug: bool, files: Sequence[str] = ()) -> Iterator[None]:
    try:
        yield
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except Exception as error:
        if debug:
            raise
        message = str(error.args[0] if isinstance(error, KeyError) else error) or "no message"
        if len(message) > LONGEST:
            message = f"{message[:LONGEST]} ... ({len(message)} characters; --debug shows all)"
        if not isinstance(error, (ValueError, OSError, ImportError)):
            message = f"{type(error).__name__}: {message}"
        if files and not any(file in message for file in files):
            message = f"{files[0]}: {message}"
        raise _Trouble(message) from error


class Settings(NamedTuple):
    """Options of all commands."""

    modules: tuple[str, ...]
    trust: bool
    verbose: int
    debug: bool

    @contextlib.contextmanager
    def library(self) -> Iterator[Any]:
        """Yields keras_qat, and hides TensorFlow's messages."""
        with quiet(self.debug):
            with self.step("Loading TensorFlow"):
                import keras_qat

                models.import_modules(self.modules)
            yield keras_qat

    def step(self, title: str) -> contextlib.AbstractContextManager[None]:
        """Prints a title and the duration of a `with` block, unless progress is hidden."""
        return step(title) if self.verbose else contextlib.nullcontext()

    def load(self, path: Path, compiled: bool = False) -> Any:
        """Loads a model. With `compiled`, also loads the loss and metrics."""
        with self.step(f"Loading {path}"):
            return models.load(path, self.trust, compiled)

    def load_quantized(self, path: Path, quantizing: Quantizing) -> Any:
        """Loads a model, and quantizes it if it is a float model."""
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
@click.option(
    "--trust", is_flag=True, help="Run code in model files, such as Lambda layers and SavedModels."
)
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
    .npz or .csv file, a directory of images, or module:name. The name belongs to an array, a
    dataset or a function that returns batches.

    Exit codes: 0 success; 1 a check failed; 2 arguments, files or data are not usable.
    """
    models.check_modules(modules)
    verbose = int(not quiet and sys.stderr.isatty())
    context.obj = Settings(modules, trust, verbose, debug)


def show(text: Any, data: Any, as_json: bool) -> None:
    """Prints a command's result."""
    click.echo(json.dumps(data, indent=2) if as_json else str(text))
