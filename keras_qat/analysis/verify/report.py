"""The report of `verify`: its data, and its table as text."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import textwrap
from collections.abc import Iterable
from pathlib import Path

from keras_qat.analysis.verify.model_explorer import show_in_model_explorer, write_node_data
from keras_qat.analysis.verify.results import OutputReport, TensorReport, format_share, join_names
from keras_qat.analysis.verify.verdict import Verdict

PACKED = (
    "The file packs weights in 4 bits, and kernels for packed weights round differently from "
    "model.predict. The file was therefore compared with keras_qat.simulate(model, x, "
    "pack_int4=True). Set model.pack_int4 = True to make predict and evaluate match the file."
)

REFUSED = (
    "TFLite Micro, which emulates the target, cannot run this file ({}). {} ran it with its "
    "{kernels} kernels instead. The file was compared with keras_qat.simulate(model, x, "
    "kernels='{kernels}'), because model.predict rounds like TFLite Micro."
)


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of `verify`. Prints as a table.

    Args:
        examples: number of examples that were run.
        kernels: the kernels that ran the file.
        outputs: a report for each output.
        verdict: whether file and model agree, and whether the model is good.
        tensors: a report for each layer's output, in the order of computation. It is empty without
            `per_layer`.
        merged: layers without a separate output in the file, for example a Conv2D that is fused
            with the ReLU after it. If there are many, the file may belong to another model.
        float_operations: maps each layer that the file computes in float to its operators.
        notes: reasons for large differences between file and model, such as other weights.
        arena_size: bytes of TFLite Micro's arena that stay in use on this computer. TFLite Micro
            needs more during start-up, and less on 32-bit chips. None with other kernels.
        runtime: the interpreter that ran the file, with its version.
        packs_int4: whether the file was compared with `simulate(pack_int4=True)` instead of
            `model.predict`.
        refused: for Ethos-U targets: operators of the file that TFLite Micro lacks, or "". If there
            are any, TFLite ran the file instead. The file was then compared with
            `simulate(kernels=...)` instead of `model.predict`.
    """

    examples: int
    kernels: str
    outputs: tuple[OutputReport, ...]
    verdict: Verdict
    tensors: tuple[TensorReport, ...] = ()
    merged: tuple[str, ...] = ()
    float_operations: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    arena_size: int | None = None
    runtime: str = ""
    packs_int4: bool = False
    refused: str = ""

    @property
    def identical(self) -> float:
        """Share of values that are identical in file and model, 0 to 1, in the worst output."""
        return min(output.identical for output in self.outputs)

    @property
    def is_good(self) -> bool:
        """Whether file and model agree and the model is good, according to the verdict."""
        return self.verdict.is_good

    @property
    def accuracy(self) -> float | None:
        """The file's accuracy, 0 to 1, in the worst output. None without labels."""
        return _find_least(output.accuracy for output in self.outputs)

    @property
    def max_difference(self) -> float:
        """The largest difference between file and model in any output, in LSB."""
        return max(output.max_difference for output in self.outputs)

    @property
    def agreement(self) -> float | None:
        """Share of rows with the same argmax in the file and the float model, in the worst output.

        None if each output has only one channel.
        """
        return _find_least(output.float_argmax_agreement for output in self.outputs)

    @property
    def differing(self) -> tuple[TensorReport, ...]:
        """Tensors that differ between file and model even if each layer of the file runs alone."""
        return tuple(tensor for tensor in self.tensors if not tensor.agrees)

    @property
    def unexplained(self) -> tuple[TensorReport, ...]:
        """The tensors of `differing` with differences that rounding does not explain."""
        return tuple(tensor for tensor in self.differing if tensor.simulated != 1)

    @property
    def other_ranges(self) -> tuple[TensorReport, ...]:
        """The tensors with another scale or zero point in the file than in the model."""
        return tuple(tensor for tensor in self.tensors if not tensor.same_range)

    def to_dict(self) -> dict[str, object]:
        """Returns the report as JSON data."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """Returns the report as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def to_model_explorer(
        self, folder: str | os.PathLike[str], show: str | os.PathLike[str] | None = None
    ) -> list[Path]:
        """Writes each layer's figures to files that Model Explorer shows on the graph of the model.

        There are four files: the share of identical values, the SQNR against the float model, the
        range and the bits. Model Explorer loads them with "Add per-node data".

        Args:
            folder: where to write the files. It is created if it does not exist.
            show: path of the TFLite file, to open the file in Model Explorer with these figures.
                The call then returns when the server is stopped (Ctrl+C).

        Returns:
            The paths of the files.

        Raises:
            ValueError: if the report was made without `per_layer=True`.
            ImportError: for `show` without the package `ai-edge-model-explorer`.

        Example:
            >>> report = keras_qat.verify(qat, "model.tflite", x, per_layer=True)
            >>> report.to_model_explorer("figures", show="model.tflite")
        """
        paths = write_node_data(self.tensors, Path(folder))
        if show is not None:
            show_in_model_explorer(show, paths)
        return paths

    def findings(self) -> list[str]:
        """Returns one sentence for each kind of problem, such as differing ranges."""
        rounding = [tensor for tensor in self.differing if tensor not in self.unexplained]
        sentences = {
            "Ranges differ between the file and the model": [
                tensor.name for tensor in self.other_ranges
            ],
            "Computed in float": [f"{name} ({k})" for name, k in self.float_operations.items()],
            "These kernels round differently from the model, exactly as keras_qat.simulate does": [
                f"{tensor.name} ({tensor.kernel_names})" for tensor in rounding
            ],
            "With identical inputs, over 0.1 % of values differ, or one differs by over 1 LSB": [
                f"{tensor.name} ({tensor.kernel_names})" for tensor in self.unexplained
            ],
        }
        about_layers = [
            f"{text}: {join_names(names)}." for text, names in sentences.items() if names
        ]
        if self.refused:
            about_kernels = [REFUSED.format(self.refused, self.runtime, kernels=self.kernels)]
        else:
            about_kernels = [PACKED] if self.packs_int4 else []
        return [*self.notes, *about_kernels, *about_layers]

    def table(self, width: int = 80) -> str:
        """Formats the report as text. Wider tables have room for longer names.

        Args:
            width: the columns of the text, at least 80.
        """
        width = max(width, 80)
        arena = "" if self.arena_size is None else f", arena {self.arena_size} bytes"
        lines = [
            f"TFLite ({self.kernels} kernels{arena}) against the model on {self.examples} examples",
            f"{'output':<18} {'identical outputs':>18} {'largest diff.':>14} {'mean diff.':>12} "
            f"{'same argmax':>12}",
        ]
        for output in self.outputs:
            argmax = "-" if output.argmax_agreement is None else f"{output.argmax_agreement:.2%}"
            lines.append(
                f"{_shorten(output.name, 18):<18} {output.identical:>18.3%} "
                f"{output.max_difference:>10.3g} LSB {output.mean_difference:>8.2g} LSB "
                f"{argmax:>12}"
            )
        sentences = self.findings()
        if self.tensors:
            lines += ["", *_format_tensors(self.tensors, width - 58), ""]
            if self.merged:
                merged = f"Merged with other layers in the file: {join_names(self.merged)}."
                sentences.insert(0, merged)
        sentences += filter(None, (output.against_float() for output in self.outputs))
        for sentence in [*sentences, str(self.verdict)]:
            lines += textwrap.wrap(sentence, width, subsequent_indent="  ")
        if self.runtime and self.identical < 1:
            lines.append(f"Run by {self.runtime}.")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table(shutil.get_terminal_size((80, 24)).columns)


