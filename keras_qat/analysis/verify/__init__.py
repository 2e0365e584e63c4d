"""`verify`: checks whether an exported TFLite file and its model have the same outputs."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

from numpy.typing import ArrayLike, NDArray

from keras_qat.analysis.verify import outputs as out
from keras_qat.analysis.verify.causes import (
    are_equal,
    describe_mixing,
    describe_randomness,
    find_excess,
    find_mismatches,
)
from keras_qat.analysis.verify.labels import match_labels
from keras_qat.analysis.verify.layers import compare_layers
from keras_qat.analysis.verify.pairs import UnknownLayers, find_float_operations
from keras_qat.analysis.verify.report import Report
from keras_qat.analysis.verify.results import Agreement, OutputReport, TensorReport
from keras_qat.analysis.verify.verdict import OTHER, POOR, Findings, Verdict, is_same, judge
from keras_qat.arithmetic.kernel_families import REFERENCE, XNNPACK, KernelFamily
from keras_qat.export.target_problems import problems
from keras_qat.graph.calls import flatten_values
from keras_qat.integer_graph.float_inference import make_evaluator
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.passes import pack_if_requested
from keras_qat.integer_graph.resolve import resolve
from keras_qat.io.counts import check_counts
from keras_qat.io.data import pad_batch, read_arrays
from keras_qat.io.inputs import pack_inputs
from keras_qat.keras2.backend import keras, one_at_a_time
from keras_qat.keras2.losses import find_losses
from keras_qat.messages import warn_caller
from keras_qat.tflite.interpreter import FileInterpreter, Kernels, Refusal, Runtime
from keras_qat.tflite.metadata import read_rescalings
from keras_qat.tflite.micro_interpreter import MicroInterpreter, open_file
from keras_qat.tflite.reader import FileGraph
from keras_qat.tflite.schema import read_contents
from keras_qat.training.calibration.lost_values import explain_losses
from keras_qat.training.readiness import explain_delay
from keras_qat.training.recurrent import Stream
from keras_qat.training.schedule import check_quantized, get_file_model

__all__ = ["Agreement", "OutputReport", "Report", "TensorReport", "Verdict", "verify"]


@one_at_a_time
def verify(
    model: keras.Model,
    tflite: str | os.PathLike[str] | bytes,
    x: Any,
    y: ArrayLike | Mapping[str, ArrayLike] | None = None,
    *,
    per_layer: bool = False,
    kernels: Kernels | None = None,
    runtime: Runtime | None = None,
    batch_size: int = 32,
    float_examples: int | None = None,
    verbose: int = 0,
) -> Report:
    """Runs a quantization-aware model and its TFLite file on `x`, and compares the outputs.

    Args:
        model: the model that was exported to the file.
        tflite: path or contents of the file.
        x: inputs: arrays as for `model.predict`, a `tf.data.Dataset`, a generator, or a function
            that returns any of these. All inputs are held in memory. Labels in `x` are ignored:
            pass labels as `y`. States of a stateful model and of its file are set to zero at the
            start, but not between batches.
        y: labels: class indices, one-hot vectors, or targets of the output's shape. For several
            outputs, pass a dict or a list. With labels, the verdict compares the accuracy or the
            loss of the file and the float model.
        per_layer: whether to compare each layer's output in the file and in the model. Each layer
            of the file also runs alone, with inputs from the model. An error of an earlier layer
            then has no effect. This requires memory for all tensors of one batch.
        kernels: the kernels that run the file. "xnnpack" means XNNPACK on this machine.
            "xnnpack_arm64" needs 64-bit ARM. "optimized" means TFLite's own fast kernels, and
            "reference" means TFLite's portable kernels. "tflm" is TFLite Micro, which needs a file
            with `batch_size=1`. The default is the kernels of the model's target, or "xnnpack"
            without a target. For Ethos-U targets, the default is "tflm". If TFLite Micro lacks an
            operator of the file, TFLite runs the file, and the report names the operator.
        runtime: the package that runs the file: "ai-edge-litert", "tensorflow" or "tflite-runtime".
            The default is the first package that is installed. Some versions compute some operators
            differently (docs/measurements.md). `report.runtime` names the package that ran.
        batch_size: number of examples per batch. A fixed batch size of the model or the file
            overrides it. The last batch is then padded with copies of the last example.
        float_examples: number of examples that the float model also computes, to check whether the
            quantized model is good. The default is 32, or more for small inputs. If the result is
            unclear, the float model computes four times as many. With labels or a fixed batch size,
            it computes all examples.
        verbose: 1 shows progress.

    Returns:
        A report that prints as a table. `report.verdict` states whether file and model have the
        same outputs, and whether the model is good. For a poor model, the verdict names the weakest
        layer and the cause. `report.notes` lists reasons for large differences, such as inputs
        outside the calibrated ranges. Most notes are also warnings. If the file has uint8 inputs,
        `x` is first rounded to pixels. If the file packs 4-bit weights but the model does not, the
        file is compared with `simulate(model, pack_int4=True)`.

    Raises:
        ValueError: if the model is not quantized, or if the file is damaged or belongs to another
            model. Also if `x` or `y` do not match the model, or if an output's number of rows
            depends on the batch size.
        ImportError: if `runtime` is not installed, or the package `tflite-micro` for "tflm".

    Example:
        >>> print(keras_qat.verify(qat, "model.tflite", x_test, per_layer=True))
    """
    check_counts(batch_size=batch_size, float_examples=float_examples)
    check_quantized(model)
    compiled = model
    model = get_file_model(model)
    # Inference is not exact in models with shared layers, and with the recipe `contrib`.
    inference = getattr(model, "exact_inference", lambda: None)()
    graph = inference.resolve() if inference else resolve(model)
    contents = read_contents(tflite)
    file_graph = FileGraph(contents)
    file, family, refused = _open(contents, graph, kernels, runtime)
    running_kernels = family.name if family else kernels or graph.origin.file_family.name
    arrays = read_arrays(graph.origin.inputs, x)
    examples = len(arrays[0])
    full_batches = math.lcm(file.batch_size or 1, graph.origin.fixed_batch or 1)
    padded = [pad_batch(array, full_batches) for array in arrays]
    out.check_signature(file, graph)
    input_range = out.find_input_range(graph, file)
    if input_range is not None:
        graph = resolve(model, input_range=input_range)
    rescaled = read_rescalings(contents)
    inputs = dict(zip(graph.inputs, padded, strict=True))
    excess = find_excess(file_graph, inputs, rescaled)
    file_inputs, inputs, pixel_notes = out.round_to_pixels(graph, file, inputs, rescaled)
    packs = graph.origin.packs_int4
    packed_weights = file_graph.packs_int4 and not packs and not graph.origin.simulates
    graph = pack_if_requested(graph, packs or packed_weights, graph.origin.family)
    if family:
        origin = dataclasses.replace(graph.origin, family=family)
        graph = dataclasses.replace(graph, origin=origin)
    mismatches = find_mismatches(graph, file_graph, contents)
    notes = [*graph.origin.warnings, *mismatches, *excess]
    for note in notes:
        warn_caller(note)
    arena = file.arena_size() if isinstance(file, MicroInterpreter) else None
    batch_size = graph.origin.batch_size(examples, batch_size)
    packed_inputs = pack_inputs(graph.origin.inputs, list(inputs.values()))

    def compute(size: int) -> list[NDArray]:
        """Return the quantized model's outputs, computed in batches of `size` examples."""
        if packed_weights or refused:
            return out.simulate_values(graph, packed_inputs, size, verbose)
        return out.predict(model, packed_inputs, size, verbose)

    with Stream(graph.origin.states):
        quantized = file.run(file_inputs, batch_size, verbose)
        expected = compute(batch_size)
    out.check_rows(graph, quantized, expected)
    calls = graph.origin.calls
    evaluate = (
        inference.in_float if inference else make_evaluator(calls, flatten_values(calls.outputs))
    )
    losses = find_losses(compiled, list(graph.outputs))
    labels = match_labels(graph, y, examples, losses)
    figures = out.OutputComparison(
        evaluate, graph, file, padded, quantized, expected, examples, labels, losses
    ).compare(float_examples)
    rounds_alike = not graph.origin.simulates and running_kernels == graph.origin.family.name
    delay = "" if packed_weights or refused else explain_delay(model, calls)
    if not delay and not is_same(figures.outputs, rounds_alike):
        with Stream(graph.origin.states):
            is_random = not are_equal(expected, compute(batch_size))
        size = file.batch_size or batch_size
        if is_random:
            notes.insert(0, describe_randomness(graph.name))
        elif size != batch_size and not are_equal(expected, compute(size)):
            notes.insert(0, describe_mixing(graph.name, size))

    def look_inside(
        count: int | None, in_pieces: bool
    ) -> tuple[tuple[TensorReport, ...], tuple[str, ...]]:
        model_data, file_data = (
            {name: x[:count] for name, x in arrays.items()} for arrays in (inputs, file_inputs)
        )
        size = file.batch_size or batch_size
        return compare_layers(
            graph,
            file_graph,
            model_data,
            file_data,
            running_kernels,
            size,
            runtime,
            verbose,
            in_pieces,
        )

    tensors, merged = look_inside(None, True) if per_layer else ((), ())

    def find_tensors() -> tuple[TensorReport, ...]:
        """Return `tensors`. If they are empty, compare the layers now for a few examples."""
        if not tensors:
            with contextlib.suppress(UnknownLayers):
                return look_inside(math.ceil(out.FEW / full_batches) * full_batches, False)[0]
        return tensors

    faulty = [tensor.name for tensor in tensors if tensor.is_faulty]
    lost = explain_losses(calls, arrays)
    found = Findings(notes, faulty, figures.faults, figures.small_channels, excess, lost)
    verdict = judge(figures.outputs, rounds_alike, found, find_tensors)
    if delay and any(output.identical < 1 for output in figures.outputs):
        verdict = Verdict(OTHER, likely_cause=delay)
    elif graph.origin.unlike_float and verdict.is_same:
        verdict = Verdict(POOR, likely_cause=graph.origin.unlike_float)
    return Report(
        examples,
        running_kernels,
        figures.outputs,
        verdict,
        tensors,
        merged,
        find_float_operations(graph, file_graph),
        (*notes, *pixel_notes),
        arena,
        file.runtime,
        packed_weights,
        refused,
    )


