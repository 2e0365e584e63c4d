"""Layer by layer: every tensor that the model and its file both have."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from keras_qat.analysis.verify.match_tensors import Pair, pair
from keras_qat.analysis.verify.report import Agreement, TensorReport
from keras_qat.analysis.verify.signal_to_noise import SignalToNoise
from keras_qat.arithmetic.kernel_families import FAMILIES, XNNPACK
from keras_qat.integer_graph.execute import prepare
from keras_qat.integer_graph.float_inference import make_evaluator
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.passes import pack_int4
from keras_qat.integer_graph.simulate import run_batch
from keras_qat.io.data import show_progress
from keras_qat.tflite.interpreter import FileInterpreter, Runtime, quantize
from keras_qat.tflite.micro_interpreter import open_file
from keras_qat.tflite.reader import FileGraph
from keras_qat.training.calibration.lost_values import find_outliers
from keras_qat.training.recurrent import Stream

SAMPLE, SAMPLED = 4096, 8
"""Values of a batch, and batches, in which values far outside of all others are looked for."""

SIMULATED = 8
"""Examples that are computed in the file's own rounding: enough to tell rounding from errors."""


def compare_layers(
    resolved: ResolvedGraph,
    file: FileGraph,
    inputs: dict[str, np.ndarray],
    fed: dict[str, np.ndarray],
    kernels: str,
    batch_size: int,
    verbose: int = 0,
    runtime: Runtime | None = None,
) -> tuple[tuple[TensorReport, ...], tuple[str, ...]]:
    """Runs model and file batch by batch and compares their tensors; only counts are kept.

    The file is run twice: as it is, with every tensor an output, and cut into pieces, each fed
    the quantized values that the model computed. `fed` are the inputs as the file takes them.

    Returns:
        The reports of all tensors that both have, and the layers that are none in the file.

    Raises:
        ValueError: if the file does not name its layers, or has layers that the model has not.
    """
    graph = resolved.origin.calls
    pairs, merged = pair(resolved, file)
    own_rounding = FAMILIES.get(kernels)
    in_file = resolved
    if file.packs_int4:
        in_file = pack_int4(resolved, own_rounding or XNNPACK)
    indices = [pair.tensor.index for pair in pairs]
    interpreter = open_file(file.replace_outputs(indices), kernels, runtime)
    pieces: FileInterpreter | None = None
    values = [pair.value for pair in pairs]
    in_float = make_evaluator(graph, values)
    origin = resolved.origin
    simulated = make_evaluator(graph, values, None) if origin.simulates else None
    numbers = prepare(resolved, origin.family)
    sums = [_Sums(pair) for pair in pairs]
    streams = [Stream(origin.states) for _ in range(3)]
    few = origin.fixed_batch or SIMULATED
    examples = len(next(iter(inputs.values())))
    for start in show_progress(range(0, examples, batch_size), "Layer by layer", verbose):
        batch = {name: array[start : start + batch_size] for name, array in inputs.items()}
        arrays = list(batch.values())
        with streams[0]:
            exact = in_float(arrays)
        with streams[1]:
            if simulated is None:
                computed = run_batch(resolved, arrays, origin.family, numbers)
                ours = [_as_stored(pair.tensor, computed[pair.ours]) for pair in pairs]
            else:
                simulated_values = zip(pairs, simulated(arrays), strict=True)
                ours = [pair.tensor.quantize(np.asarray(real)) for pair, real in simulated_values]
        # The file's inputs by index, as the caller gives them.
        file_inputs = {
            str(tensor.index): quantize(
                fed[name][start : start + batch_size], tensor.dtype, tensor.scale, tensor.zero_point
            )
            for name, tensor in file.inputs.items()
        }
        expected = dict(zip(map(str, indices), ours, strict=True))
        run = file_inputs | interpreter.run_once(file_inputs)
        shapes = {int(name): codes.shape for name, codes in run.items()}
        if pieces is None and not shapes.keys().isdisjoint(file.producers):
            pieces = open_file(file.cut_at(shapes), kernels, runtime)
        by_piece = {}
        if pieces is not None:
            given = file_inputs | expected
            known = {name: given[name].reshape(run[name].shape) for name in pieces.inputs}
            by_piece = pieces.run_once(known)
        for layer, real in zip(sums, map(np.asarray, exact), strict=True):
            name = str(layer.pair.tensor.index)
            layer.add(expected[name], by_piece.get(name), run[name], real)
        if start == 0 and own_rounding is not None:
            with streams[2]:
                some_examples = [array[:few] for array in arrays]
                own_numbers = prepare(in_file, own_rounding)
                in_rounding = run_batch(in_file, some_examples, own_rounding, own_numbers)
            for layer in sums:
                name = str(layer.pair.tensor.index)
                layer.compare_exactly(
                    _as_stored(layer.pair.tensor, in_rounding[layer.pair.ours]), run[name]
                )
    names = {pair.tensor.index: pair.name for pair in pairs}
    return tuple(layer.report(file, names) for layer in sums), merged


