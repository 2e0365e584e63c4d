"""Compares the output of each layer in the model and in its TFLite file.

The file runs in two ways. In the free run, it computes all layers from the inputs. It also runs
"in pieces": each layer reads the model's values instead of the previous layer's output.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from keras_qat.analysis.verify.pairs import Pair, match_tensors
from keras_qat.analysis.verify.results import Agreement, SignalToNoise, TensorReport
from keras_qat.arithmetic.kernel_families import FAMILIES
from keras_qat.integer_graph.execute import prepare
from keras_qat.integer_graph.float_inference import count_elements, make_evaluator
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.passes import pack_int4
from keras_qat.integer_graph.simulate import run_batch
from keras_qat.io.data import show_progress
from keras_qat.tflite.interpreter import FileInterpreter, Runtime, quantize
from keras_qat.tflite.micro_interpreter import open_file
from keras_qat.tflite.reader import FileGraph, Tensor
from keras_qat.training.calibration.lost_values import find_outliers
from keras_qat.training.recurrent import Stream

SAMPLE, SAMPLED = 4096, 8
"""To find outliers, `SAMPLE` random values are kept from each of the first `SAMPLED` batches."""

MOST_VALUES = 1 << 25
"""Batches are made so small that all tensors together have at most this many values (128 MB)."""

UNTRACED = 8
"""For up to this many batches, running the float model eagerly is faster than tracing a graph."""

SIMULATED = 8
"""Number of examples for which `keras_qat.simulate` also simulates the kernels of the file."""


def compare_layers(
    resolved: ResolvedGraph,
    file: FileGraph,
    inputs: dict[str, NDArray],
    file_inputs: dict[str, NDArray],
    kernels: str,
    batch_size: int,
    runtime: Runtime | None,
    verbose: int,
    in_pieces: bool,
) -> tuple[tuple[TensorReport, ...], tuple[str, ...]]:
    """Runs model and file batch by batch, and compares their tensors.

    If `in_pieces` is False, the file is only compared with the float model, which is faster.

    Returns:
        A report for each tensor that model and file have in common, and the names of other layers.
        For example, a file has no output of a Conv2D that is fused with the ReLU after it.

    Raises:
        UnknownLayers: as in `match_tensors`.
    """
    origin = resolved.origin
    pairs, merged = match_tensors(resolved, file)
    indices = [pair.tensor.index for pair in pairs]
    interpreter = open_file(file.replace_outputs(indices), kernels, runtime, is_checked=True)
    values = [pair.value for pair in pairs]
    compute_in_float = make_evaluator(origin.calls, values, untraced_runs=UNTRACED)
    compute = _make_simulation(resolved, pairs) if in_pieces else None
    pieces: FileInterpreter | None = None
    sums = [_Sums(pair) for pair in pairs]
    float_states, model_states = (Stream(origin.states) for _ in range(2))
    if origin.fixed_batch is None and interpreter.batch_size is None:
        size = sum(count_elements(value.shape, list(inputs.values())) for value in values)
        batch_size = max(1, min(batch_size, MOST_VALUES // size))
    examples = len(next(iter(inputs.values())))
    for start in show_progress(range(0, examples, batch_size), "Layer by layer", verbose):
        rows = slice(start, start + batch_size)
        arrays = [array[rows] for array in inputs.values()]
        # Names are the indices of the file's tensors, as text.
        fed = {
            str(tensor.index): quantize(
                file_inputs[name][rows], tensor.dtype, tensor.scale, tensor.zero_point
            )
            for name, tensor in file.inputs.items()
        }
        run = fed | interpreter.run_once(fed)
        with float_states:
            exact = compute_in_float(arrays)
        for tensor_sums, y in zip(sums, map(np.asarray, exact), strict=True):
            tensor_sums.add(run[str(tensor_sums.pair.tensor.index)], y)
        if compute is None:
            continue
        with model_states:
            expected = dict(zip(map(str, indices), compute(arrays), strict=True))
        shapes = {int(index): q.shape for index, q in run.items()}
        if pieces is None and not shapes.keys().isdisjoint(file.producers):
            pieces = open_file(file.cut_at(shapes), kernels, runtime, is_checked=True)
        by_piece = {}
        if pieces is not None:
            known = fed | expected
            reshaped = {index: known[index].reshape(run[index].shape) for index in pieces.inputs}
            by_piece = pieces.run_once(reshaped)
        rounded = {} if start else _round_like_file(resolved, file, pairs, kernels, arrays)
        for tensor_sums in sums:
            index = str(tensor_sums.pair.tensor.index)
            tensor_sums.compare(expected[index], by_piece.get(index), run[index])
            if index in rounded:
                tensor_sums.compare_with_simulation(rounded[index], run[index])
    names = {pair.tensor.index: pair.name for pair in pairs}
    return tuple(tensor_sums.report(file, names) for tensor_sums in sums), merged


def _make_simulation(
    resolved: ResolvedGraph, pairs: list[Pair]
) -> Callable[[list[NDArray]], list[NDArray]]:
    """Return a function that runs the quantized model, and returns the tensors in `pairs`."""
    origin = resolved.origin
    if origin.simulates:
        simulate = make_evaluator(origin.calls, [pair.value for pair in pairs], None)
        return lambda arrays: [
            pair.tensor.quantize(np.asarray(y))
            for pair, y in zip(pairs, simulate(arrays), strict=True)
        ]
    prepared = prepare(resolved, origin.family)

    def compute(arrays: list[NDArray]) -> list[NDArray]:
        computed = run_batch(resolved, arrays, origin.family, prepared)
        return [_convert(pair.tensor, computed[pair.ours]) for pair in pairs]

    return compute


def _round_like_file(
    resolved: ResolvedGraph, file: FileGraph, pairs: list[Pair], kernels: str, arrays: list[NDArray]
) -> dict[str, NDArray]:
    """Simulate the file's kernels for the first examples. Return {} if they cannot be simulated.

    The keys of the result are the indices of the file's tensors, as text.
    """
    family, states = FAMILIES.get(kernels), resolved.origin.states
    if family is None:
        return {}
    in_file = pack_int4(resolved, family) if file.packs_int4 else resolved
    first = [array[: resolved.origin.fixed_batch or SIMULATED] for array in arrays]
    with Stream(states):
        computed = run_batch(in_file, first, family, prepare(in_file, family))
    return {str(pair.tensor.index): _convert(pair.tensor, computed[pair.ours]) for pair in pairs}


def _convert(tensor: Tensor, values: NDArray) -> NDArray:
    """Convert float or int8 values of the model to the type of a tensor in the file."""
    if values.dtype.kind == "f":
        return np.asarray(tensor.quantize(values))
    offset = 128 if tensor.dtype == np.uint8 else 0
    return (values.astype(np.int32) + offset).astype(tensor.dtype)


Figures = tuple[int, int, int, int]
"""Number of values, number of equal values, sum of differences, largest difference."""


def _compare(expected: NDArray, q: NDArray) -> Figures:
    differences = np.abs(q.astype(np.int32).ravel() - expected.astype(np.int32).ravel())
    same = differences.size - np.count_nonzero(differences)
    return differences.size, same, int(differences.sum()), int(differences.max(initial=0))


def _summarize(batches: list[Figures]) -> Agreement:
    count, same, total, _ = np.sum([(0, 0, 0, 0), *batches], 0).tolist()
    largest = max((figures[3] for figures in batches), default=0)
    return Agreement(same / (count or 1), float(largest), total / (count or 1))


class _Sums:
    """Accumulates the comparison of one tensor over all batches."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.fed: list[Figures] = []
        self.run: list[Figures] = []
        self.count = self.lowest = self.highest = self.clipped = 0
        self.float_range = np.inf, -np.inf
        self.noise = SignalToNoise()
        self.sample: list[NDArray] = []
        self.simulated: float | None = None
        limits = np.iinfo(pair.tensor.dtype)
        self.bits = pair.params.bits if pair.params is not None else limits.bits
        self.ends = int(limits.min), int(limits.min) + 2**self.bits - 1
        low, high = pair.tensor.dequantize(np.array(self.ends, pair.tensor.dtype))
        self.range = float(low), float(high)

    def add(self, run: NDArray, exact: NDArray) -> None:
        """Compare a batch of the file's free run with the float model."""
        if len(self.sample) < SAMPLED:
            drawn = np.random.default_rng(0).integers(0, exact.size, SAMPLE)
            self.sample.append(exact.ravel()[drawn])
        least, most = float(exact.min()), float(exact.max())
        self.float_range = min(self.float_range[0], least), max(self.float_range[1], most)
        (lowest, highest), (low, high), step = self.ends, self.range, self.pair.tensor.scale
        self.count += run.size
        self.lowest += int(np.count_nonzero(run <= lowest))
        self.highest += int(np.count_nonzero(run >= highest))
        if not low - step <= least <= most <= high + step:  # Also True for NaN.
            self.clipped += int(np.count_nonzero((exact < low - step) | (exact > high + step)))
        self.noise.add(exact, run, self.pair.tensor.dequantize)

    def compare(self, expected: NDArray, fed: NDArray | None, run: NDArray) -> None:
        """Compare a batch of the model with the file in pieces (`fed`) and in the free run."""
        if fed is not None:
            self.fed.append(_compare(expected, fed))
        self.run.append(_compare(expected, run))

    def compare_with_simulation(self, simulated: NDArray, run: NDArray) -> None:
        if self.pair.params is not None:
            q = simulated.ravel()
            self.simulated = float(np.mean(run.ravel()[: q.size] == q))

    def report(self, file: FileGraph, names: dict[int, str]) -> TensorReport:
        pair, count = self.pair, self.count
        known = {*names, *(tensor.index for tensor in file.inputs.values())}
        operations = file.find_operations(pair.tensor.index, known)
        read = dict.fromkeys(index for operation in operations for index in operation.inputs)
        return TensorReport(
            name=pair.name,
            layers=pair.layers,
            kernels=tuple(operation.kernel for operation in operations),
            fed=_summarize(self.fed) if self.fed else None,
            run=_summarize(self.run),
            simulated=self.simulated,
            scale=None if pair.params is None else float(pair.params.scale),
            zero_point=None if pair.params is None else int(pair.params.zero_point),
            file_scale=pair.tensor.scale,
            file_zero_point=pair.tensor.zero_point,
            scale_ulps=pair.scale_ulps,
            same_range=pair.has_same_range,
            at_lowest=self.lowest / count,
            at_highest=self.highest / count,
            sqnr=self.noise.in_decibels,
            tensor=pair.tensor.name,
            bits=self.bits,
            reads=tuple(names[index] for index in read if index in names),
            range=self.range,
            float_range=self.float_range,
            spread=self.noise.spread,
            clipped=self.clipped / count,
            far=find_outliers(np.concatenate(self.sample), self.float_range, self.range, self.bits),
        )
