"""Defines the commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click

from keras_qat_cli import data as data_files
from keras_qat_cli import models, options, outputs
from keras_qat_cli.data import Options
from keras_qat_cli.errors import Commands, fail, quiet

__all__ = ["cli"]

OUTPUT = click.Path(path_type=Path)


class Settings(NamedTuple):
    """Options of all commands."""

    modules: tuple[str, ...]
    trust: bool
    verbose: int
    debug: bool


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--import", "modules", multiple=True, help="Import a module with custom layers first."
)
@click.option("--trust", is_flag=True, help="Run code of model files, as that of Lambda layers.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@click.option("--debug", is_flag=True, help="Show tracebacks of errors.")
@click.version_option(package_name="keras-qat")
@click.pass_context
def cli(
    context: click.Context, modules: tuple[str, ...], trust: bool, quiet: bool, debug: bool
) -> None:
    """Quantize Keras models, export them to int8 TFLite, and check the file against the model.

    Models are .keras or .h5 files or SavedModels, float or quantization-aware. Data are .npy, .npz
    or .csv files, directories of images, or module:name of an array, a dataset or a function that
    gives batches.

    Exit codes: 0 all is well; 1 a check did not hold; 2 arguments, files or data are not usable.
    """
    verbose = int(not quiet and sys.stderr.isatty())
    context.obj = Settings(modules, trust, verbose, debug)


@cli.command()
@options.model
@options.quantizing
@click.option(
    "--strict",
    is_flag=True,
    help="Fail if a layer would compute in float, or the target has no kernel for an operator.",
)
@options.json_output
@click.pass_obj
def plan(
    settings: Settings,
    model: Path,
    recipe: str | None,
    scope: tuple[str, ...],
    target: str | None,
    strict: bool,
    as_json: bool,
) -> None:
    """Say what quantizing MODEL would do to each tensor, and why."""
    with quiet(settings.debug):
        import keras_qat
        from keras_qat.frontend.messages import counted

        loaded = _load(settings, model)
        result = keras_qat.plan(loaded, recipe, scope=list(scope) or None, target=target)
    _print(result, result.to_dict(), as_json)
    if strict and result.float_layers:
        layers = counted(len(result.float_layers), "layer stays", "layers stay")
        fail(f"{layers} in float: {', '.join(result.float_layers)}")
    if strict and result.problems:
        operators = counted(len(result.problems), "operator has", "operators have")
        fail(f"{operators} no kernel on the target {target}.")


@cli.command()
@options.model
@options.quantizing
@options.json_output
@click.pass_obj
def summary(
    settings: Settings,
    model: Path,
    recipe: str | None,
    scope: tuple[str, ...],
    target: str | None,
    as_json: bool,
) -> None:
    """Sum up what MODEL is in its file: bits, ranges, memory and work of each layer."""
    with quiet(settings.debug):
        import keras_qat

        loaded = _load(settings, model)
        result = keras_qat.summary(models.quantized(loaded, recipe, scope, target))
    _print(result, result.to_dict(), as_json)


@cli.command()
@options.model
@options.data
@click.option(
    "-o", "--output", type=OUTPUT, required=True, help=".keras or .h5 file, or directory."
)
@click.option(
    "--method",
    type=click.Choice(["minmax", "percentile", "mse", "entropy"]),
    default="minmax",
    show_default=True,
    help="What a range is made of.",
)
@click.option("--percentile", type=float, default=99.99, show_default=True, help="Of its method.")
@options.quantizing
@options.json_output
@click.pass_obj
def calibrate(
    settings: Settings,
    model: Path,
    data: str,
    options: Options,
    output: Path,
    method: Any,
    percentile: float,
    recipe: str | None,
    scope: tuple[str, ...],
    target: str | None,
    as_json: bool,
) -> None:
    """Take the ranges of MODEL from DATA, without training; quantize it first if it is float."""
    count = 0

    def counting() -> Iterator[Any]:
        nonlocal count
        from keras_qat.io.progress import shown

        loaded = data_files.load(data, qat, options)
        for batch in shown(loaded, "Calibration", settings.verbose, loaded.total):
            count += len(batch[0])
            yield batch

    with quiet(settings.debug):
        import keras_qat
        from keras_qat.frontend.messages import counted

        outputs.check_model(output, model)
        qat = models.quantized(_load(settings, model), recipe, scope, target)
        keras_qat.calibrate(qat, counting(), method=method, percentile=percentile)
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
    found = counted(len(ranges), "range of activations", "ranges of activations")
    text = f"{output}: {found}, from {counted(count, 'example')}"
    _print(text, {"output": str(output), "examples": count, "ranges": ranges}, as_json)


@cli.command()
@options.model
@click.argument("file", type=OUTPUT)
@click.option("--input-dtype", help="Type of the inputs: int8, uint8, int16 or float32.")
@click.option("--output-dtype", help="Type of the outputs, likewise.")
@click.option(
    "--input-range", type=(float, float), help="Least and greatest input, of contrib models."
)
@click.option(
    "--rescaling",
    type=(float, float),
    help="Scale and offset that made training data of pixels: uint8 inputs take pixels.",
)
@click.option(
    "--target", help="Where the file is to run, by default what the model was quantized for."
)
@click.option("--pack-int4", is_flag=True, help="Store two weights of 4 bits in a byte.")
@click.option(
    "--batch-size", type=click.IntRange(1), help="How many examples a run takes: 1 for devices."
)
@options.json_output
@click.pass_obj
def export(
    settings: Settings,
    model: Path,
    file: Path,
    input_dtype: str | None,
    output_dtype: str | None,
    input_range: tuple[float, float] | None,
    rescaling: tuple[float, float] | None,
    target: str | None,
    pack_int4: bool,
    batch_size: int | None,
    as_json: bool,
) -> None:
    """Write a quantization-aware MODEL to FILE: .tflite, .cc, .onnx, or a SavedModel directory."""
    arguments: dict[str, Any] = {
        "input_dtype": input_dtype,
        "output_dtype": output_dtype,
        "input_range": input_range,
        "rescaling": rescaling,
        "target": target,
        "pack_int4": pack_int4 or None,
        "batch_size": batch_size,
    }
    arguments = {name: value for name, value in arguments.items() if value is not None}
    outputs.check_exported(file, arguments)
    with quiet(settings.debug):
        import keras_qat

        verbs = {
            ".tflite": keras_qat.export_tflite,
            ".onnx": keras_qat.export_onnx,
            **dict.fromkeys(outputs.SOURCES, keras_qat.export_c),
        }
        verb: Any = verbs.get(file.suffix, keras_qat.export_saved_model)
        verb(_load_quantized(settings, model), str(file), **arguments)
        size = sum(part.stat().st_size for part in [file, *file.rglob("*")] if part.is_file())
        metadata = keras_qat.read_metadata(str(file)) if file.suffix == ".tflite" else {}
    _print(f"{file}: {size} bytes", {"file": str(file), "bytes": size, **(metadata or {})}, as_json)


@cli.command()
@options.model
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@options.data
@click.option("--per-layer", is_flag=True, help="Compare every tensor that both have.")
@click.option("--min-identical", type=click.FloatRange(0, 100), help="Fail below so many percent.")
@click.option("--max-difference", type=click.FloatRange(0), help="Fail beyond so many LSB.")
@click.option("--html", type=OUTPUT, help="Write the report as a page, too.")
@options.kernels
@options.json_output
@click.pass_obj
def verify(
    settings: Settings,
    model: Path,
    file: Path,
    data: str,
    options: Options,
    per_layer: bool,
    min_identical: float | None,
    max_difference: float | None,
    html: Path | None,
    kernels: Any,
    as_json: bool,
) -> None:
    """Run MODEL and its TFLite FILE on DATA and compare their outputs."""
    with quiet(settings.debug):
        import keras_qat

        outputs.check_page(html)
        qat = _load_quantized(settings, model)
        report = keras_qat.verify(
            qat,
            str(file),
            data_files.load(data, qat, options),
            per_layer=per_layer,
            kernels=kernels,
            batch_size=options.batch_size,
            verbose=settings.verbose,
        )
        if html is not None:
            report.to_html(html)
    identical, difference = 100 * report.identical, report.max_difference
    findings = []
    if min_identical is not None and identical < min_identical:
        findings.append(
            f"{identical:.4f} % of the output values are identical (required: {min_identical:g} %)"
        )
    if max_difference is not None and difference > max_difference:
        findings.append(
            f"the largest difference is {difference:g} LSB (allowed: {max_difference:g})"
        )
    totals = {"identical": report.identical, "max_difference": difference, "failed": findings}
    _print(report, {**report.to_dict(), **totals}, as_json)
    if findings:
        fail(f"{file} differs from the model: {'; '.join(findings)}.")


@cli.command()
@options.model
@options.data
@click.option(
    "--bits", multiple=True, type=click.IntRange(2, 8), help="Bits to try. [default: 4, 8]"
)
@click.option(
    "--budget", type=click.FloatRange(0), help="Choose bits for so many bytes, or such a share."
)
@click.option("--html", type=OUTPUT, help="Write the ranking as a page, too.")
@options.json_output
@click.pass_obj
def sensitivity(
    settings: Settings,
    model: Path,
    data: str,
    options: Options,
    bits: tuple[int, ...],
    budget: float | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Rank the layers of a float MODEL by the cost of fewer bits for their weights.

    With --budget, choose the bits of each layer so that the weights take at most that many bytes,
    or, for a budget of up to 1, that share of their size in 8 bits.
    """
    with quiet(settings.debug):
        import keras_qat

        outputs.check_page(html)
        float_model = _load(settings, model)
        ranking = keras_qat.sensitivity(
            float_model,
            data_files.load(data, float_model, options),
            bits=bits or (4, 8),
            verbose=settings.verbose,
        )
        if html is not None:
            ranking.to_html(html)
        result = ranking.to_dict()
        chosen = None
        if budget is not None:
            choices = bits or (4, 8)
            chosen = keras_qat.search_bits(float_model, None, budget, bits=choices, known=ranking)
            result |= {"bits": chosen.bits, "bytes": chosen.bytes, "cost": chosen.cost}
    _print(ranking if chosen is None else f"{ranking}\n\n{chosen}", result, as_json)


