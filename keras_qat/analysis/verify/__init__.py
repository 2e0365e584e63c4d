"""Verification: does the exported file compute what training simulated?"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from typing import Any

import numpy as np

from keras_qat.analysis.verify.against_float import FEW, against_float
from keras_qat.analysis.verify.compare_layers import compare_layers
from keras_qat.analysis.verify.compare_outputs import (
    check_match,
    predictions,
    range_in_file,
    simulated,
)
from keras_qat.analysis.verify.labels import labels_of
from keras_qat.analysis.verify.match_tensors import UnknownLayers, float_operations
from keras_qat.analysis.verify.pixels import rounded_to_pixels
from keras_qat.analysis.verify.preconditions import (
    beyond_ranges,
    check_rows,
    doubts,
    mixing,
    randomness,
)
from keras_qat.analysis.verify.report import Agreement, OutputReport, Report, TensorReport
from keras_qat.analysis.verify.verdict import POOR, Verdict, is_same, judge
from keras_qat.arithmetic.kernel_families import REFERENCE, XNNPACK, KernelFamily
from keras_qat.config.arguments import answers_unknown
from keras_qat.config.targets.tflm import TFLM
from keras_qat.export.target_problems import problems
from keras_qat.graph.calls import flatten_values
from keras_qat.integer_graph.float_inference import evaluator
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.passes import as_asked
from keras_qat.integer_graph.resolve import resolve
from keras_qat.io.counts import check_counts
from keras_qat.io.data import pad_batch, read_arrays
from keras_qat.io.inputs import pack_inputs
from keras_qat.keras2.backend import one_at_a_time
from keras_qat.keras2.losses import find_losses
from keras_qat.messages import warn_caller
from keras_qat.tflite.interpreter import FileInterpreter, Kernels, Refusal, Runtime
from keras_qat.tflite.metadata import read_rescalings
from keras_qat.tflite.micro_interpreter import MicroInterpreter, open_file
from keras_qat.tflite.reader import FileGraph
from keras_qat.tflite.schema import read_contents
from keras_qat.training.calibration.lost_values import explain_losses
from keras_qat.training.recurrent import Stream
from keras_qat.training.schedule import check_quantized, get_file_model

__all__ = ["Agreement", "OutputReport", "Report", "TensorReport", "Verdict", "verify"]


@one_at_a_time
@answers_unknown()
def verify(
    model: Any,
    tflite: str | os.PathLike[str] | bytes,
    x: Any,
    y: Any = None,
    *,
    per_layer: bool = False,
    kernels: Kernels | None = None,
    runtime: Runtime | None = None,
    batch_size: int = 32,
    float_examples: int | None = None,
    verbose: int = 0,
) -> Report:
    """Runs the quantization-aware model and its TFLite file on `x` and compares them.

    Args:
        model: the model the file was exported from.
        tflite: path or contents of the file.
        x: inputs, as `model.predict` or TFLite's converter take them: an array, a list or dict of
            arrays, a `tf.data.Dataset`, a generator or a function that makes one. Labels that come
            along are ignored: pass them as `y`. They are held in memory. A model that keeps states
            (`stateful=True`) and its file begin with zeros, and go on from batch to batch.
        y: labels: class numbers, one-hot vectors, or targets of the shape of the output; of several
            outputs a dict or a list. They decide the verdict: by accuracy, or by the error (of the
            loss that the model was compiled with) of the file and of the model in float. None for
            none.
        per_layer: whether to compare every tensor that both sides have, in a free run and with
            each layer fed what the model computed before it, so that the layer that differs is
            named. Holds the tensors of one batch in memory.
        kernels: which kernels compute the file: "xnnpack" (those of this machine;
            "xnnpack_arm64" on 64-bit ARM only), "optimized" (TFLite's own), "reference" (its
            portable ones), or "tflm": the file, exported with `batch_size=1`, runs in TFLite Micro,
            as on microcontrollers. By default those of the model's target, without one "xnnpack".
            If TFLite Micro stands for the target, as for Ethos-U, and lacks an operator that the
            target computes in another way, "reference" runs the file, and the report says so.
        runtime: the package whose interpreter runs the file, "ai-edge-litert", "tensorflow" or
            "tflite-runtime", by default the first that is installed: some operators are computed
            otherwise in some versions (docs/runtimes.md). `report.runtime` says what ran.
        batch_size: how many examples to run at a time, unless the model or the file has a fixed
            batch size. The last batch is then filled up with its last example.
        float_examples: how many of the examples, evenly spread, are computed in float too, to tell
            whether the model is good; by default 32, or as many as have half a million numbers.
            Four times as many are where these leave a doubt, and all with labels or with a fixed
            batch size.
        verbose: 1 shows progress.

    Returns:
        A report that prints as a table, and draws itself with `plot`. Its `verdict` says whether
        the file computes what the model computes, and whether that is any good: if not, which
        layer is the weakest, and why. A file of weights packed in 4 bits is compared with
        `simulate(pack_int4=True)` unless `model.pack_int4` is set. Its `notes` say, as warnings do,
        what makes them differ before any rounding does: a model in which quantization has not
        begun, a file of other weights or of another model, inputs beyond the ranges. If the file
        takes pixels, values between two pixels are rounded for both, and a note says so.

    Raises:
        ValueError: if the model is not quantized, the file is damaged or not one of this model,
            the inputs or labels are not what the model takes, or outputs have other rows in
            batches of other sizes.
        ImportError: for "tflm" without the package `tflite-micro`; if `runtime` is not installed.

    Example:
        >>> print(keras_qat.verify(qat, "model.tflite", x_test, per_layer=True))
    """
    check_counts(batch_size=batch_size, float_examples=float_examples)
    check_quantized(model)
    compiled = model
    model = get_file_model(model)
    # A model made of parts of others, or of recipe `contrib`, has no inference of its own.
    inference = getattr(model, "exact_inference", lambda: None)()
    graph = inference.resolved() if inference else resolve(model)
    contents = read_contents(tflite)
    file, standing_in, refused = _open(contents, graph, kernels, runtime)
    computing = standing_in.name if standing_in else kernels or graph.origin.file_family.name
    arrays = read_arrays(graph.origin.inputs, x)
    examples = len(arrays[0])
    full_batches = math.lcm(file.batch_size or 1, graph.origin.fixed_batch or 1)
    padded_arrays = [pad_batch(array, full_batches) for array in arrays]
    inputs = dict(zip(graph.inputs, padded_arrays, strict=True))
    check_match(file, graph)
    input_range = range_in_file(graph, file)
    if input_range is not None:
        graph = resolve(model, input_range=input_range)
    rescaled = read_rescalings(contents)
    file_graph = FileGraph(contents)
    cut_off = beyond_ranges(file_graph, inputs, rescaled)
    inputs_of_file, inputs, between_pixels = rounded_to_pixels(graph, file, inputs, rescaled)
    packs = graph.origin.packs_int4
    packed_weights = file_graph.packs_int4 and not packs and not graph.origin.simulates
    graph = as_asked(graph, packs or packed_weights, graph.origin.family)
    if standing_in:
        origin = dataclasses.replace(graph.origin, family=standing_in)
        graph = dataclasses.replace(graph, origin=origin)
    notes = (*graph.origin.warnings, *doubts(graph, file_graph, contents, cut_off))
    for note in notes:
        warn_caller(note)
    arena = file.arena_size() if isinstance(file, MicroInterpreter) else None
    batch_size = graph.origin.batch_size(examples, batch_size)
    packed_inputs = pack_inputs(graph.origin.inputs, list(inputs.values()))

    def computed(size: int) -> list[np.ndarray]:
        """Returns what the file has to return: the model's own predictions, if it has the same."""
        if packed_weights or refused:
            return simulated(graph, packed_inputs, size, verbose)
        return predictions(model, packed_inputs, size, verbose)

    with Stream(graph.origin.states):
        codes = file.run(inputs_of_file, batch_size, verbose)
        expected = computed(batch_size)
    check_rows(graph, codes, expected)
    calls = graph.origin.calls
    evaluate = inference.in_float if inference else evaluator(calls, flatten_values(calls.outputs))
    losses = find_losses(compiled, list(graph.outputs))
    labels = labels_of(graph, y, examples, losses)
    outputs, faults, drowned = against_float(
        evaluate,
        graph,
        file,
        padded_arrays,
        codes,
        expected,
        examples,
        labels,
        losses,
        float_examples,
    )

    def look_inside(count: int | None) -> tuple[tuple[TensorReport, ...], tuple[str, ...]]:
        some, fed = (
            {name: x[:count] for name, x in arrays.items()} for arrays in (inputs, inputs_of_file)
        )
        size = file.batch_size or batch_size
        return compare_layers(graph, file_graph, some, fed, computing, size, verbose, runtime)

    rounds_alike = not graph.origin.simulates and computing == graph.origin.family.name
    if not is_same(outputs, rounds_alike):
        with Stream(graph.origin.states):
            causes = randomness(graph.name, expected, computed(batch_size))
        if not causes and file.batch_size and file.batch_size != batch_size:
            parts = computed(file.batch_size)
            causes = mixing(graph.name, expected, parts, file.batch_size)
        notes = (*causes, *notes)
    tensors, merged = look_inside(None) if per_layer else ((), ())

    def some_inside() -> tuple[TensorReport, ...]:
        """Returns the layers on a few examples; none if the file names them in another way."""
        with contextlib.suppress(UnknownLayers):
            return look_inside(math.ceil(FEW / full_batches) * full_batches)[0]
        return ()

    verdict = judge(
        outputs,
        rounds_alike,
        notes,
        [tensor.name for tensor in tensors if tensor.is_faulty],
        faults,
        drowned,
        cut_off,
        explain_losses(calls, arrays),
        lambda: tensors or some_inside(),
    )
    if graph.origin.unlike_float and verdict.is_same:
        verdict = Verdict(POOR, likely_cause=graph.origin.unlike_float)
    return Report(
        examples,
        computing,
        outputs,
        verdict,
        tensors,
        merged,
        float_operations(graph, file_graph),
        (*notes, *between_pixels),
        arena,
        file.runtime,
        packed_weights,
        refused,
    )


def _open(
    contents: bytes, graph: ResolvedGraph, kernels: Kernels | None, runtime: Runtime | None
) -> tuple[FileInterpreter, KernelFamily | None, str]:
    """Opens a file with the kernels asked for, else its model's, or TFLite's where they lack some.

    Returns:
        The file; the family of kernels that stands in for the model's; what those lack, as a text.
    """
    try:
        return open_file(contents, kernels or graph.origin.file_family.name, runtime), None, ""
    except Refusal as error:
        target = graph.origin.target
        if kernels or target is None or not target.elsewhere:
            raise
        missing = [f"{p.operator}: {p.reason}" for p in problems(contents, TFLM)]
        refused = ", ".join(dict.fromkeys(missing)) or str(error)
    try:
        return open_file(contents, REFERENCE.name, runtime), REFERENCE, refused
    except ValueError:  # TFLite has no reference kernel of ELU.
        return open_file(contents, XNNPACK.name, runtime), XNNPACK, refused
