"""Runs `predict` and `evaluate` in TFLite's interpreter if it is faster than TensorFlow.

The interpreter needs a file, which must be written again after weights change. Writing takes time,
so TensorFlow computes the first batches. Once they have taken as long as writing would,
`FileInference` writes the file. The interpreter and TensorFlow then compute the same batch. If the
outputs are equal and the interpreter is faster, it computes all later batches. `Inference.choose`
in `keras_inference.py` decides which models use `FileInference`.
"""

from __future__ import annotations

import os
import platform
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Literal, get_args

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from keras_qat.arithmetic.kernel_families import KernelFamily
from keras_qat.graph.calls import Graph, flatten_values
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.messages import silent, warn_caller
from keras_qat.tflite.interpreter import FileInterpreter, dequantize

InferenceRuntime = Literal["auto", "tensorflow", "interpreter"]

MACHINES = {
    "xnnpack": ("x86_64", "AMD64"),
    "xnnpack_arm64": ("aarch64", "arm64"),
    "reference": ("x86_64", "AMD64", "aarch64", "arm64"),
}
"""Maps a kernel family to the processors on which TFLite's interpreter has these kernels."""

TRIALS = 3
"""If the interpreter is slower in this number of batches, only TensorFlow is used."""

WRITERS: list[Callable[[ResolvedGraph], bytes]] = []
"""Contains one function, which writes a resolved graph as a file. `export` adds the function."""


def check_runtime(runtime: InferenceRuntime) -> InferenceRuntime:
    if runtime not in get_args(InferenceRuntime):
        names = ", ".join(map(repr, get_args(InferenceRuntime)))
        raise ValueError(f"runtime={runtime!r}: use one of {names}.")
    return runtime


def find_obstacle(graph: ResolvedGraph, family: KernelFamily) -> str:
    """Returns the reason why the interpreter cannot run a model, or ""."""
    origin = graph.origin
    if platform.machine() not in MACHINES.get(family.name, ()):
        return f"the interpreter has no kernels '{family.name}' on this processor"
    if origin.fixed_batch is not None or (origin.target and origin.target.batch_size is not None):
        return "the batch size is fixed"
    if origin.target and origin.target.kernels != family.name:
        return "the file is for other kernels"
    if any(node.computes_in_float for node in graph.nodes):
        return "layers stay in float"
    return ""


def _count_threads() -> int:
    """Return the number of threads that TensorFlow uses for one operation."""
    chosen = tf.config.threading.get_intra_op_parallelism_threads()
    chosen = chosen or int(os.environ.get("TF_NUM_INTRAOP_THREADS", "0"))
    available = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
    return chosen or len(available)


