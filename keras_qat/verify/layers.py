"""Layer by layer: every tensor that the model and its file both have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.flatbuffer import FileGraph
from keras_qat.interpreter import Kernels, TFLiteModel, to_codes
from keras_qat.keras2 import graph as graph_lib
from keras_qat.keras2.graph import Call, Graph, Value, takes_training, values_in
from keras_qat.keras2.phases import phase_finder
from keras_qat.layers import Quantize, QuantizeWrapper
from keras_qat.layers.scheduled import assuming
from keras_qat.schedule import scheduled_layers
from keras_qat.simulate import Codes
from keras_qat.simulate.walk import Walk
from keras_qat.verify.report import Agreement, OutputReport, Report, TensorReport
from keras_qat.verify.tensors import Pair, float_operations, pair

__all__ = ["compare_layers"]

SIMULATED = 8
"""How many examples the integer simulation computes: enough to tell rounding from errors."""


def compare_layers(
    model: Any,
    contents: bytes,
    inputs: dict[str, np.ndarray],
    kernels: Kernels,
    batch_size: int,
    outputs: tuple[OutputReport, ...],
) -> Report:
    """Runs model and file batch by batch and compares their tensors; only counts are kept.

    The file is run twice: as it is, with every tensor an output, and cut into pieces, each fed
    the codes that the model computed.

    Raises:
        ValueError: if the file does not name its layers, or has layers that the model has not.
    """
    graph, file = graph_lib.read(model), FileGraph(contents)
    found = pair(graph, file, model.output_names)
    indices = [each.tensor.index for each in found.pairs]
    whole = TFLiteModel(file.with_outputs(indices), kernels)
    pieces: TFLiteModel | None = None
    phase, layers = phase_finder(model)(False), list(scheduled_layers(model))
    simulate = _evaluator(
        graph, [each.value for each in found.pairs], lambda: assuming(phase, layers)
    )
    sums = [_Sums(each) for each in found.pairs]
    examples = len(next(iter(inputs.values())))
    for start in range(0, examples, batch_size):
        batch = {name: each[start : start + batch_size] for name, each in inputs.items()}
        simulated, exact = simulate(*(tf.convert_to_tensor(each) for each in batch.values()))
        # The file's inputs by index, as the caller gives them: codes of real numbers.
        given = {
            str(tensor.index): to_codes(batch[name], _detail(tensor))
            for name, tensor in file.inputs.items()
        }
        expected = {
            str(each.tensor.index): each.tensor.codes(values.numpy())
            for each, values in zip(found.pairs, simulated, strict=True)
        }
        run = given | whole.run_once(given)
        if pieces is None:
            shapes = {int(name): codes.shape for name, codes in run.items()}
            pieces = TFLiteModel(file.in_pieces(shapes), kernels)
        known = {name: (given | expected)[name].reshape(run[name].shape) for name in pieces.inputs}
        fed = pieces.run_once(known)
        for each, values in zip(sums, exact, strict=True):
            name = str(each.pair.tensor.index)
            each.add(expected[name], fed.get(name), run[name], values.numpy())
        if start == 0 and kernels != "optimized":
            integers = _in_integers(graph, file, kernels, batch)
            for each in sums:
                each.compare_exactly(integers(each.pair.value), run[str(each.pair.tensor.index)])
    return Report(
        examples,
        kernels,
        outputs,
        tuple(each.report(file, set(indices)) for each in sums),
        found.merged,
        float_operations(graph, file),
    )


def _in_integers(
    graph: Graph, file: FileGraph, kernels: str, inputs: dict[str, np.ndarray]
) -> Callable[[Value], Any]:
    """The integer simulation of the first examples, asked tensor by tensor."""
    walk = Walk(graph, kernels)
    start = []
    for value, x in zip(values_in(graph.inputs), inputs.values(), strict=True):
        tensor = file.inputs[value.name]
        limits = None
        if tensor.is_quantized:
            ends = np.iinfo(tensor.dtype)
            low, high = tensor.values(np.array([ends.min, ends.max]))
            limits = (float(low), float(high))
        start.append(walk.start(value, x[:SIMULATED], limits))
    graph_lib.evaluate(graph, start, walk.apply)
    return walk.tensors.get


def _evaluator(graph: Graph, wanted: list[Value], scope: Callable[[], Any]) -> Any:
    """A function from inputs to the wanted tensors: of the simulation, and in float.

    It is traced within `scope`.
    """

    def tensors(inputs: tuple[Any, ...], compute: Callable[..., Any]) -> list[Any]:
        found = dict(zip(values_in(graph.inputs), inputs, strict=True))

        def apply(call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
            outputs = compute(call.layer, args, kwargs)
            found.update(zip(values_in(call.outputs), tf.nest.flatten(outputs), strict=True))
            return outputs

        graph_lib.evaluate(graph, list(inputs), apply)
        return [found[value] for value in wanted]

    def both(*inputs: Any) -> tuple[list[Any], list[Any]]:
        with scope():
            return tensors(inputs, _simulated), tensors(inputs, _in_float)

    return tf.function(both, autograph=False)


def _simulated(layer: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The layer as the model computes it at inference.

    Where nothing is said some compute as in training, as Keras' random augmentation.
    """
    if takes_training(layer) and kwargs.get("training") is None:
        kwargs = {**kwargs, "training": False}
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


