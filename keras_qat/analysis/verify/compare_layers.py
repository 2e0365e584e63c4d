"""Layer by layer: every tensor that the model and its file both have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.analysis.verify.match_tensors import Pair, float_operations, pair
from keras_qat.analysis.verify.report import Agreement, OutputReport, Report, TensorReport
from keras_qat.arithmetic.kernel_families import FAMILIES, XNNPACK
from keras_qat.frontend import graph as graph_lib
from keras_qat.frontend.graph import Call, Graph, Value, takes_training, values_in
from keras_qat.frontend.keras2.backend import traced
from keras_qat.frontend.keras2.precision import computing_in_float32
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.passes.pack_int4 import with_int4
from keras_qat.integer_graph.simulate import run_batch
from keras_qat.io.progress import shown
from keras_qat.tflite.interpreter import Runtime, to_codes
from keras_qat.tflite.micro_interpreter import Runner, open_file
from keras_qat.tflite.reader import FileGraph
from keras_qat.training.layers import Quantize, QuantizeWrapper
from keras_qat.training.layers.recurrent.states import Stream

SIMULATED = 8
"""Examples that are computed in the file's own rounding: enough to tell rounding from errors."""


def compare_layers(
    resolved: ResolvedGraph,
    contents: bytes,
    inputs: dict[str, np.ndarray],
    fed: dict[str, np.ndarray],
    kernels: str,
    batch_size: int,
    outputs: tuple[OutputReport, ...],
    verbose: int = 0,
    runtime: Runtime | None = None,
) -> Report:
    """Runs model and file batch by batch and compares their tensors; only counts are kept.

    The file is run twice: as it is, with every tensor an output, and cut into pieces, each fed
    the quantized values that the model computed. `fed` are the inputs as the file takes them.

    Raises:
        ValueError: if the file does not name its layers, or has layers that the model has not.
    """
    graph, file = resolved.origin.calls, FileGraph(contents)
    pairs, merged = pair(resolved, file)
    own_rounding = FAMILIES.get(kernels)
    in_file = resolved
    if file.packs_int4:
        in_file = with_int4(resolved, own_rounding or XNNPACK)
    indices = [each.tensor.index for each in pairs]
    whole = open_file(file.with_outputs(indices), kernels, runtime)
    pieces: Runner | None = None
    values = [each.value for each in pairs]
    in_float = _evaluator(graph, values, _in_float)
    origin = resolved.origin
    simulated = _evaluator(graph, values, _simulated) if origin.simulates else None
    sums = [_Sums(each) for each in pairs]
    streams = [Stream(origin.states) for _ in range(3)]
    few = origin.kept_batch or SIMULATED
    examples = len(next(iter(inputs.values())))
    for start in shown(range(0, examples, batch_size), "Layer by layer", verbose):
        batch = {name: each[start : start + batch_size] for name, each in inputs.items()}
        arrays = list(batch.values())
        with streams[0]:
            exact = in_float(arrays)
        with streams[1]:
            if simulated is None:
                computed = run_batch(resolved, arrays, origin.family)
                ours = [_as_in(each.tensor, computed[each.ours]) for each in pairs]
            else:
                found = zip(pairs, simulated(arrays), strict=True)
                ours = [each.tensor.codes(real) for each, real in found]
        # The file's inputs by index, as the caller gives them.
        given = {
            str(each.index): to_codes(
                fed[name][start : start + batch_size], each.dtype, each.scale, each.zero_point
            )
            for name, each in file.inputs.items()
        }
        expected = dict(zip(map(str, indices), ours, strict=True))
        run = given | whole.run_once(given)
        if pieces is None:
            shapes = {int(name): codes.shape for name, codes in run.items()}
            pieces = open_file(file.in_pieces(shapes), kernels, runtime)
        known = {name: (given | expected)[name].reshape(run[name].shape) for name in pieces.inputs}
        by_piece = pieces.run_once(known)
        for each, real in zip(sums, exact, strict=True):
            name = str(each.pair.tensor.index)
            each.add(expected[name], by_piece.get(name), run[name], real)
        if start == 0 and own_rounding is not None:
            with streams[2]:
                some = run_batch(in_file, [each[:few] for each in arrays], own_rounding)
            for each in sums:
                name = str(each.pair.tensor.index)
                each.compare_exactly(_as_in(each.pair.tensor, some[each.pair.ours]), run[name])
    return Report(
        examples,
        kernels,
        outputs,
        tuple(each.report(file, set(indices)) for each in sums),
        merged,
        float_operations(resolved, file),
    )