@cli.command()
@options.model
@options.data
@click.option("-o", "--output", type=OUTPUT, help=".npz file for the codes of all tensors.")
@options.kernels
@options.json_output
@click.pass_obj
def simulate(
    settings: Settings,
    model: Path,
    data: str,
    options: Options,
    output: Path | None,
    kernels: Any,
    as_json: bool,
) -> None:
    """Compute the integer outputs of MODEL's file for DATA, without a file."""
    import numpy as np

    with quiet(settings.debug):
        import keras_qat
        from keras_qat.frontend.messages import counted

        outputs.check_codes(output)
        qat = _load_quantized(settings, model)
        result = keras_qat.simulate(
            qat,
            data_files.load(data, qat, options),
            kernels,
            batch_size=options.batch_size,
            verbose=settings.verbose,
        )
        arrays = {**result.tensors, **result.outputs}
        codes = {name: getattr(array, "codes", array) for name, array in arrays.items()}
        if output is not None:
            np.savez(output, **codes)
    shown: dict[str, dict[str, Any]] = {
        name: {
            "shape": list(codes[name].shape),
            "dtype": str(codes[name].dtype),
            "scale": float(output_tensor.scale) if name in result.tensors else None,
            "zero_point": output_tensor.zero_point if name in result.tensors else None,
        }
        for name, output_tensor in result.outputs.items()
    }
    lines = [
        f"{name}: {info['dtype']} {tuple(info['shape'])}, scale {info['scale']}, zero point "
        f"{info['zero_point']}"
        for name, info in shown.items()
    ]
    if output is not None:
        lines.append(f"{output}: the codes of {counted(len(codes), 'tensor')}")
    text = "\n".join(lines)
    written = None if output is None else str(output)
    _print(text, {"outputs": shown, "output": written, "kernels": result.kernels}, as_json)


def _load(settings: Settings, path: Path) -> Any:
    models.import_modules(settings.modules)
    return models.load(path, settings.trust)


def _load_quantized(settings: Settings, path: Path) -> Any:
    from keras_qat.training.schedule import is_quantized

    model = _load(settings, path)
    if not is_quantized(model):
        raise ValueError(
            f"{path} is a float model. Quantize it first: keras-qat calibrate {path} DATA -o "
            f"qat.keras. Or train the result of keras_qat.quantize_model, and save it."
        )
    return model


def _print(text: Any, data: Any, as_json: bool) -> None:
    click.echo(json.dumps(data, indent=2) if as_json else str(text))
