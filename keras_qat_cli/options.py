"""Arguments and options that several commands share."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click

from keras_qat_cli import models
from keras_qat_cli.data import PIXELS, Source

Command = Callable[..., Any]

TARGETS = (
    *("xnnpack", "tflm", "cmsis_nn", "ethos_u55", "ethos_u65", "ethos_u85"),
    *("edgetpu", "stm32_npu", "stm32n6", "neutron", "mediatek", "esp_nn", "coral_npu"),
)
"""Names of `keras_qat.targets`. They are repeated here, because keras_qat imports TensorFlow."""

SOURCES = (".cc", ".cpp", ".cxx")


class OutputFile(click.Path):
    """A file or directory to write, in an existing folder.

    Args:
        what: a description of the contents, for messages.
        endings: allowed endings of files. If empty, all endings are allowed.
        directory: whether to allow the directory of a SavedModel, which has no ending.
    """

    def __init__(self, what: str, *endings: str, directory: bool = False) -> None:
        super().__init__(path_type=Path)
        self.what, self.endings, self.directory = what, endings, directory

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Returns the path if it can be written."""
        path = Path(str(super().convert(value, param, ctx)))
        is_directory = self.directory and not path.suffix[1:].isalpha()  # A directory can be v.1.
        if self.endings and path.suffix not in self.endings and not is_directory:
            or_directory = ", or to a directory (a name without an ending)" * self.directory
            raise ValueError(
                f"{path}: {self.what} is written to {', '.join(self.endings)} files{or_directory}."
            )
        if path.is_dir() and not is_directory:
            raise ValueError(f"{path} is a directory. Name a file in it.")
        has_other_files = path.is_dir() and not (path / "saved_model.pb").exists()
        if has_other_files and any(path.iterdir()):
            raise ValueError(f"{path} is a directory with other files. Name a new directory.")
        if not path.parent.is_dir():
            raise ValueError(
                f"{path}: the directory {path.parent} does not exist. Create it first."
            )
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError(f"{path} is read-only. Choose another path.")
        if path.suffix in models.FILES and path.suffix not in self.endings and path.exists():
            raise ValueError(
                f"{path} is a saved Keras model, which would be overwritten. Choose another name."
            )
        return path


any_model = click.argument("model", type=models.ModelFile())
float_model = click.argument("model", type=models.ModelFile(quantized=False))
quantized_model = click.argument("model", type=models.ModelFile(quantized=True))

json_output = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


KERNELS = ("xnnpack", "xnnpack_arm64", "tflm", "reference")
"""Names of `kernel_families.FAMILIES`, the most common first."""

kernels = click.option(
    "--kernels",
    type=click.Choice(KERNELS),
    show_default="the target's, or xnnpack without a target",
    help="The kernels whose rounding is computed: phones, microcontrollers or other runtimes.",
)

COUNT = click.IntRange(1)
COUNT.name = "integer"  # Click would print "integer range".

PERCENT = click.FloatRange(0, 100)
PERCENT.name = "number"

min_identical = click.option(
    "--min-identical",
    type=PERCENT,
    help="Fail if fewer outputs than this percentage are identical.",
)

min_agreement = click.option(
    "--min-agreement",
    type=PERCENT,
    help="Fail if fewer rows than this percentage have the same argmax as the float model.",
)


def labels(text: str) -> Callable[[Any], Any]:
    """Returns the option `--labels`. It can be repeated for several outputs."""
    return click.option("--labels", multiple=True, metavar="[OUTPUT=]SOURCE", help=text)


accept_data = click.option(
    "--accept-data", is_flag=True, help="Exit with 0 despite warnings about the data."
)