def _detail(tensor: Any) -> dict[str, Any]:
    return {"dtype": tensor.dtype, "quantization": (tensor.scale, tensor.zero_point)}


@dataclasses.dataclass
class _Difference:
    """Sums over the differences of one tensor's codes."""

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
    """What is counted for one tensor."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.fed, self.run = _Difference(), _Difference()
        self.lowest = self.highest = 0
        self.signal = self.noise = 0.0
        self.simulated: float | None = None
        limits = np.iinfo(pair.tensor.dtype)
        bits = pair.levels.bits if pair.levels is not None else limits.bits
        self.ends = int(limits.min), int(limits.min) + 2**bits - 1

    def add(
        self, expected: np.ndarray, fed: np.ndarray | None, run: np.ndarray, exact: np.ndarray
    ) -> None:
        """Takes in a batch: the model's codes, the file's fed and in a free run, the floats."""
        if fed is not None:
            self.fed.add(expected, fed)
        self.run.add(expected, run)
        lowest, highest = self.ends
        self.lowest += int(np.count_nonzero(run <= lowest))
        self.highest += int(np.count_nonzero(run >= highest))
        exact = exact.astype(np.float64).ravel()
        self.signal += float(np.sum(exact**2))
        self.noise += float(np.sum((self.pair.tensor.values(run).ravel() - exact) ** 2))

    def compare_exactly(self, simulated: Any, run: np.ndarray) -> None:
        """Takes in what the integer simulation has for the first examples."""
        if isinstance(simulated, Codes) and self.pair.tensor.dtype == simulated.codes.dtype:
            codes = simulated.codes.ravel()
            self.simulated = float(np.mean(run.ravel()[: codes.size] == codes))

    def report(self, file: FileGraph, known: set[int]) -> TensorReport:
        """The sums as shares and means."""
        pair, count = self.pair, self.run.count
        operations = file.piece(pair.tensor.index, known | {i.index for i in file.inputs.values()})
        run = self.run.agreement()
        assert run is not None
        sqnr = None
        if self.signal and self.noise:
            sqnr = float(10 * np.log10(self.signal / self.noise))
        return TensorReport(
            name=pair.name,
            layers=pair.layers,
            kernels=tuple(each.kernel for each in operations),
            fed=self.fed.agreement(),
            run=run,
            simulated=self.simulated,
            scale=None if pair.levels is None else pair.levels.scale,
            zero_point=None if pair.levels is None else pair.levels.zero_point,
            file_scale=pair.tensor.scale,
            file_zero_point=pair.tensor.zero_point,
            scale_ulps=pair.scale_ulps,
            same_range=pair.has_same_range,
            at_lowest=self.lowest / count,
            at_highest=self.highest / count,
            sqnr=sqnr,
        )