def _format_tensors(tensors: Iterable[TensorReport], width: int) -> Iterable[str]:
    """Yield the lines of a table of tensors. `width` is the width of the first column."""
    yield f"{'':<{width + 17}}  {'fed':>12} {'free run':>13} {'at':>5} {'SQNR':>5}"
    yield (
        f"{'layer':<{width}} {'kernel':<17} {'same':>8} {'LSB':>4} {'same':>8} {'LSB':>4} "
        f"{'ends':>5} {'dB':>5}"
    )
    for tensor in tensors:
        fed = "" if tensor.fed is None else format_share(tensor.fed.identical)
        off = "" if tensor.fed is None else f"{tensor.fed.max_difference:.0f}"
        sqnr = "-" if tensor.sqnr is None else f"{tensor.sqnr:.1f}"
        yield (
            f"{_shorten(tensor.name, width):<{width}} {_shorten(tensor.kernel_names, 17):<17} "
            f"{fed:>8} {off:>4} {format_share(tensor.run.identical):>8} "
            f"{tensor.run.max_difference:>4.0f} {tensor.at_ends:>5.1%} {sqnr:>5}"
        )


def _shorten(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    return f"{text[: (length - 1) // 2]}…{text[len(text) - length // 2 :]}"


def _find_least(shares: Iterable[float | None]) -> float | None:
    return min((share for share in shares if share is not None), default=None)
