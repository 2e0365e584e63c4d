"""Commands that write quantized models."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from keras_qat_cli import options
from keras_qat_cli.comparing import ALL, find_shortfalls, get_label_values
from keras_qat_cli.data import Source
from keras_qat_cli.group import Settings, cli, fail, show
from keras_qat_cli.labels import read_labels
from keras_qat_cli.models import FILES
from keras_qat_cli.options import SOURCES, Calibration, Exporting, OutputFile, Quantizing

DOUBTED = "there were warnings about the data (--accept-data ignores them)"
"""The error message if `calibrate` warned about the data."""

SAVED = OutputFile("the model", *FILES, directory=True)

save_model = click.option("--save", type=SAVED, help="Save the quantization-aware model, too.")


@cli.command()
@options.any_model
@options.data
@click.option("-o", "--output", type=SAVED, required=True, help=".keras or .h5 file, or directory.")
@options.calibration
@options.accept_data
@options.quantizing
@options.json_output
@click.pass_obj
def calibrate(
    settings: Settings,
    model: Path,
    data: Source,
    output: Path,
    calibration: Calibration,
    accept_data: bool,
    quantizing: Quantizing,
    as_json: bool,
) -> None:
    """Set the ranges of MODEL from DATA, without training. A float model is quantized first."""
    check_other(output, model)
    with settings.library() as keras_qat:
        from keras_qat.messages import pluralize

        qat = settings.load_quantized(model, quantizing)
        examples, doubts = _calibrate(settings, qat, data, calibration)
        qat.save(str(output))
        ranges = [
            {
                "tensors": list(quantizer.quantizes),
                "minimum": float(quantizer.minimum),
                "maximum": float(quantizer.maximum),
            }
            for quantizer in keras_qat.quantizers(qat)
            if quantizer.name.endswith("/output")
        ]
    range_count = pluralize(len(ranges), "range of activations", "ranges of activations")
    text = f"{output}: {range_count}, from {pluralize(examples, 'example')}"
    show(text, {"output": str(output), "examples": examples, "ranges": ranges}, as_json)
    if doubts and not accept_data:
        fail(f"{output} was written, but {DOUBTED}.")


@cli.command()
@options.quantized_model
@click.argument("file", type=OutputFile("an export", ".tflite", *SOURCES, directory=True))
@options.exporting
@options.target
@click.option("--batch-size", type=options.COUNT, help="Batch size of the file: 1 for devices.")
@options.json_output
@click.pass_obj
def export(
    settings: Settings,
    model: Path,
    file: Path,
    exporting: Exporting,
    target: str | None,
    batch_size: int | None,
    as_json: bool,
) -> None:
    """Write a quantization-aware MODEL to FILE: .tflite, .cc, or a SavedModel directory."""
    arguments = exporting.select(file, target=target, batch_size=batch_size)
    with settings.library() as keras_qat:
        verbs = {
            ".tflite": keras_qat.export_tflite,
            **dict.fromkeys(SOURCES, keras_qat.export_c),
        }
        verb: Any = verbs.get(file.suffix, keras_qat.export_saved_model)
        loaded = settings.load(model)
        with settings.step("Exporting"):
            verb(loaded, str(file), **arguments)
        size = sum(part.stat().st_size for part in [file, *file.rglob("*")] if part.is_file())
        metadata = keras_qat.read_metadata(str(file)) if file.suffix == ".tflite" else {}
    show(f"{file}: {size} bytes", {"file": str(file), "bytes": size, **(metadata or {})}, as_json)


@cli.command()
@options.any_model
@options.data
@click.argument("file", type=OutputFile("the int8 model", ".tflite"))
@save_model
@options.min_identical
@options.min_agreement
@options.labels("Labels, as in evaluate. The verdict is then based on accuracy.")
@options.calibration
@options.accept_data
@options.quantizing
@options.exporting
@options.json_output
@click.pass_obj
def convert(
    settings: Settings,
    model: Path,
    data: Source,
    file: Path,
    save: Path | None,
    min_identical: float | None,
    min_agreement: float | None,
    labels: tuple[str, ...],
    calibration: Calibration,
    accept_data: bool,
    quantizing: Quantizing,
    exporting: Exporting,
    as_json: bool,
) -> None:
    """Quantize MODEL, write it to the .tflite FILE, and verify that file.

    A float model is quantized, with ranges from DATA. A trained quantization-aware model keeps its
    ranges. The file is then run on DATA and compared with the model.
    """
    arguments = exporting.select(file)
    expected, data = read_labels(data, labels) if labels else ([], data)
    if save is not None:
        check_other(save, model)
    with settings.library() as keras_qat:
        from keras_qat.messages import pluralize

        qat = settings.load_quantized(model, quantizing)
        y, doubts = get_label_values(qat, expected), False
        origin = "its own ranges"
        if not all(quantizer.calibrated for quantizer in keras_qat.quantizers(qat)):
            examples, doubts = _calibrate(settings, qat, data, calibration)
            origin = f"ranges from {pluralize(examples, 'example')}"
        if exporting.pack_int4:
            qat.pack_int4 = True
        if save is not None:
            qat.save(str(save))
        with settings.step("Exporting"):
            contents = keras_qat.export_tflite(qat, str(file), **arguments)
        report = keras_qat.verify(
            qat,
            contents,
            data.load(qat),
            y,
            float_examples=ALL if min_agreement is not None else None,
            verbose=settings.verbose,
        )
    text = f"{file}: {len(contents)} bytes, {origin}\n{report}"
    failed = find_shortfalls(report, min_identical, min_agreement)
    failed += [DOUBTED] * (doubts and not accept_data)
    details = {"file": str(file), "bytes": len(contents), **report.to_dict(), "failed": failed}
    show(text, details, as_json)
    if failed:
        fail(f"{file} does not meet the requirements: {'; '.join(failed)}.")


def check_other(path: Path, model: Path) -> None:
    """Raise a `ValueError` if a path would overwrite the input model."""
    if path.resolve() == model.resolve():
        raise ValueError(f"{path} is the input model and would be overwritten. Name another file.")


def _calibrate(
    settings: Settings, qat: Any, data: Source, calibration: Calibration
) -> tuple[int, bool]:
    """Calibrate a model. Returns the number of examples, and whether there were warnings."""
    import keras_qat
    from keras_qat.io.data import show_progress

    batches = data.load(qat)

    def read() -> Iterator[Any]:
        yield from show_progress(batches, "Calibration", settings.verbose, batches.total)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        keras_qat.calibrate(qat, read(), **calibration._asdict())
    for warning in caught:
        warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)
    return batches.examples, any(issubclass(each.category, UserWarning) for each in caught)
