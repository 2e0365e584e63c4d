"""Commands that describe a model, or how it would be quantized."""

from __future__ import annotations

from pathlib import Path

import click

from keras_qat_cli import options
from keras_qat_cli.data import Source
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


@cli.command()
@options.float_model
@options.data
@click.option(
    "--bits", multiple=True, type=click.IntRange(2, 8), help="Bits to try. [default: 4, 8]"
)
@click.option(
    "--budget",
    type=click.FloatRange(0),
    help="Choose bits for a budget of bytes, or for a share of the 8-bit size.",
)
@options.json_output
@click.pass_obj
def sensitivity(
    settings: Settings,
    model: Path,
    data: Source,
    bits: tuple[int, ...],
    budget: float | None,
    as_json: bool,
) -> None:
    """Rank the layers of a float MODEL by the cost of fewer bits for their weights.

    With --budget, choose the bits of each layer within a budget of bytes. A budget of up to 1 is a
    share of the weights' size in 8 bits.
    """
    choices = bits or (4, 8)
    with settings.library() as keras_qat:
        loaded = settings.load(model)
        ranking = keras_qat.sensitivity(
            loaded, data.load(loaded), bits=choices, verbose=settings.verbose
        )
        result, chosen = ranking.to_dict(), None
        if budget is not None:
            chosen = keras_qat.search_bits(loaded, None, budget, bits=choices, known=ranking)
            result |= {"bits": chosen.bits, "bytes": chosen.bytes, "cost": chosen.cost}
    show(ranking if chosen is None else f"{ranking}\n\n{chosen}", result, as_json)
