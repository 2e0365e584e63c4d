"""Commands that run models and compare their outputs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from keras_qat_cli import options
from keras_qat_cli.data import Source
from keras_qat_cli.group import Settings, cli, fail, show
from keras_qat_cli.labels import Labels, match_outputs, measure_accuracy, read_labels
from keras_qat_cli.models import is_quantized
from keras_qat_cli.options import OutputFile

ALL = sys.maxsize
"""All examples."""


@cli.command()
@options.quantized_model
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@options.data
@click.option("--per-layer", is_flag=True, help="Compare every tensor that both have.")
@options.min_identical
@options.min_agreement
@options.labels("Labels, as in evaluate. The verdict is then based on accuracy.")
@click.option(
    "--max-difference",
    type=click.FloatRange(0),
    help="Fail if an output differs by more than this many LSB.",
)
@options.kernels
@options.json_output
@click.pass_obj
def verify(
    settings: Settings,
    model: Path,
    file: Path,
    data: Source,
    per_layer: bool,
    min_identical: float | None,
    min_agreement: float | None,
    labels: tuple[str, ...],
    max_difference: float | None,
    kernels: Any,
    as_json: bool,
) -> None:
    """Compare MODEL, its TFLite FILE and the float model on DATA."""
    expected, data = read_labels(data, labels) if labels else ([], data)
    with settings.library() as keras_qat:
        qat = settings.load(model)
        report = keras_qat.verify(
            qat,
            str(file),
            data.load(qat),
            get_label_values(qat, expected),
            per_layer=per_layer,
            kernels=kernels,
            batch_size=data.batch_size,
            float_examples=ALL if min_agreement is not None else None,
            verbose=settings.verbose,
        )
    failed = find_shortfalls(report, min_identical, min_agreement, max_difference)
    totals = {
        "identical": report.identical,
        "agreement": report.agreement,
        "max_difference": report.max_difference,
        "failed": failed,
    }
    show(report, {**report.to_dict(), **totals}, as_json)
    if failed:
        fail(f"{file} does not meet the requirements: {'; '.join(failed)}.")


def get_label_values(model: Any, labels: Sequence[Labels]) -> dict[str, np.ndarray] | None:
    """Returns labels as the argument `y` of `verify`. Returns None without labels."""
    return {name: one.values for name, one in match_outputs(model, labels).items()} or None


def find_shortfalls(
    report: Any,
    min_identical: float | None,
    min_agreement: float | None,
    max_difference: float | None = None,
) -> list[str]:
    """Lists the requirements that a report of `verify` does not meet.

    By default, the file must compute the same as the model, and the model must be accurate.
    """
    failed = []
    if min_agreement is None and report.verdict.words == "same but poor":
        failed.append(
            "the model has low accuracy, see the verdict (--min-agreement sets the share of rows "
            "that must have the same argmax as in float)"
        )
    if min_identical is None and max_difference is None and not report.verdict.is_same:
        failed.append(
            "the file and the model compute different outputs (--min-identical or --max-difference "
            "allows differences)"
        )
    if min_identical is not None and 100 * report.identical < min_identical:
        failed.append(
            f"{100 * report.identical:.4f} % of the output values are identical (required: "
            f"{min_identical:g} %)"
        )
    if max_difference is not None and report.max_difference > max_difference:
        failed.append(
            f"the largest difference is {report.max_difference:g} LSB (allowed: {max_difference:g})"
        )
    if min_agreement is not None and 100 * (report.agreement or 0.0) < min_agreement:
        agreement = "none" if report.agreement is None else f"{100 * report.agreement:.2f} %"
        failed.append(
            f"{agreement} of the rows have the same argmax as in float (required: "
            f"{min_agreement:g} %)"
        )
    return failed


@cli.command()
@options.any_model
@options.data
@options.labels(
    "An .npy file, an array of the .npz file, or a column of the table. Not needed for images, "
    "whose subfolders are the classes. For several outputs: OUTPUT=SOURCE, once for each."
)
@options.kernels
@options.json_output
@click.pass_obj
def evaluate(
    settings: Settings,
    model: Path,
    data: Source,
    labels: tuple[str, ...],
    kernels: str | None,
    as_json: bool,
) -> None:
    """Measure MODEL on DATA with labels, in float and, if it is quantized, in integers.

    Measures accuracy for classes, and the mean absolute error for other labels.
    """
    found, data = read_labels(data, labels)
    with settings.library() as keras_qat:
        loaded = settings.load(model)
        expected = match_outputs(loaded, found)
        in_float = "in float"
        if is_quantized(model):
            loaded.kernels = kernels or loaded.kernels
            in_integers = f"in integers ({loaded.kernels} kernels)"
            runs = {in_integers: _measure(settings, loaded, data, expected)}
            keras_qat.set_quantization(loaded, False)
        else:
            runs = {}
        runs[in_float] = _measure(settings, loaded, data, expected)
    outputs: dict[str, dict[str, Any]] = {
        name: {
            "metric": runs[in_float][name][0],
            "examples": len(one.values),
            "values": {run: figures[name][1] for run, figures in runs.items()},
        }
        for name, one in expected.items()
    }
    is_single = len(loaded.output_names) == 1
    text = "\n".join(
        _describe_metric("" if is_single else name, **outputs[name]) for name in outputs
    )
    show(text, next(iter(outputs.values())) if is_single else {"outputs": outputs}, as_json)


def _measure(
    settings: Settings, model: Any, data: Source, expected: dict[str, Labels]
) -> dict[str, tuple[str, float]]:
    """Return the name and value of the metric for each output with labels."""
    predicted = _predict(settings, model, data)
    return {
        name: measure_accuracy(predicted[name], one.values, one.source)
        for name, one in expected.items()
    }


def _describe_metric(output: str, metric: str, examples: int, values: dict[str, float]) -> str:
    """Format the measurements of an output. `output` is "" for the only output."""
    form = "10.2%" if metric == "accuracy" else "10.4g"
    of_output = f"{output}: " if output else ""
    lines = [f"{name:<32}{figure:>{form}}" for name, figure in reversed(values.items())]
    return "\n".join([f"{of_output}{metric} on {examples} examples", *lines])


@cli.command()
@options.quantized_model
@options.data
@options.json_output
@click.pass_obj
def diagnose(settings: Settings, model: Path, data: Source, as_json: bool) -> None:
    """Find which layers of a quantized MODEL lose accuracy on DATA, why, and what helps.

    Tries remedies on half of the examples and measures them on the other half. Needs no labels.
    """
    with settings.library() as keras_qat:
        qat = settings.load(model)
        result = keras_qat.diagnose(qat, data.load(qat), verbose=settings.verbose)
    show(result, result.to_dict(), as_json)


def _predict(settings: Settings, model: Any, data: Source) -> dict[str, np.ndarray]:
    import tensorflow as tf

    from keras_qat.io.data import show_progress
    from keras_qat.io.inputs import get_inputs, pack_inputs

    batches = data.load(model)
    parts = [
        tf.nest.flatten(model.predict_on_batch(pack_inputs(get_inputs(model), batch)))
        for batch in show_progress(batches, "Evaluation", settings.verbose, batches.total)
    ]
    outputs = [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
    return dict(zip(model.output_names, outputs, strict=True))


@cli.command()
@options.quantized_model
@options.data
@click.option(
    "-o",
    "--output",
    type=OutputFile("the dictionary of values", ".npz"),
    help=".npz file for the quantized values of all tensors.",
)
@options.kernels
@options.json_output
@click.pass_obj
def simulate(
    settings: Settings, model: Path, data: Source, output: Path | None, kernels: Any, as_json: bool
) -> None:
    """Compute the integer outputs of MODEL's file for DATA, without writing a file."""
    with settings.library() as keras_qat:
        from keras_qat.io.atomic_files import replacing
        from keras_qat.messages import pluralize

        qat = settings.load(model)
        result = keras_qat.simulate(
            qat, data.load(qat), kernels, batch_size=data.batch_size, verbose=settings.verbose
        )
        arrays = {**result.tensors, **result.outputs}
        codes = {name: getattr(array, "codes", array) for name, array in arrays.items()}
        if output is not None:
            with replacing(output) as file:
                np.savez(file, **codes)
    outputs: dict[str, dict[str, Any]] = {
        name: {
            "shape": list(codes[name].shape),
            "dtype": str(codes[name].dtype),
            "scale": float(array.scale) if name in result.tensors else None,
            "zero_point": array.zero_point if name in result.tensors else None,
        }
        for name, array in result.outputs.items()
    }
    lines = [
        f"{name}: {info['dtype']} {tuple(info['shape'])}, scale {info['scale']}, zero point "
        f"{info['zero_point']}"
        for name, info in outputs.items()
    ]
    if output is not None:
        lines.append(f"{output}: the quantized values of {pluralize(len(codes), 'tensor')}")
    written = None if output is None else str(output)
    details = {"outputs": outputs, "output": written, "kernels": result.kernels}
    show("\n".join(lines), details, as_json)
