"""Arguments and options that several commands share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from keras_qat_cli.data import PIXELS, Options

__all__ = ["batch_size", "data", "json_output", "kernels", "model", "quantizing"]

Command = Callable[..., Any]

model = click.argument("model", type=click.Path(exists=True, path_type=Path))

json_output = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")

kernels = click.option(
    "--kernels",
    type=click.Choice(["xnnpack", "tflm", "reference"]),
    show_default="the target's, without one xnnpack",
    help="Whose rounding: that of phones, or of microcontrollers.",
)

batch_size = click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Examples at a time.",
)


def quantizing(command: Command) -> Command:
    """Adds options for quantizing a float model."""
    for option in (
        click.option(
            "--target",
            help="Where the file is to run: tflm, ethos_u55, edgetpu or another (docs/targets.md).",
        ),
        click.option(
            "--scope",
            multiple=True,
            help="Quantize only these layers: a name, its beginning, a pattern with *, or a class. "
            "Can be repeated.",
        ),
        click.option(
            "--recipe",
            type=click.Choice(["int8", "int16x8", "int4_weights", "low_bits", "contrib"]),
            show_default="the target's, without one int8",
            help="How a float model is quantized.",
        ),
    ):
        command = option(command)
    return command


def data(command: Command) -> Command:
    """Adds the argument for data, and options for reading it."""

    @functools.wraps(command)
    def with_options(
        key: str | None,
        drop: tuple[str, ...],
        pixels: str,
        batch_size: int,
        limit: int | None,
        **arguments: Any,
    ) -> Any:
        return command(options=Options(key, drop, pixels, batch_size, limit), **arguments)

    for option in (
        click.option(
            "--limit", type=click.IntRange(1), help="Use only this many examples, the first ones."
        ),
        batch_size,
        click.option(
            "--pixels",
            type=click.Choice(list(PIXELS)),
            default="0..255",
            show_default=True,
            help="Range of pixels that the model takes, for directories of images.",
        ),
        click.option(
            "--drop",
            multiple=True,
            help="A column of a table that is not an input: name or number.",
        ),
        click.option("--key", help="The array of an .npz file."),
        click.argument("data"),
    ):
        with_options = option(with_options)
    return with_options
