"""Commands that describe a model, or how it would be quantized."""

from __future__ import annotations

from pathlib import Path

import click

from keras_qat_cli import options
from keras_qat_cli.group import Settings, cli, fail, show
from keras_qat_cli.options import Quantizing


@cli.command()
@options.float_model
@options.quantizing
@click.option(
    "--strict",
    is_flag=True,
    help="Fail if a layer stays in float, or the target has no kernel for an operator.",
)
@options.json_output
@click.pass_obj
def plan(
    settings: Settings, model: Path, quantizing: Quantizing, strict: bool, as_json: bool
) -> None:
    """Show how each tensor of MODEL would be quantized, and why."""
    with settings.library() as keras_qat:
        from keras_qat.messages import pluralize

        recipe, scope, target = quantizing
        loaded = settings.load(model)
        with settings.step("Planning"):
            result = keras_qat.plan(loaded, recipe, scope=list(scope) or None, target=target)
    show(result, result.to_dict(), as_json)
    if strict and result.float_layers:
        layers = pluralize(len(result.float_layers), "layer stays", "layers stay")
        fail(f"{layers} in float: {', '.join(result.float_layers)}.")
    if strict and result.problems:
        operators = pluralize(len(result.problems), "operator has", "operators have")
        fail(f"{operators} no kernel on the target {target}.")


@cli.command()
@options.any_model
@options.quantizing
@options.json_output
@click.pass_obj
def summary(settings: Settings, model: Path, quantizing: Quantizing, as_json: bool) -> None:
    """Summarize the file of MODEL: bits, ranges, memory and operations of each layer."""
    with settings.library() as keras_qat:
        result = keras_qat.summary(settings.load_quantized(model, quantizing))
    show(result, result.to_dict(), as_json)