def _as_stored(tensor: Any, values: np.ndarray) -> np.ndarray:
    """Converts values to what a tensor of the file holds; real numbers are quantized."""
    if values.dtype.kind == "f":
        return np.asarray(tensor.quantize(values))
    offset = 128 if tensor.dtype == np.uint8 else 0
    return (values.astype(np.int32) + offset).astype(tensor.dtype)


@dataclasses.dataclass
class _Difference:
    """Sums over the differences of one tensor's quantized values."""

    count: int = 0
    same: int = 0
    total: float = 0.0
    largest: int = 0

    def add(self, expected: np.ndarray, codes: np.ndarray) -> None:
        differences = np.abs(codes.astype(np.int32).ravel() - expected.astype(np.int32).ravel())
        self.count += differences.size
        self.same += int(np.count_nonzero(differences == 0))
        self.total += float(differences.sum())
        self.largest = max(self.largest, int(differences.max(initial=0)))

    def agreement(self) -> Agreement | None:
        if not self.count:
            return None
        return Agreement(self.same / self.count, float(self.largest), self.total / self.count)


class _Sums:
    """Counts of one tensor."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.fed, self.run = _Difference(), _Difference()
        self.lowest = self.highest = self.clipped = 0
        self.float_range = np.inf, -np.inf
        self.noise = SignalToNoise()
        self.sample: list[np.ndarray] = []
        self.simulated: float | None = None
        limits = np.iinfo(pair.tensor.dtype)
        self.bits = pair.params.bits if pair.params is not None else limits.bits
        self.ends = int(limits.min), int(limits.min) + 2**self.bits - 1
        low, high = pair.tensor.dequantize(np.array(self.ends, pair.tensor.dtype))
        self.range = float(low), float(high)

    def add(
        self, expected: np.ndarray, fed: np.ndarray | None, run: np.ndarray, exact: np.ndarray
    ) -> None:
        """Takes in a batch: the model's values, the file's fed and in a free run, the floats."""
        if fed is not None:
            self.fed.add(expected, fed)
        self.run.add(expected, run)
        lowest, highest = self.ends
        self.lowest += int(np.count_nonzero(run <= lowest))
        self.highest += int(np.count_nonzero(run >= highest))
        self.noise.add(exact, self.pair.tensor.dequantize(run))
        if len(self.sample) < SAMPLED:
            drawn = np.random.default_rng(0).integers(0, exact.size, SAMPLE)
            self.sample.append(exact.ravel()[drawn])
        low, high = self.float_range
        self.float_range = min(low, float(exact.min())), max(high, float(exact.max()))
        (low, high), step = self.range, self.pair.tensor.scale
        self.clipped += int(np.count_nonzero((exact < low - step) | (exact > high + step)))

    def compare_exactly(self, simulated: np.ndarray, run: np.ndarray) -> None:
        """Takes in what the resolved graph gives for the first examples, in the file's rounding."""
        if self.pair.params is not None:
            codes = simulated.ravel()
            self.simulated = float(np.mean(run.ravel()[: codes.size] == codes))

    def report(self, file: FileGraph, names: dict[int, str]) -> TensorReport:
        """Returns the sums as shares and means. `names` holds the names of all tensors by index."""
        pair, count = self.pair, self.run.count
        known = {*names, *(tensor.index for tensor in file.inputs.values())}
        operations = file.find_operations(pair.tensor.index, known)
        read = dict.fromkeys(index for operation in operations for index in operation.inputs)
        run = self.run.agreement()
        assert run is not None
        return TensorReport(
            name=pair.name,
            layers=pair.layers,
            kernels=tuple(operation.kernel for operation in operations),
            fed=self.fed.agreement(),
            run=run,
            simulated=self.simulated,
            scale=None if pair.params is None else float(pair.params.scale),
            zero_point=None if pair.params is None else int(pair.params.zero_point),
            file_scale=pair.tensor.scale,
            file_zero_point=pair.tensor.zero_point,
            scale_ulps=pair.scale_ulps,
            same_range=pair.has_same_range,
            at_lowest=self.lowest / count,
            at_highest=self.highest / count,
            sqnr=self.noise.decibels(),
            tensor=pair.tensor.name,
            bits=self.bits,
            reads=tuple(names[index] for index in read if index in names),
            range=self.range,
            float_range=self.float_range,
            spread=self.noise.spread,
            clipped=self.clipped / count,
            far=find_outliers(np.concatenate(self.sample), self.float_range, self.range, self.bits),
        )
