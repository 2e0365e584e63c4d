"""The command `tune`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

from keras_qat_cli import options
from keras_qat_cli.data import Source
from keras_qat_cli.group import Settings, cli, fail, show
from keras_qat_cli.labels import (
    Labels,
    find_classes,
    match_outputs,
    measure_accuracy,
    read_labels,
)
from keras_qat_cli.making import check_other, save_model
from keras_qat_cli.options import OutputFile


@cli.command()
@options.any_model
@options.data
@click.argument("validation")
@click.argument("file", type=OutputFile("the best model", ".tflite"))
@save_model
@options.labels(
    "Labels of both data sets: an array of .npz files or a column of tables. Images are labelled "
    "by their subfolders. Without labels the float model's outputs are the reference."
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
    save: Path | None,
    labels: tuple[str, ...],
    as_json: bool,
    **limits: Any,
) -> None:
    """Find the best FILE for the float MODEL within an accuracy budget.

    Quantizes with DATA, and trains on DATA if necessary. Judges each attempt on VALIDATION. The
    best attempt is always written. The exit status is 1 if no attempt is within the budget.

    The metric is the first metric of the compiled model. If there is none, it is the accuracy for
    classes, and the loss for other labels. Without labels, it is the agreement with the float
    model.
    """
    if save is not None:
        check_other(save, model)
    for text in labels:
        if text.endswith(".npy"):
            raise ValueError(
                f"--labels {text} cannot have the labels of both DATA and VALIDATION. Pass the "
                f"name of an array in both .npz files, or of a column in both tables. Images are "
                f"labelled by their subfolders."
            )
    held_out = data._replace(path=validation)
    held_out.check(model)
    folders, others = data.list_subfolders(), held_out.list_subfolders()
    sources = [
        read_labels(source, labels)
        if labels or ((folders or others) and Path(source.path).is_dir())
        else ([], source)
        for source in (data, held_out)
    ]
    if folders and others and folders != others and not all(map(str.isdigit, folders | others)):
        raise ValueError(
            f"{data.path} and {validation} have different subfolders, so their classes would "
            f"differ: {', '.join(sorted(folders ^ others))}."
        )
    with settings.library() as keras_qat:
        loaded = settings.load(model, compiled=True)
        train, judged = (_load(loaded, *source) for source in sources)
        metric = choose_metric(loaded, judged, validation)
        verbose = int(not as_json)
        result = keras_qat.tune(loaded, train, judged, metric=metric, verbose=verbose, **limits)
        result.export(str(file))
        if save is not None:
            result.model.save(str(save))
    show(result, {"file": str(file), **result.to_dict()}, as_json)
    if not result.is_met:
        fail(f"{file} was written, but it loses more than {result.max_drop:g} points.")


def choose_metric(model: Any, data: Any, source: str) -> Callable[..., float] | None:
    """Returns the accuracy for labels that are classes if the model has no metric, otherwise None.

    Args:
        model: the float model.
        data: `(x, y)`, or `x` without labels.
        source: location of the data, for messages.
    """
    config: dict[str, Any] = getattr(model, "get_compile_config", dict)() or {}
    has_metric = config.get("metrics") or config.get("weighted_metrics")
    if has_metric or not isinstance(data, tuple) or len(model.outputs) > 1:
        return None
    x, y = data
    rows = model.inputs[0].shape[0] or 1
    first = [column[:rows] for column in x] if isinstance(x, list) else x[:rows]
    if find_classes((len(y), *model.predict(first, verbose=0).shape[1:]), y) is None:
        return None

    def accuracy(labels: np.ndarray, predictions: np.ndarray) -> float:
        return measure_accuracy(predictions, labels, source)[1]

    return accuracy


def _load(model: Any, found: list[Labels], data: Source) -> Any:
    columns = [np.concatenate(parts) for parts in zip(*data.load(model), strict=True)]
    x = columns if len(columns) > 1 else columns[0]
    if not found:
        return x
    for one in found:
        if len(one.values) != len(columns[0]):
            raise ValueError(
                f"{data.path} has {len(one.values)} labels for {len(columns[0])} examples. Both "
                f"DATA and VALIDATION need one label per example."
            )
    by_output = match_outputs(model, found)
    y = [by_output[name].values for name in model.output_names if name in by_output]
    return x, y if len(y) > 1 else y[0]