def float_outputs(
    resolved: ResolvedGraph,
    inputs: dict[str, np.ndarray],
    batch_size: int,
    traces: dict[str, Any],
) -> list[np.ndarray]:
    """Computes the model's outputs without any quantization, its weights unquantized too.

    `traces` keeps the traced function for the next time, as tracing takes longer than computing.
    """
    calls, arrays = resolved.origin.calls, list(inputs.values())
    if "float" not in traces:
        traces["float"] = _evaluator(calls, values_in(calls.outputs), _in_float)
    compute = traces["float"]
    with Stream(resolved.origin.states):
        parts = [
            compute([array[start : start + batch_size] for array in arrays])
            for start in range(0, len(arrays[0]), batch_size)
        ]
    return [np.concatenate(output) for output in zip(*parts, strict=True)]


def _as_in(tensor: Any, values: np.ndarray) -> np.ndarray:
    """Quantized values as a tensor of the file holds them; real ones are quantized to it."""
    if values.dtype.kind == "f":
        return np.asarray(tensor.codes(values))
    offset = 128 if tensor.dtype == np.uint8 else 0
    return (values.astype(np.int32) + offset).astype(tensor.dtype)


def _evaluator(
    graph: Graph, wanted: list[Value], compute: Callable[..., Any]
) -> Callable[[list[np.ndarray]], list[np.ndarray]]:
    """A function from inputs to the wanted tensors, layer by layer with `compute`."""

    @traced
    def tensors(*inputs: Any) -> list[Any]:
        found = dict(zip(values_in(graph.inputs), inputs, strict=True))

        def apply(call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
            outputs = compute(call.layer, args, kwargs)
            found.update(zip(values_in(call.outputs), tf.nest.flatten(outputs), strict=True))
            return outputs

        graph_lib.evaluate(graph, list(inputs), apply)
        return [found[value] for value in wanted]

    dtypes = [value.dtype for value in values_in(graph.inputs)]
    return lambda arrays: [each.numpy() for each in tensors(*map(tf.constant, arrays, dtypes))]


def _simulated(layer: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The layer as the model computes it at inference.

    Where nothing is said some compute as in training, as Keras' random augmentation.
    """
    if takes_training(layer) and kwargs.get("training") is None:
        kwargs = {**kwargs, "training": False}
    with computing_in_float32(layer):
        return layer(*args, **kwargs)


def _in_float(layer: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The layer without any quantization: the float layers inside a wrapper."""
    if isinstance(layer, Quantize):
        return args[0]
    if not isinstance(layer, QuantizeWrapper):
        return _simulated(layer, args, kwargs)
    (x,) = args
    for inner in layer.sublayers:
        x = _simulated(inner, (x,), {})
    return x


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
        self.lowest = self.highest = 0
        self.signal = self.noise = 0.0
        self.simulated: float | None = None
        limits = np.iinfo(pair.tensor.dtype)
        bits = pair.params.bits if pair.params is not None else limits.bits
        self.ends = int(limits.min), int(limits.min) + 2**bits - 1

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
        exact = exact.astype(np.float64).ravel()
        self.signal += float(np.sum(exact**2))
        self.noise += float(np.sum((self.pair.tensor.values(run).ravel() - exact) ** 2))

    def compare_exactly(self, simulated: np.ndarray, run: np.ndarray) -> None:
        """Takes in what the resolved graph gives for the first examples, in the file's rounding."""
        if self.pair.params is not None:
            codes = simulated.ravel()
            self.simulated = float(np.mean(run.ravel()[: codes.size] == codes))

    def report(self, file: FileGraph, known: set[int]) -> TensorReport:
        """The sums as shares and means."""
        pair, count = self.pair, self.run.count
        operations = file.piece(pair.tensor.index, known | {i.index for i in file.inputs.values()})
        run = self.run.agreement()
        assert run is not None
        has_noise = self.signal and self.noise
        return TensorReport(
            name=pair.name,
            layers=pair.layers,
            kernels=tuple(each.kernel for each in operations),
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
            sqnr=float(10 * np.log10(self.signal / self.noise)) if has_noise else None,
        )