def _open(
    contents: bytes, graph: ResolvedGraph, kernels: Kernels | None, runtime: Runtime | None
) -> tuple[FileInterpreter, KernelFamily | None, str]:
    """Open a file with the requested kernels, or with the kernels of the model's target.

    Files for Ethos-U run in TFLite Micro, which may lack operators of the file. Then TFLite runs
    the file instead.

    Returns:
        `(file, family, missing)`: usually `(file, None, "")`. If TFLite replaces TFLite Micro,
        `family` describes TFLite's kernels, and `missing` names the operators that are lacking.
    """
    try:
        name = kernels or graph.origin.file_family.name
        return open_file(contents, name, runtime, is_checked=True), None, ""
    except Refusal as error:
        target = graph.origin.target
        if kernels or target is None or not target.elsewhere:
            raise
        found = problems(contents, target.host) if target.host else ()
        missing = [f"{problem.operator}: {problem.reason}" for problem in found]
        refused = ", ".join(dict.fromkeys(missing)) or str(error)
    try:
        return open_file(contents, REFERENCE.name, runtime, is_checked=True), REFERENCE, refused
    except ValueError:  # TFLite has no reference kernel of ELU.
        return open_file(contents, XNNPACK.name, runtime, is_checked=True), XNNPACK, refused
