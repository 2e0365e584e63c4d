"""Compares the outputs of a file, the quantized model and the float model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from keras_qat.analysis.verify.causes import find_float_faults, find_small_channels
from keras_qat.analysis.verify.labels import (
    Use,
    compare_decisions,
    find_use,
    interpret_labels,
    is_sigmoid,
)
from keras_qat.analysis.verify.results import OutputReport, are_alike, compute_sqnr, hardly_differs
from keras_qat.analysis.verify.scores import score_output
from keras_qat.analysis.verify.verdict import is_clearly_good
from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.integer_graph.float_inference import evaluate_all
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.pixel_inputs import Rescaling
from keras_qat.integer_graph.simulate import QuantizedArray, run_examples
from keras_qat.io.data import show_progress
from keras_qat.io.inputs import get_range, split_rows
from keras_qat.keras2.backend import keras
from keras_qat.keras2.losses import CompiledLoss
from keras_qat.keras2.readability import defines
from keras_qat.ops.node import Tensor
from keras_qat.ops.op import FixedRange
from keras_qat.tflite.interpreter import FileInterpreter, dequantize, to_pixels
from keras_qat.tflite.reader import Tensor as FileTensor
from keras_qat.training.recurrent import Stream
from keras_qat.training.steps.custom_training import PREDICTION

Rows = NDArray | slice
"""Selects examples: an array of indices, or `slice(None)` for all examples."""

FEW = 32
"""By default, the float model computes this many examples."""

MORE = 4
"""If the verdict is unclear, the float model computes four times as many examples."""

QUICK = 1 << 19
"""The float model computes more than `FEW` examples if these hold at most this many values."""

UNEQUAL: tuple[Use, ...] = ("signals", "values", "classes or values")
"""In these kinds of outputs, all channels are important. `find_small_channels` checks them."""

SAME_PIXEL = 1e-3
"""An input value counts as an integer pixel if it differs from one by at most this."""


def check_signature(file: FileInterpreter, graph: ResolvedGraph) -> None:
    """Raises an error if names or shapes of inputs or outputs differ between file and model."""
    ends = {"inputs": (file.inputs, graph.inputs), "outputs": (file.outputs, graph.outputs)}
    for end, (tensors_of_file, tensors) in ends.items():
        in_file = {name: tensor.shape[1:] for name, tensor in tensors_of_file.items()}
        in_model = {
            name: tuple(-1 if size is None else size for size in tensor.shape[1:])
            for name, tensor in tensors.items()
        }
        is_same = in_file.keys() == in_model.keys() and all(
            len(sizes) == len(in_model[name])
            and all(a == b or -1 in (a, b) for a, b in zip(sizes, in_model[name], strict=True))
            for name, sizes in in_file.items()
        )
        if not is_same:
            raise ValueError(
                f"The TFLite file belongs to another model: its {end} are {in_file}, but the "
                f"model's are {in_model}. Pass the model that the file was exported from."
            )


def check_rows(
    graph: ResolvedGraph, quantized: Mapping[str, NDArray], expected: Sequence[NDArray]
) -> None:
    """Raises an error if an output of the file has more or fewer rows than in the model.

    That happens if a layer returns one row per batch, and file and model use different batch sizes.
    """
    for name, computed in zip(graph.outputs, expected, strict=True):
        if quantized[name].shape[:1] != computed.shape[:1]:
            raise ValueError(
                f"'{graph.name}' computes over all examples of a batch. For the same data, "
                f"output '{name}' has {len(computed)} rows in the model and "
                f"{len(quantized[name])} in the file. Compute each example by itself, or export "
                f"with the batch size of the data."
            )


def find_input_range(graph: ResolvedGraph, file: FileInterpreter) -> tuple[float, float] | None:
    """Returns the input range that was passed to `export_tflite(input_range=...)`, or None.

    The file quantizes an input with this range if the model does not quantize its inputs.
    """
    for name, tensor in graph.inputs.items():
        in_file = file.inputs[name]
        if tensor.params is None and tensor.is_float and in_file.scale:
            return get_range(in_file.dtype, in_file.scale, in_file.zero_point)
    return None


def round_to_pixels(
    graph: ResolvedGraph,
    file: FileInterpreter,
    inputs: Mapping[str, NDArray],
    rescaled: Mapping[str, Rescaling],
) -> tuple[dict[str, NDArray], dict[str, NDArray], list[str]]:
    """Rounds inputs to integer pixels if the file has uint8 inputs, for example from a camera.

    Returns:
        `(file_inputs, model_inputs, notes)`. `file_inputs` has the pixels, and `model_inputs` the
        float values of these pixels. A note is a sentence about an input that rounding changed.
    """
    file_inputs, model_inputs, notes = dict(inputs), dict(inputs), []
    for name, tensor in file.inputs.items():
        x, rescaling = inputs[name], rescaled.get(name)
        if rescaling is None:
            rescaling = _find_rescaling(graph.inputs[name].params, tensor)
        if rescaling is None or (x.dtype == np.uint8 and name not in rescaled):
            continue
        scale, offset = (np.asarray(values, np.float64) for values in rescaling)
        file_inputs[name], changes = np.empty(x.shape, np.uint8), 0
        for rows in split_rows(x):
            file_inputs[name][rows] = pixels = to_pixels(x[rows], scale, offset)
            rounded = pixels * scale + offset
            is_changed = (np.abs(x[rows] - rounded) > SAME_PIXEL * np.abs(scale)) & (scale != 0)
            if is_changed.any() and not changes:
                model_inputs[name] = x.astype(np.float32)
            if is_changed.any():
                np.copyto(model_inputs[name][rows], rounded, "same_kind", is_changed)
            changes += int(np.count_nonzero(is_changed))
        if changes:
            notes.append(
                f"Input '{name}' of the file accepts integer pixels, but {changes / x.size:.0%} "
                f"of the values are fractions of a pixel or outside 0 to 255. The file and the "
                f"model both received the nearest pixels."
            )
    return file_inputs, model_inputs, notes


def _find_rescaling(params: QuantParams | None, tensor: FileTensor) -> Rescaling | None:
    """Return scale and offset that convert pixels of the file to the model's inputs.

    Return None if the file's input is not uint8. Also if file and model have equal scales.
    """
    if tensor.dtype != np.uint8 or not tensor.scale or params is None:
        return None
    is_same = np.float32(params.scale) == np.float32(tensor.scale)
    return None if is_same else (tensor.scale, -tensor.zero_point * tensor.scale)


def predict(model: keras.Model, x: Any, batch_size: int, verbose: int) -> list[NDArray]:
    """Returns the outputs that `model.predict` returns.

    If a subclass overrides `predict`, the model is called directly. The same holds in multi-worker
    training, where `predict` would wait for the other workers.
    """
    inference = getattr(model, "exact_inference", lambda: None)()
    is_worker = isinstance(model.distribute_strategy, tf.distribute.MultiWorkerMirroredStrategy)
    compute: Callable[[Any], Any] = functools.partial(model, training=False)
    if inference is not None and inference.settle_if_exact():
        compute = inference.compute_settled
    elif not is_worker and not defines(type(model), *PREDICTION):
        if verbose:
            print("The model")
        return tf.nest.flatten(model.predict(x, batch_size=batch_size, verbose=verbose))
    outputs = []
    starts = range(0, len(tf.nest.flatten(x)[0]), batch_size)
    for start in show_progress(starts, "The model", verbose):
        rows = slice(start, start + batch_size)
        batch = tf.nest.map_structure(lambda array, rows=rows: array[rows], x)
        outputs.append(tf.nest.flatten(compute(batch)))
    return [np.concatenate(batches) for batches in zip(*outputs, strict=True)]


def simulate_values(graph: ResolvedGraph, x: Any, batch_size: int, verbose: int) -> list[NDArray]:
    """Returns the outputs of `keras_qat.simulate`, as float values."""
    outputs = run_examples(graph, x, graph.origin.family, batch_size, verbose).outputs
    return [y.values if isinstance(y, QuantizedArray) else y for y in outputs.values()]


class OutputFigures(NamedTuple):
    """Reports of all outputs, and results of `find_float_faults` and `find_small_channels`."""

    outputs: tuple[OutputReport, ...]
    faults: list[str]
    small_channels: list[str]


@dataclasses.dataclass(frozen=True)
class OutputComparison:
    """Compares the outputs of a file, the quantized model and the float model.

    Args:
        evaluate: function that computes the outputs of the float model for a batch of inputs.
        graph: the quantized model as a graph of integer operators.
        file: the TFLite file.
        inputs: an array for each input, padded to full batches.
        quantized: the file's outputs by name.
        expected: the quantized model's outputs, in order.
        examples: number of examples without padding.
        labels: an array of labels for each output, or None, from `match_labels`.
        losses: the loss of each output in `model.compile`, or None.
    """

    evaluate: Callable[..., list[NDArray]]
    graph: ResolvedGraph
    file: FileInterpreter
    inputs: list[NDArray]
    quantized: Mapping[str, NDArray]
    expected: list[NDArray]
    examples: int
    labels: list[NDArray | None]
    losses: list[CompiledLoss | None]

    def compare(self, count: int | None) -> OutputFigures:
        """Compares all outputs. `count` is the argument `float_examples` of `verify`."""
        rows_in_batch = len(self.inputs[0])
        quick = QUICK * rows_in_batch // sum(x.size for x in self.inputs)
        count = min(count or max(FEW, quick), self.examples)
        has_labels = any(labels is not None for labels in self.labels)
        needs_all = has_labels or bool(self.graph.origin.fixed_batch)
        has_other_rows = any(len(y) != rows_in_batch for y in self.expected)
        if needs_all or count == self.examples or has_other_rows:
            return self._compare_rows(self._compute_in_float(slice(None)), slice(None))
        some = _spread(count, self.examples)
        exact = self._compute_in_float(some)
        result = self._compare_rows(exact, some)
        has_problem = result.faults or result.small_channels
        if not has_problem and all(map(is_clearly_good, result.outputs)):
            return result
        others = np.setdiff1d(np.arange(self.examples), some)
        rest = others[_spread(min((MORE - 1) * count, len(others)), len(others))]
        both = zip(exact, self._compute_in_float(rest), strict=True)
        return self._compare_rows(list(map(np.concatenate, both)), np.concatenate([some, rest]))

    def _compute_in_float(self, rows: Rows) -> list[NDArray]:
        origin = self.graph.origin
        with Stream(origin.states):
            inputs = [x[rows] for x in self.inputs]
            return evaluate_all(self.evaluate, origin.calls, inputs, origin.fixed_batch)

    def _compare_rows(self, exact: list[NDArray], rows: Rows) -> OutputFigures:
        """Compare all outputs. `exact` holds the float model's outputs for the examples `rows`."""
        graph, inputs = self.graph, [x[rows] for x in self.inputs]
        outputs = [
            self._compare_output(i, name, exact[i], rows) for i, name in enumerate(graph.outputs)
        ]
        values = zip(graph.outputs, exact, self.expected, outputs, strict=True)
        candidates = [
            (name, y, expected[rows])
            for name, y, expected, output in values
            if output.score is None and output.use in UNEQUAL
        ]
        faults = find_float_faults(graph.origin.calls, inputs, exact)
        return OutputFigures(tuple(outputs), faults, find_small_channels(candidates))

    def _compare_output(self, index: int, name: str, exact: NDArray, rows: Rows) -> OutputReport:
        tensor, in_file = self.graph.outputs[name], self.file.outputs[name]
        has_sigmoid, inputs = is_sigmoid(self.graph, tensor), [x[rows] for x in self.inputs]
        use = find_use(exact, self.losses[index], has_sigmoid, inputs)
        is_telling = self._is_telling(tensor, exact, inputs)
        expected, exact = self.expected[index][: self.examples], exact[: self.examples]
        quantized, labels = self.quantized[name][: self.examples], self.labels[index]
        step = None if tensor.params is None else float(tensor.params.scale)
        if step is None and in_file.dtype.kind in "iu":
            step = in_file.scale or 1.0
        values = dequantize(quantized, in_file.scale, in_file.zero_point)
        agreement = float_agreement = None
        if expected.ndim > 1 and expected.shape[-1] > 1:
            classes = np.argmax(quantized, -1)
            agreement = float(np.mean(classes == np.argmax(expected, -1)))
            float_agreement = float(np.mean(classes[rows] == np.argmax(exact, -1)))
        score = None
        if labels is not None:
            meaning = interpret_labels(labels, exact, use, self.losses[index])
            all_inputs = [x[: self.examples] for x in self.inputs]
            score = score_output(name, meaning, exact, values, has_sigmoid, all_inputs)
        return OutputReport(
            *_compare_values(values, expected, step),
            name,
            agreement,
            compute_sqnr(exact, values[rows]) if is_telling else None,
            float_agreement,
            None if score is None else score.accuracy,
            None if score is None else score.float_accuracy,
            len(exact) if len(exact) < len(values) else None,
            use,
            compare_decisions(use, exact, values[rows], has_sigmoid),
            exact.size // (exact.shape[-1] if exact.ndim > 1 and use != "decisions" else 1),
            score,
        )

    def _is_telling(self, tensor: Tensor, exact: NDArray, inputs: list[NDArray]) -> bool:
        """Return True if the SQNR of an output is meaningful.

        If all examples have nearly the same output, even good quantization has a low SQNR. For
        example, all inputs may be alike, or all probabilities may be close to 0.
        """
        if tensor.params is None or not hardly_differs(exact, float(tensor.params.scale)):
            return True
        makers = [node.op for node in self.graph.nodes if tensor in node.outputs]
        has_fixed_range = any(op is not None and isinstance(op.output, FixedRange) for op in makers)
        return not has_fixed_range and not are_alike(inputs)


def _compare_values(
    values: NDArray, expected: NDArray, step: float | None
) -> tuple[float, float, float]:
    """Return the share of identical values, and the largest and mean differences in steps (LSB)."""
    same, largest, total = 0, 0.0, 0.0
    is_rounded, step = step is not None, step or float(np.ptp(expected)) / 255 or 1.0
    for rows in split_rows(expected):
        differences = np.abs(values[rows].astype(np.float64) - expected[rows]) / step
        if is_rounded:  # Removes float rounding: both are multiples of the step.
            differences = np.round(differences)
        same += int(np.count_nonzero(differences < 1e-3))
        # NaN is the largest difference.
        largest = float(np.max([largest, differences.max(initial=0)]))
        total += float(differences.sum())
    return same / expected.size, largest, total / expected.size


def _spread(count: int, examples: int) -> NDArray:
    """Return `count` evenly spaced indices from 0 to `examples - 1`."""
    return np.linspace(0, examples - 1, count).astype(int)
