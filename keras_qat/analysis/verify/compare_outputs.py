"""Compares the outputs of a file with the model's, end to end."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.analysis.verify.labels import Labels, read_labels
from keras_qat.analysis.verify.report import OutputReport
from keras_qat.analysis.verify.scores import score
from keras_qat.analysis.verify.signal_to_noise import decibels
from keras_qat.analysis.verify.uses import Use, is_gate, same_decisions
from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.simulate import QuantizedArray, run_examples
from keras_qat.keras2.losses import CompiledLoss
from keras_qat.keras2.readability import defines
from keras_qat.tflite.interpreter import FileInterpreter, dequantize
from keras_qat.training.first_batch import get_first_batch
from keras_qat.training.steps.custom_training import PREDICTION

Rows = np.ndarray | slice
"""Indices of some examples, or the slice of all."""


def compare_outputs(
    graph: ResolvedGraph,
    file: FileInterpreter,
    codes: dict[str, np.ndarray],
    expected: list[np.ndarray],
    exact: list[np.ndarray],
    rows: Rows,
    examples: int,
    labels: list[np.ndarray | None],
    uses: list[Use],
    losses: list[CompiledLoss | None],
    inputs: list[np.ndarray],
) -> list[OutputReport]:
    """Compares what the file returned with what the model predicted, output by output.

    Args:
        graph: the model's resolved graph.
        file: the file.
        codes: what the file returned for each output, by name.
        expected: what the model predicted, in the order of its outputs.
        exact: what the model computes in float, in the same order, of `rows`.
        rows: the examples that were computed in float.
        examples: how many examples to compare; the rest fills up the last batch.
        labels: what `labels_of` returned.
        uses: what each output is used for.
        losses: what each output was compiled with.
        inputs: an array for each input.
    """
    arrays = [x[:examples] for x in inputs]
    return [
        _compare(
            name,
            values[:examples],
            in_float[:examples],
            rows,
            codes[name][:examples],
            file.outputs[name],
            tensor.params,
            use,
            is_gate(graph, tensor),
            None if truth is None else read_labels(truth, in_float[:examples], use, loss),
            arrays,
        )
        for (name, tensor), values, in_float, truth, use, loss in zip(
            graph.outputs.items(), expected, exact, labels, uses, losses, strict=True
        )
    ]


def predictions(model: Any, x: Any, batch_size: int, verbose: int) -> list[np.ndarray]:
    """Returns the model's outputs.

    `predict` gives them, unless a user's class decodes them there. On one of several workers it
    would wait for the others.
    """
    is_worker = isinstance(model.distribute_strategy, tf.distribute.MultiWorkerMirroredStrategy)
    if not is_worker and not defines(type(model), *PREDICTION):
        if verbose:
            print("The model")
        with get_first_batch(model).paused():  # The inputs have been looked at.
            return tf.nest.flatten(model.predict(x, batch_size=batch_size, verbose=verbose))
    count = len(tf.nest.flatten(x)[0])
    batches = [
        model(tf.nest.map_structure(lambda array: array[slice_], x), training=False)  # noqa: B023
        for slice_ in (slice(at, at + batch_size) for at in range(0, count, batch_size))
    ]
    flat = [tf.nest.flatten(batch) for batch in batches]
    return [np.concatenate(parts) for parts in zip(*flat, strict=True)]


def simulated(graph: ResolvedGraph, x: Any, batch_size: int, verbose: int) -> list[np.ndarray]:
    """Returns what the integers of a graph give for its outputs, as real numbers."""
    outputs = run_examples(graph, x, graph.origin.family, batch_size, verbose).outputs
    return [part.values if isinstance(part, QuantizedArray) else part for part in outputs.values()]


def range_in_file(graph: ResolvedGraph, file: FileInterpreter) -> tuple[float, float] | None:
    """Returns the range that a file gives to an input for which the model has no quantizer."""
    for name, tensor in graph.inputs.items():
        scale, zero_point = file.inputs[name]["quantization"]
        if tensor.params is None and tensor.is_float and scale:
            limits = np.iinfo(file.inputs[name]["dtype"])
            return (limits.min - zero_point) * scale, (limits.max - zero_point) * scale
    return None


def check_match(file: FileInterpreter, graph: ResolvedGraph) -> None:
    """Raises a `ValueError` if the file's inputs or outputs are not those of the model."""
    ends = {"inputs": (file.inputs, graph.inputs), "outputs": (file.outputs, graph.outputs)}
    for end, (details, tensors) in ends.items():
        there = {
            name: tuple(int(size) for size in detail["shape_signature"][1:])
            for name, detail in details.items()
        }
        here = {
            name: tuple(-1 if size is None else size for size in tensor.shape[1:])
            for name, tensor in tensors.items()
        }
        same = there.keys() == here.keys() and all(
            len(there[name]) == len(here[name])
            and all(a == b or -1 in (a, b) for a, b in zip(there[name], here[name], strict=True))
            for name in here
        )
        if not same:
            raise ValueError(
                f"The TFLite file belongs to another model: its {end} are {there}, but the model's "
                f"are {here}. Verify the model that the file was exported from."
            )


def _compare(
    name: str,
    expected: np.ndarray,
    exact: np.ndarray,
    rows: Rows,
    codes: np.ndarray,
    detail: Any,
    params: QuantParams | None,
    use: Use,
    gates: bool,
    labels: Labels | None,
    inputs: list[np.ndarray],
) -> OutputReport:
    step = None if params is None else float(params.scale)
    if step is None and np.dtype(detail["dtype"]).kind in "iu":
        step = float(detail["quantization"][0]) or 1.0
    values = dequantize(codes, detail).astype(np.float64)
    differences = np.abs(values - expected)
    if step is None:
        differences /= float(np.ptp(expected)) / 255 or 1.0
        identical = float(np.mean(differences < 1e-3))
    else:
        # Both sides lie on whole steps: the differences are whole numbers, up to float rounding.
        differences = np.round(differences / step)
        identical = float(np.mean(differences == 0))
    agreement = float_agreement = None
    if expected.ndim > 1 and expected.shape[-1] > 1:
        classes = np.argmax(codes, -1)
        agreement = float(np.mean(classes == np.argmax(expected, -1)))
        float_agreement = float(np.mean(classes[rows] == np.argmax(exact, -1)))
    scored = None if labels is None else score(name, labels, exact, values, gates, inputs)
    return OutputReport(
        identical,
        float(differences.max()),
        float(differences.mean()),
        name,
        agreement,
        decibels(exact, values[rows]),
        float_agreement,
        None if scored is None else scored.accuracy,
        None if scored is None else scored.float_accuracy,
        len(exact) if len(exact) < len(values) else None,
        use,
        same_decisions(use, exact, values[rows], gates),
        exact.size // (exact.shape[-1] if exact.ndim > 1 and use != "decisions" else 1),
        scored,
    )