class TargetName(click.Choice[str]):
    """The name of a target. Modules of `--import` can register more targets."""

    def __init__(self) -> None:
        super().__init__(TARGETS)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Returns the name if it is a target, or if `--import` may register it."""
        has_modules = ctx is not None and ctx.find_root().params.get("modules")
        return value if has_modules else super().convert(value, param, ctx)


target = click.option("--target", type=TargetName(), help="The device or runtime of the file.")


class Quantizing(NamedTuple):
    """Options for quantizing a float model, as in `keras_qat.quantize_model`."""

    recipe: str | None
    scope: tuple[str, ...]
    target: str | None

    def check(self, model: Path) -> None:
        for name, value in self._asdict().items():
            if value and models.is_quantized(model):
                raise ValueError(f"{model} is already quantized: --{name} is for float models.")


class Calibration(NamedTuple):
    """Options of `keras_qat.calibrate`."""

    method: Any
    percentile: float

    def check(self, model: Path) -> None:
        if not 50 < self.percentile <= 100:
            raise click.UsageError(
                "--percentile: pass a value above 50 and at most 100, such as 99.99."
            )


class Exporting(NamedTuple):
    """Options of `keras_qat.export_tflite`."""

    input_dtype: str | None
    output_dtype: str | None
    input_range: tuple[float, float] | None
    rescaling: tuple[float, float] | None
    pack_int4: bool | None

    def check(self, model: Path) -> None:
        pass

    def select(self, file: Path, **others: Any) -> dict[str, Any]:
        """Returns the passed options. Raises an error if the format of `file` lacks an option."""
        options = {**self._asdict(), "pack_int4": self.pack_int4 or None, **others}
        options = {name: value for name, value in options.items() if value is not None}
        accepted = {"input_range"}
        if file.suffix in SOURCES:
            accepted |= {"input_dtype", "output_dtype", "rescaling"}
        refused = sorted(options.keys() - accepted)
        if file.suffix != ".tflite" and refused:
            raise click.UsageError(f"{', '.join(refused)}: supported for .tflite files only.")
        return options


def _group_options(name: str, values: Any, *options: Any) -> Callable[[Command], Command]:
    """Return a decorator that adds options and passes their values as one argument.

    Args:
        name: the argument's name.
        values: class of the argument. Its `check(model)` raises an error for invalid combinations.
        options: the options.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def call_command(*settings: Any, **arguments: Any) -> Any:
            fields = {field: arguments.pop(field) for field in values._fields}
            arguments[name] = values(**fields)
            arguments[name].check(arguments["model"])
            return command(*settings, **arguments)

        for option in reversed(options):
            call_command = option(call_command)
        return call_command

    return decorate


data = _group_options(
    "data",
    Source,
    click.argument("path", metavar="DATA"),
    click.option("--key", help="The array of an .npz file."),
    click.option(
        "--drop", multiple=True, help="A column of a table that is not an input: name or number."
    ),
    click.option(
        "--pixels",
        type=click.Choice(list(PIXELS)),
        help="Range of pixels that the model expects, for directories of images.",
    ),
    click.option(
        "--batch-size",
        type=COUNT,
        default=32,
        show_default=True,
        help="Examples per batch.",
    ),
    click.option("--limit", type=COUNT, help="Use only the first N examples."),
)

quantizing = _group_options(
    "quantizing",
    Quantizing,
    click.option(
        "--recipe",
        type=click.Choice(
            ["int8", "symmetric", "power_of_two", "int16x8", "int4_weights", "low_bits", "contrib"]
        ),
        show_default="the target's, or int8 without a target",
        help="How a float model is quantized.",
    ),
    click.option(
        "--scope",
        multiple=True,
        help="Quantize only these layers: a name, a prefix, a pattern with *, or a class. "
        "Can be repeated.",
    ),
    target,
)

calibration = _group_options(
    "calibration",
    Calibration,
    click.option(
        "--method",
        type=click.Choice(["minmax", "percentile", "mse"]),
        default="minmax",
        show_default=True,
        help="How ranges are chosen.",
    ),
    click.option(
        "--percentile",
        type=float,
        default=99.99,
        show_default=True,
        help="For --method percentile: the percentage of values below the upper end of a range.",
    ),
)

exporting = _group_options(
    "exporting",
    Exporting,
    click.option(
        "--input-dtype",
        type=click.Choice(["int8", "uint8", "int16", "float32"]),
        help="Type of the inputs.",
    ),
    click.option(
        "--output-dtype",
        type=click.Choice(["int8", "uint8", "int16", "float32"]),
        help="Type of the outputs.",
    ),
    click.option(
        "--input-range",
        type=(float, float),
        help="Minimum and maximum of the inputs, for contrib models.",
    ),
    click.option(
        "--rescaling",
        type=(float, float),
        help="Scale and offset that training applied to pixels. The uint8 inputs are then pixels.",
    ),
    click.option("--pack-int4", is_flag=True, help="Store two weights of 4 bits in a byte."),
)
