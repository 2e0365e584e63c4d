"""Verification: does the exported file compute what training simulated?"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat import fake_quant
from keras_qat import graph as graph_lib
from keras_qat.graph import values_in
from keras_qat.interpreter import TFLiteModel, to_values
from keras_qat.patterns import RANGE_KEEPING, kind_of
from keras_qat.schedule import is_quantized

__all__ = ["OutputReport", "Report", "verify"]


@dataclasses.dataclass(frozen=True)
class OutputReport:
    """How one output of the file compares with the model's.

    Args:
        name: the output's name in the model.
        identical: share of equal codes, 0 to 1.
        max_difference: the largest difference, in steps (LSB) of the output.
        mean_difference: the mean absolute difference, in LSB.
        argmax_agreement: share of examples with the same largest entry along the last axis;
            None if that has one entry.
    """

    name: str
    identical: float
    max_difference: float
    mean_difference: float
    argmax_agreement: float | None


@dataclasses.dataclass(frozen=True)
class Report:
    """What `verify` found. Prints as a table.

    Args:
        examples: how many examples were run.
        outputs: one report for each output.
    """

    examples: int
    outputs: tuple[OutputReport, ...]

    @property
    def identical(self) -> float:
        """The lowest share of identical codes of all outputs, 0 to 1."""
        return min(each.identical for each in self.outputs)

    @property
    def max_difference(self) -> float:
        """The largest difference of all outputs, in LSB."""
        return max(each.max_difference for each in self.outputs)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON data."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [
            f"TFLite against the model on {self.examples} examples",
            f"{'output':<20} {'codes identical':>16} {'largest diff.':>14} {'mean diff.':>12} "
            f"{'same argmax':>12}",
        ]
        for each in self.outputs:
            argmax = "-" if each.argmax_agreement is None else f"{each.argmax_agreement:.2%}"
            lines.append(
                f"{each.name:<20} {each.identical:>16.3%} {each.max_difference:>10.3g} LSB "
                f"{each.mean_difference:>8.2g} LSB {argmax:>12}"
            )
        return "\n".join(lines)


def verify(
    model: Any,
    tflite: str | os.PathLike[str] | bytes,
    x: Any,
    *,
    xnnpack: bool = True,
    batch_size: int = 32,
) -> Report:
    """Runs the quantization-aware model and its TFLite file on `x` and compares the outputs.

    Args:
        model: the model the file was exported from.
        tflite: path or contents of the file.
        x: inputs, as `model.predict` takes them: an array, or a list or dict of arrays.
        xnnpack: whether to run the file with XNNPACK (as phones do) or TFLite's own kernels.
        batch_size: how many examples to run at a time.

    Returns:
        A report that prints as a table.

    Raises:
        ValueError: if the model is not quantized, or the file is not one of this model.

    Example:
        >>> print(keras_qat.verify(qat, "model.tflite", x_test))
    """
    if not is_quantized(model):
        raise ValueError(f"'{model.name}' is not quantization-aware: verify what was exported.")
    file = TFLiteModel(tflite, xnnpack)
    inputs = {
        name: np.asarray(each)
        for name, each in zip(model.input_names, model._flatten_to_reference_inputs(x), strict=True)
    }
    _check_match(file, model)
    codes = file.run(inputs, batch_size)
    expected = tf.nest.flatten(model.predict(x, batch_size=batch_size, verbose=0))
    reports = [
        _compare(name, values, codes[name], file.outputs[name], step)
        for name, values, step in zip(
            model.output_names, expected, _output_steps(model), strict=True
        )
    ]
    return Report(len(next(iter(inputs.values()))), tuple(reports))


def _check_match(file: TFLiteModel, model: Any) -> None:
    """Raises a `ValueError` if the file's inputs or outputs are not those of the model."""
    ends = {
        "inputs": (file.inputs, model.input_names, model.inputs),
        "outputs": (file.outputs, model.output_names, model.outputs),
    }
    for end, (details, names, tensors) in ends.items():
        there = {
            name: tuple(int(size) for size in each["shape_signature"][1:])
            for name, each in details.items()
        }
        here = {
            name: tuple(-1 if size is None else size for size in tensor.shape[1:])
            for name, tensor in zip(names, tensors, strict=True)
        }
        same = there.keys() == here.keys() and all(
            len(there[name]) == len(here[name])
            and all(a == b or -1 in (a, b) for a, b in zip(there[name], here[name], strict=True))
            for name in here
        )
        if not same:
            raise ValueError(
                f"The TFLite file belongs to another model: its {end} are {there}, the model's "
                f"are {here}. Verify the model that the file was exported from."
            )


def _output_steps(model: Any) -> list[float | None]:
    """The step (LSB) of each output, None for one that is not quantized."""
    steps: list[float | None] = []
    for value in values_in(graph_lib.read(model).outputs):
        quantizer = None
        while quantizer is None and value.producer is not None:
            layer = value.producer.layer
            quantizer = getattr(layer, "quantizer", getattr(layer, "output_quantizer", None))
            if kind_of(value.producer) not in RANGE_KEEPING:
                break
            value = value.producer.inputs[0]
        if quantizer is None:
            steps.append(None)
            continue
        minimum, maximum = quantizer.current_range()
        steps.append(fake_quant.scale_of(minimum, maximum, quantizer.spec.bits)[0])
    return steps


def _compare(
    name: str,
    expected: np.ndarray,
    codes: np.ndarray,
    detail: dict[str, Any],
    step: float | None,
) -> OutputReport:
    if step is None:
        step = float(np.ptp(expected)) / 255 or 1.0
        differences = np.abs(to_values(codes, detail) - expected) / step
        identical = float(np.mean(differences < 1e-3))
    else:
        # Both sides lie on whole steps: the differences are whole numbers, up to float rounding.
        differences = np.abs(np.round((to_values(codes, detail) - expected) / step))
        identical = float(np.mean(differences == 0))
    agreement = None
    if expected.ndim > 1 and expected.shape[-1] > 1:
        agreement = float(np.mean(np.argmax(codes, -1) == np.argmax(expected, -1)))
    return OutputReport(
        name, identical, float(differences.max()), float(differences.mean()), agreement
    )
