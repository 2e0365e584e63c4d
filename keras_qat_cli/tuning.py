"""The command `tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np

from keras_qat_cli import options
from keras_qat_cli.data import Source
from keras_qat_cli.group import Settings, cli, fail, show
from keras_qat_cli.labels import match_outputs, read_labels
from keras_qat_cli.options import OutputFile


@cli.command()
@options.any_model
@options.data
@click.argument("validation")
@click.argument("file", type=OutputFile("the best model", ".tflite"))
@options.labels(
    "Labels of both data sets: an array of .npz files or a column of tables. Images are labelled "
    "by their subdirectories. Without labels the float model's outputs are the reference."
)
@click.option("--max-drop", type=click.FloatRange(0), default=0.5, help="Budget in points.")
@click.option("--minutes", type=click.FloatRange(0, min_open=True), default=10, help="Time limit.")
@click.option("--max-size", type=options.COUNT, help="Bytes that the file may have.")
@click.option("--min-bits", type=click.IntRange(4, 8), help="Fewest bits of weights to try.")
@click.option("--directory", type=click.Path(file_okay=False), help="Where to save all attempts.")
@options.target
@options.json_output
@click.pass_obj
def tune(
    settings: Settings,
    model: Path,
    data: Source,
    validation: str,
    file: Path,
    labels: tuple[str, ...],
    as_json: bool,
    **limits: Any,
) -> None:
    """Find the best FILE for the float MODEL within an accuracy budget.

    Quantizes with DATA, and trains on DATA if necessary. Judges each attempt on VALIDATION. The
    best attempt is always written. The exit status is 1 if no attempt is within the budget.
    """
    held_out = data._replace(path=validation)
    held_out.check(model)
    with settings.library() as keras_qat:
        loaded = settings.load(model, compiled=True)
        train, judged = (_load(loaded, source, labels) for source in (data, held_out))
        result = keras_qat.tune(loaded, train, judged, verbose=int(not as_json), **limits)
        result.export(str(file))
    show(result, {"file": str(file), **result.to_dict()}, as_json)
    if not result.is_met:
        fail(f"{file} was written, but it loses more than {result.max_drop:g} points.")


def _load(model: Any, data: Source, labels: tuple[str, ...]) -> Any:
    has_labels = bool(labels) or Path(data.path).is_dir()
    found, data = read_labels(data, labels) if has_labels else ([], data)
    columns = [np.concatenate(parts) for parts in zip(*data.load(model), strict=True)]
    x = columns if len(columns) > 1 else columns[0]
    if not found:
        return x
    by_output = match_outputs(model, found)
    y = [by_output[name].values for name in model.output_names if name in by_output]
    return x, y if len(y) > 1 else y[0]