class FileInference:
    """Computes a model's outputs in the interpreter, if the interpreter is faster than TensorFlow.

    Args:
        graph: the calls of the Keras model.
        family: the kernel family that determines the rounding of the model.
        resolve: function that returns the resolved graph with the current ranges and weights.
    """

    def __init__(
        self, graph: Graph, family: KernelFamily, resolve: Callable[[], ResolvedGraph]
    ) -> None:
        self.obstacle = ""
        """The reason why only TensorFlow computes batches. "" if the interpreter can be used."""
        self._name, self._family, self._resolve = graph.name, family, resolve
        self._types = [value.inference_dtype for value in flatten_values(graph.outputs)]
        self._inputs: list[str] = []
        self._outputs: list[str] = []
        """`_inputs` and `_outputs` are the names of the file's inputs and outputs."""
        self._lock = threading.Lock()
        self._version = 0
        self._file: FileInterpreter | None = None
        self._trials, self._is_trusted, self._compares_speed = TRIALS, False, True
        self._cost = self._spent = self._saved = self._saving = self._last = 0.0
        """Seconds. `_cost`: time to write the file. `_spent`: time in TensorFlow with the current
        weights. `_saved`: time saved by the interpreter with these weights. `_saving`: time saved
        per batch. `_last`: time of the last batch in TensorFlow."""

    def prepare(self, version: int, cost: float, at_once: bool) -> bool:
        """Writes the file if TensorFlow has already computed for as long as writing takes.

        Returns False if the interpreter cannot run the model.

        Args:
            version: a number that changes when weights change.
            cost: estimated time in seconds to write the file.
            at_once: whether to write the file before the first batch.
        """
        if version != self._version:
            # Each epoch repeats a validation. If the last file saved time, the next will, too.
            paid, self._version = self._saved > self._cost, version
            self._file, self._is_trusted, self._saved = None, False, 0.0
            self._spent = self._cost if paid else 0.0
        self._cost = self._cost or cost
        if not self.obstacle and self._file is None and (at_once or self._spent >= self._cost):
            start = perf_counter()
            try:
                self._open()
            except Exception as error:  # `predict` must not fail.
                self.obstacle = str(error)
            self._cost = perf_counter() - start
        self._compares_speed = not at_once
        return not self.obstacle

    def _open(self) -> None:
        graph = self._resolve()
        self.obstacle = find_obstacle(graph, self._family)
        if self.obstacle:
            return
        self._inputs, self._outputs = list(graph.inputs), list(graph.outputs)
        with silent(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            contents = WRITERS[0](graph)
        self._file = FileInterpreter(contents, self._family.name, threads=_count_threads())

    def _give_up(self, obstacle: str) -> None:
        self.obstacle, self._file = obstacle, None

    def __call__(
        self, inputs: Sequence[tf.Tensor], compute: Callable[..., list[tf.Tensor]]
    ) -> list[tf.Tensor]:
        """Returns the interpreter's outputs, or the results of `compute` in TensorFlow.

        `compute` runs while there is no file, and for batches in which the outputs are compared.
        """
        me = weakref.ref(self)  # TensorFlow keeps Python functions forever.

        def run(*arrays: NDArray) -> list[object]:
            return me()._run(arrays)  # type: ignore[union-attr]

        def compare(*values: NDArray) -> None:
            me()._compare(values)  # type: ignore[union-attr]

        types = [tf.bool, tf.float64, tf.float64, *self._types]
        with tf.device("CPU:0"):
            results = tf.numpy_function(run, inputs, types)
        is_done, start, seconds, *outputs = results

        def compute_otherwise() -> list[tf.Tensor]:
            computed = compute(*inputs)
            with tf.device("CPU:0"):
                compared = tf.numpy_function(compare, [start, seconds, *outputs, *computed], [])
            with tf.control_dependencies([compared]):
                return [tf.identity(y) for y in computed]

        return list(tf.cond(is_done, lambda: outputs, compute_otherwise))

    def _run(self, inputs: Sequence[NDArray]) -> list[object]:
        """Run the interpreter, if there is a file. Return `[is_done, end time, seconds, *outputs]`.

        `is_done` is False if TensorFlow must compute the batch, too. `seconds` is the time needed.
        """
        outputs = [np.zeros(0, dtype) for dtype in self._types]
        start = seconds = 0.0
        with self._lock:
            if self._file is not None:
                start = perf_counter()
                try:
                    raw = self._file.run_once(dict(zip(self._inputs, inputs, strict=True)))
                except (ValueError, RuntimeError) as error:  # Unsupported shapes.
                    self._give_up(str(error))
                else:
                    ends = [(raw[name], self._file.outputs[name]) for name in self._outputs]
                    results = [dequantize(q, end.scale, end.zero_point) for q, end in ends]
                    outputs = list(map(np.asarray, results, self._types))
                    seconds = perf_counter() - start
                    self._saved += self._saving
        is_done = self._file is not None and self._is_trusted
        return [is_done, np.float64(perf_counter()), np.float64(seconds), *outputs]

    def _compare(self, values: Sequence[NDArray]) -> None:
        """Store how long TensorFlow took. Compare its outputs with the outputs of the file."""
        start, in_file, *tensors = values
        seconds, count = perf_counter() - float(start), len(self._types)
        self._spent += min(seconds, self._last)  # The first batch also optimizes the graph.
        self._last = seconds
        file = self._file
        if not in_file or file is None:
            return
        pairs = zip(tensors[:count], tensors[count:], self._outputs, strict=True)
        differing = [name for y, other, name in pairs if not np.array_equal(y, other)]
        if differing:
            self._give_up("it returned other values")
            warn_caller(
                f"TFLite's interpreter ({file.runtime}) returned other values for output "
                f"'{differing[0]}' of '{self._name}' than the model's arithmetic, so `predict` and "
                f"`evaluate` compute with TensorFlow. keras_qat.verify(model, file, data) "
                f"shows where they differ."
            )
            return
        self._saving = seconds - float(in_file)
        self._trials -= 1
        self._is_trusted = self._saving > 0 or not self._compares_speed
        if not self._trials and not self._is_trusted:
            self._give_up("it is slower than TensorFlow")
