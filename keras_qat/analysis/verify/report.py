"""The report of `verify`: data, and a table of it."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

from keras_qat.analysis.verify.report_text import kernel_names, listed, report_text
from keras_qat.analysis.verify.scores import Score
from keras_qat.analysis.verify.uses import Use
from keras_qat.analysis.verify.verdict import Verdict
from keras_qat.io.atomic_files import saving_to, write_contents
from keras_qat.training.calibration.lost_values import Outliers

SAME = 0.999
"""Share of identical codes above which a layer counts as computing what was trained. Values next to
the middle between two codes make the rest."""


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
class Agreement:
    """Comparison of the quantized values of one tensor.

    Args:
        identical: share of equal codes, 0 to 1.
        max_difference: the largest difference, in steps (LSB) of the tensor.
        mean_difference: the mean absolute difference, in LSB.
    """

    identical: float
    max_difference: float
    mean_difference: float


@dataclasses.dataclass(frozen=True)
class OutputReport(Agreement):
    """Comparison of one output of the file with the model's: an `Agreement`, and more.

    Args:
        name: the output's name in the model.
        argmax_agreement: share of examples with the same largest entry along the last axis;
            None if that has one entry.
        float_sqnr: signal of the model in float, with its weights unquantized, to the file's
            deviation from it, in dB, at most 150. The signal is the variance over the examples;
            None if they do not tell: they hardly differ, or all probabilities are nearly the same.
        float_argmax_agreement: as `argmax_agreement`, of the file and the model in float.
        accuracy: share of the labels that the file's classes are; None without labels, and for
            targets that are no classes.
        float_accuracy: the same of the model in float.
        float_examples: how many examples `float_sqnr` and `float_argmax_agreement` are of; None for
            all of them.
        use: what the output is used for: "classes", "decisions" (of yes and no), "signals" (as the
            input), "values", "embeddings", or "classes or values" if nothing tells.
        same_decisions: share of classes, decisions or nearest neighbours that are those of the
            model in float. Where decisions are rare, the share of the rare ones. None if there are
            none, or all are the same.
        decisions: how many decisions that share is of.
        score: how well file and float meet the labels; None without labels.
    """

    name: str
    argmax_agreement: float | None
    float_sqnr: float | None = None
    float_argmax_agreement: float | None = None
    accuracy: float | None = None
    float_accuracy: float | None = None
    float_examples: int | None = None
    use: Use = "values"
    same_decisions: float | None = None
    decisions: int = 0
    score: Score | None = None

    def against_float(self) -> str:
        """Says in a sentence what quantization costs on the examples."""
        classes, sqnr = self.float_argmax_agreement, self.float_sqnr
        figures = [] if classes is None else [f"same argmax in {classes:.2%} of rows"]
        figures += [] if sqnr is None else [f"SQNR {sqnr:.1f} dB"]
        if self.accuracy is not None and self.float_accuracy is not None:
            figures.append(f"accuracy {self.accuracy:.2%}, in float {self.float_accuracy:.2%}")
        if self.score is not None and self.score.measure != "accuracy":
            figures.append(str(self.score))
        count = self.float_examples
        sample = "" if count is None else f" on {count} examples (set float_examples for more)"
        sentence = f"{self.name} against the float model{sample}: {', '.join(figures)}."
        return sentence * bool(figures)


@dataclasses.dataclass(frozen=True)
class TensorReport:
    """Comparison of one tensor of the file with the model's.

    Args:
        name: the layer of the float model that computes it (and the number of the call, from the
            second on); if layers are merged, the one with the weights.
        layers: all layers that compute it from the tensors before it in the report.
        kernels: the file's operations that do so; none for an input.
        fed: with these operations fed the simulation's own codes, so that no earlier difference
            counts; None for an input.
        run: in a free run of the file.
        simulated: share of the free run's codes that `keras_qat.simulate` gives for these kernels,
            in the first examples. With all of them it is rounding that makes the difference to
            the model, and no error. None with the optimized kernels, and for what is in float.
        scale: real value of one step in the model; None if only the file quantizes the tensor.
        zero_point: the code of 0 in the model, counted as int8 or int16.
        file_scale, file_zero_point: the scale and zero point of the file.
        scale_ulps: distance of the scales in units of the last place of float32.
        same_range: whether the zero points are equal and the scales but for rounding.
        at_lowest, at_highest: share of the file's codes at either end of the range. Behind a ReLU
            the lowest code is zero, and no sign of clipping.
        sqnr: signal to quantization noise of the file's free run, in dB, against the model in
            float with its weights unquantized. None for a tensor that is the same for all examples.
        tensor: the tensor's name in the file.
        bits: the bits of its quantized values.
        reads: names of the tensors that it is computed from.
        range: the smallest and the largest value that the file's codes stand for.
        float_range: the smallest and the largest value of the model in float.
        spread: standard deviation of an entry over the examples, in float.
        clipped: share of the values in float that lie beyond the range.
        far: values in float that take up most of the range, far outside of all others; None if
            there are none.
    """

    name: str
    layers: tuple[str, ...]
    kernels: tuple[str, ...]
    fed: Agreement | None
    run: Agreement
    simulated: float | None
    scale: float | None
    zero_point: int | None
    file_scale: float
    file_zero_point: int
    scale_ulps: int | None
    same_range: bool
    at_lowest: float
    at_highest: float
    sqnr: float | None
    tensor: str
    bits: int
    reads: tuple[str, ...]
    range: tuple[float, float]
    float_range: tuple[float, float]
    spread: float
    clipped: float
    far: Outliers | None = None

    @property
    def agrees(self) -> bool:
        """Whether the operations compute what was trained: 99.9 % the same, never 2 LSB off."""
        if self.fed is None:
            return self.run.identical == 1
        return self.fed.identical >= SAME and self.fed.max_difference <= 1

    @property
    def is_faulty(self) -> bool:
        """Whether neither the model nor the kernels' way of rounding explains the file's codes."""
        return not self.agrees and self.simulated not in (1, None)

    @property
    def range_used(self) -> float:
        """The part of the range that the values in float take up, 0 to 1."""
        (low, high), (lowest, highest) = self.range, self.float_range
        return max(min(high, highest) - max(low, lowest), 0.0) / (high - low)

    @property
    def at_ends(self) -> float:
        """Share of the codes that may be clipped; the zeros of a ReLU are not counted."""
        return self.at_highest + (self.at_lowest if self.file_zero_point > -128 else 0.0)


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of `verify`. Prints as a table.

    Args:
        examples: how many examples were run.
        kernels: which kernels computed the file.
        outputs: one report for each output.
        verdict: whether the file is the same as the model, and whether the model is good.
        tensors: one report for each tensor that both sides have, in order of computation; empty
            without `per_layer`.
        merged: layers whose quantized result is no tensor of the file: one operation computes them
            together with the next, or the same tensor is another layer's. If there are many, the
            file is of another model.
        float_operations: layer -> what the file computes there in float, with or without
            `per_layer`.
        notes: why model and file may differ whatever the arithmetic is, a sentence each.
        arena_size: with TFLite Micro, the bytes of its arena that it keeps on this computer (more
            for a moment when it starts, less on chips of 32 bits). None with other kernels.
        runtime: whose interpreter ran the file, with its version.
        packs_int4: whether the file was compared with the model's integers for weights packed in 4
            bits, and not with `model.predict`.
        refused: the operators for which TFLite Micro, which stands for the target, can't run the
            file. `kernels` and `runtime` then are what ran it instead, and it was compared with
            `simulate(kernels=...)` of these, not with `model.predict`.
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
        """The lowest share of identical codes of all outputs, 0 to 1."""
        return min(output.identical for output in self.outputs)

    @property
    def is_good(self) -> bool:
        """Whether the file computes what the model computes, and that is good: the verdict."""
        return self.verdict.is_good

    @property
    def accuracy(self) -> float | None:
        """The lowest share of examples whose class is the label's, 0 to 1; None without labels."""
        shares = [output.accuracy for output in self.outputs]
        return min((share for share in shares if share is not None), default=None)

    @property
    def max_difference(self) -> float:
        """The largest difference of all outputs, in LSB."""
        return max(output.max_difference for output in self.outputs)

    @property
    def agreement(self) -> float | None:
        """The lowest share of rows with the same argmax as the model in float, 0 to 1.

        None if no output has more than one class.
        """
        shares = [output.float_argmax_agreement for output in self.outputs]
        return min((part for part in shares if part is not None), default=None)

    @property
    def differing(self) -> tuple[TensorReport, ...]:
        """The tensors whose own operations do not compute what was trained."""
        return tuple(tensor for tensor in self.tensors if not tensor.agrees)

    @property
    def unexplained(self) -> tuple[TensorReport, ...]:
        """The differing tensors that the kernels' way of rounding does not explain."""
        return tuple(tensor for tensor in self.differing if tensor.simulated != 1)

    @property
    def other_ranges(self) -> tuple[TensorReport, ...]:
        """The tensors that have another range in the file than in the model."""
        return tuple(tensor for tensor in self.tensors if not tensor.same_range)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON data."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """Returns the report as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draws the layers as bars: identical codes, codes at the ends, quantization noise.

        Args:
            path: where to write the picture (.png, .svg, .pdf), or None.

        Returns:
            The `matplotlib` figure.

        Raises:
            ValueError: if the report was made without `per_layer=True`.
            ImportError: without matplotlib, which the extra `keras-qat[plot]` installs.
        """
        from keras_qat.analysis.verify.plot import draw

        figure = draw(self)
        if path is not None:
            with saving_to(path, ("",)) as file:
                figure.savefig(file)
        return figure

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Writes the report as one HTML page, which needs no other file and no network.

        A click on the head of a column sorts a table. With `per_layer=True` there is a row with
        bars for each layer.

        Args:
            path: where to write the page, or None.

        Returns:
            The page.

        Raises:
            OSError: if nothing can be written there.

        Example:
            >>> keras_qat.verify(qat, "model.tflite", x, per_layer=True).to_html("report.html")
        """
        from keras_qat.analysis.verify.html import report_page

        return write_contents(report_page(self), path)

    def to_model_explorer(
        self,
        folder: str | os.PathLike[str],
        show: str | os.PathLike[str] | None = None,
    ) -> list[Path]:
        """Writes files with which Model Explorer shows each layer's figures on the TFLite graph.

        There is one file each for the share of identical quantized values, the signal to noise
        against the model in float, the range and the bits. Model Explorer loads them with "Add
        per-node data".

        Args:
            folder: where to write the files; made if it does not exist.
            show: path of the TFLite file, to open it in Model Explorer with these figures. That
                waits until its server is stopped (Ctrl+C).

        Returns:
            The paths of the files.

        Raises:
            ValueError: if the report was made without `per_layer=True`.
            ImportError: for `show` without the package `ai-edge-model-explorer`.

        Example:
            >>> report = keras_qat.verify(qat, "model.tflite", x, per_layer=True)
            >>> report.to_model_explorer("figures", show="model.tflite")
        """
        from keras_qat.analysis.verify.model_explorer import open_file, write_node_data

        paths = write_node_data(self, Path(folder))
        if show is not None:
            open_file(show, paths)
        return paths

    def findings(self) -> list[str]:
        """Lists what is not as it should be, a sentence each."""
        rounding = [tensor for tensor in self.differing if tensor not in self.unexplained]
        sentences = {
            "Ranges differ between the file and the model": [
                tensor.name for tensor in self.other_ranges
            ],
            "Computed in float": [f"{name} ({k})" for name, k in self.float_operations.items()],
            "These kernels round differently from the model, exactly as keras_qat.simulate does": [
                f"{tensor.name} ({kernel_names(tensor)})" for tensor in rounding
            ],
            "With identical inputs, more than 0.1 % of the values differ, or one by over 1 LSB": [
                f"{tensor.name} ({kernel_names(tensor)})" for tensor in self.unexplained
            ],
        }
        about_layers = [f"{text}: {listed(names)}." for text, names in sentences.items() if names]
        if self.refused:
            of_kernels = [REFUSED.format(self.refused, self.runtime, kernels=self.kernels)]
        else:
            of_kernels = [PACKED] if self.packs_int4 else []
        return [*self.notes, *of_kernels, *about_layers]

    def table(self, width: int = 80) -> str:
        """Writes the report as text. More columns show longer names.

        Args:
            width: the columns of the text, 80 at least.
        """
        return report_text(self, max(width, 80))

    def __str__(self) -> str:
        return self.table(shutil.get_terminal_size((80, 24)).columns)
