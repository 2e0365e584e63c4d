"""Shows errors as one message and an exit code instead of a traceback."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import click

__all__ = ["FAILED", "TROUBLE", "Commands", "fail", "quiet", "step"]

FAILED, TROUBLE = 1, 2
"""Exit codes: a check failed; or arguments, files, the model or the data are not usable."""

LONGEST = 1500
"""Most characters of a message: Keras puts whole configurations into some."""


def fail(message: str) -> None:
    """Ends the program because a check failed."""
    click.secho(message, fg="red", err=True)
    sys.exit(FAILED)


@contextlib.contextmanager
def quiet(debug: bool) -> Iterator[None]:
    """Hides TensorFlow's C++ messages unless `debug`, and moves Python's output to stderr."""
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
                # It stays open, as logging keeps it.
                errors = os.fdopen(os.dup(2), "w", encoding="utf-8", buffering=1)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 2)
            os.close(nowhere)
        stack.enter_context(contextlib.redirect_stderr(errors))
        stack.enter_context(contextlib.redirect_stdout(errors))
        yield


def _writes_to_terminal(stream: Any) -> bool:
    try:
        return bool(stream.fileno() == 2)
    except (OSError, AttributeError):  # A stream in memory, in tests.
        return False


@contextlib.contextmanager
def step(title: str) -> Iterator[None]:
    """Shows what is going on, and then how long it took."""
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
"""Options that people try -> what stands for them. Click's nearest name misleads there."""


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
"""Commands that people try -> what stands for them."""


class Command(click.Command):
    """A command whose errors name a file."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Reads the arguments, and answers options of other tools."""
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
    """A group of commands that shows errors as messages."""

    command_class = Command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Reads the options in front of a command, and says where those of commands belong."""
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
        """Finds the command, and answers those of other tools."""
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
    """Shows the library's warnings without the line of code that they refer to."""

    def show(message: Any, category: Any, *location: Any, **rest: Any) -> None:
        if issubclass(category, UserWarning):
            click.secho(f"Warning: {message}", fg="yellow", err=True)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
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
