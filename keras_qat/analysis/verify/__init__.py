"""Verification: does the exported file compute what training simulated?"""

from __future__ import annotations

import dataclasses
import os
import warnings
from typing import Any

from keras_qat.analysis.verify.compare_layers import compare_layers, float_outputs
from keras_qat.analysis.verify.compare_outputs import (
    check_match,
    compare_outputs,
    predictions,
    range_in_file,
)
from keras_qat.analysis.verify.match_tensors import float_operations
from keras_qat.analysis.verify.preconditions import doubts
from keras_qat.analysis.verify.report import Agreement, OutputReport, Report, TensorReport
from keras_qat.frontend.keras2.backend import one_at_a_time
from keras_qat.integer_graph.resolve import resolve
from keras_qat.io.data import arrays_of, check_counts, packed
from keras_qat.tflite.interpreter import Kernels, Runtime, to_pixels
from keras_qat.tflite.metadata import rescaled_inputs
from keras_qat.tflite.micro_interpreter import MicroInterpreter, open_file
from keras_qat.tflite.reader import FileGraph
from keras_qat.tflite.schema import contents_of
from keras_qat.training.layers.recurrent.states import Stream
from keras_qat.training.schedule import check_quantized

__all__ = ["Agreement", "OutputReport", "Report", "TensorReport", "verify"]


@one_at_a_time
def verify(
    model: Any,
    tflite: str | os.PathLike[str] | bytes,
    x: Any,
    *,
    per_layer: bool = False,
    kernels: Kernels | None = None,
    runtime: Runtime | None = None,
    batch_size: int = 32,
    verbose: int = 0,
) -> Report:
    """Runs the quantization-aware model and its TFLite file on `x` and compares them.

    Args:
        model: the model the file was exported from.
        tflite: path or contents of the file.
        x: inputs, as `model.predict` or TFLite's converter take them: an array, a list or dict of
            arrays, a `tf.data.Dataset`, a generator or a function that makes one. Labels that come
            along are ignored. They are held in memory. A model that keeps states
            (`stateful=True`) and its file begin with zeros, and go on from batch to batch.
        per_layer: whether to compare every tensor that both sides have, in a free run and with
            each layer fed what the model computed before it, so that the layer that differs is
            named. Holds the tensors of one batch in memory.
        kernels: which kernels compute the file: "xnnpack" (as on phones), "optimized" (TFLite's
            own), "reference" (its portable ones), or "tflm": the file, exported with
            `batch_size=1`, runs in TFLite Micro, as on microcontrollers. By default those of the
            model's target, without one "xnnpack".
        runtime: the package whose interpreter runs the file, "ai-edge-litert", "tensorflow" or
            "tflite-runtime", by default the first that is installed: some operators are computed
            otherwise in some versions (docs/runtimes.md). `report.runtime` says what ran.
        batch_size: how many examples to run at a time.
        verbose: 1 shows progress.

    Returns:
        A report that prints as a table, and draws itself with `plot`. Its `notes` say, as warnings
        do, what makes them differ before any rounding does: a model in which quantization has not
        begun, a file of other weights or of another model, inputs beyond the ranges.

    Raises:
        ValueError: if the model is not quantized, the file is damaged or not one of this model, or
            the inputs are not what the model takes.
        ImportError: for "tflm" without the package `tflite-micro`; if `runtime` is not installed.

    Example:
        >>> print(keras_qat.verify(qat, "model.tflite", x_test, per_layer=True))
    """
    check_counts(batch_size=batch_size)
    check_quantized(model, ": verify what was exported.")
    graph = resolve(model)
    contents = contents_of(tflite)
    computing = kernels or graph.origin.file_family.name
    file = open_file(contents, computing, runtime)
    inputs = dict(zip(graph.inputs, arrays_of(graph.origin.inputs, x), strict=True))
    check_match(file, graph)
    input_range = range_in_file(graph, file)
    if input_range is not None:
        graph = resolve(model, input_range=input_range)
    pixels = {
        name: to_pixels(inputs[name], *each) for name, each in rescaled_inputs(contents).items()
    }
    given = inputs | pixels
    file_graph = FileGraph(contents)
    notes = (*graph.origin.warnings, *doubts(graph, file, file_graph, contents, given))
    for note in notes:
        warnings.warn(note, stacklevel=3)  # It is called in turn.
    examples = len(next(iter(inputs.values())))
    arena = file.arena_size() if isinstance(file, MicroInterpreter) else None
    batch_size = graph.origin.batch_size(examples, batch_size)
    with Stream(graph.origin.states):
        codes = file.run(given, batch_size, verbose)
        # The one use of the model itself: its own predictions are what the file has to return.
        expected = predictions(
            model, packed(graph.origin.inputs, list(inputs.values())), batch_size, verbose
        )
    traces = getattr(model, "_float_traces", None)
    if traces is None:  # Past Keras, which would track them.
        traces = {}
        object.__setattr__(model, "_float_traces", traces)
    exact = float_outputs(graph, inputs, batch_size, traces)
    outputs = tuple(compare_outputs(graph, file, codes, expected, exact))
    if not per_layer:
        in_float = float_operations(graph, file_graph)
        report = Report(examples, computing, outputs, float_operations=in_float)
    else:
        batch_size = file.batch_size or batch_size
        report = compare_layers(
            graph, contents, inputs, given, computing, batch_size, outputs, verbose, runtime
        )
    return dataclasses.replace(report, notes=notes, arena_size=arena, runtime=file.runtime)
