"""The integer simulation: what the exported file computes, without the file."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.kernel_families import KernelFamily, kernel_family
from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.config.arguments import answers_unknown
from keras_qat.integer_graph.execute import Prepared, prepare, run
from keras_qat.integer_graph.float_nodes import compute_in_float
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.passes import as_asked
from keras_qat.integer_graph.resolve import resolve_to_export
from keras_qat.io.counts import check_counts
from keras_qat.io.data import read_arrays, show_progress
from keras_qat.keras2.backend import one_at_a_time
from keras_qat.messages import ByName
from keras_qat.ops.node import Tensor
from keras_qat.ops.op import get_held_dtype
from keras_qat.training.quantizers import PREFIX
from keras_qat.training.recurrent import Stream


@dataclasses.dataclass(frozen=True, eq=False)
class Codes:
    """Quantized values of a tensor.

    Args:
        codes: its quantized values, int8 or int16.
        params: its quantization parameters.
    """

    codes: np.ndarray
    params: QuantParams

    @property
    def scale(self) -> np.float32:
        """The real value of one LSB."""
        return np.float32(self.params.scale)

    @property
    def zero_point(self) -> int:
        """The quantized value of zero."""
        return int(self.params.zero_point)

    @property
    def values(self) -> np.ndarray:
        """The real values, float32."""
        return self.params.dequantize(self.codes)


@dataclasses.dataclass(frozen=True)
class Simulation:
    """The result of a simulation.

    Args:
        kernels: name of the kernel family.
        outputs: each output of the model by name: `Codes`, or an array if it is not quantized.
        tensors: each quantized tensor inside, by its name in the float model.
        float_layers: layers that the file computes in float. What follows from them may differ in
            single quantized values.
    """

    kernels: str
    outputs: dict[str, Any]
    tensors: dict[str, Codes]
    float_layers: tuple[str, ...]


@one_at_a_time
@answers_unknown()
def simulate(
    model: Any,
    x: Any,
    kernels: str | None = None,
    *,
    input_range: tuple[float, float] | None = None,
    pack_int4: bool | None = None,
    batch_size: int = 32,
    verbose: int = 0,
) -> Simulation:
    """Computes in integers exactly the quantized values that the exported file returns.

    Args:
        model: a trained quantization-aware model.
        x: inputs, as `verify` takes them; real numbers, or quantized values of its type. A model
            that keeps states (`stateful=True`) begins with zeros, and goes on from batch to batch.
        kernels: the kernel family whose rounding is used: "xnnpack" (on x86), "xnnpack_arm64"
            (phones: 64-bit ARM), "tflm" (TFLite Micro: microcontrollers) or "reference" (TFLite's
            portable kernels). The default is that of the model's target, or "xnnpack" without one.
        input_range: minimum and maximum of inputs that have no quantizer, as those of
            `recipes.contrib`. Without it such inputs and the layers that read them are float.
        pack_int4: whether the file holds weights in 4 bits, as in `export_tflite`; by default as
            `model.pack_int4` says.
        batch_size: the number of examples that are computed at a time.
        verbose: 1 shows progress.

    Returns:
        The quantized values of the outputs and of every quantized tensor inside.

    Raises:
        ValueError: if the model is not quantized, a quantizer has no usable range, the inputs are
            not what the model takes, or the kernel family is unknown.

    Example:
        >>> golden = keras_qat.simulate(qat, x_test, kernels="reference")
        >>> golden.outputs["logits"].codes, golden.outputs["logits"].scale
    """
    check_counts(batch_size=batch_size)
    graph = resolve_to_export(model, input_range=input_range)
    family = kernel_family(kernels) if kernels else graph.origin.file_family
    graph = as_asked(graph, pack_int4, family)
    return run_examples(graph, x, family, batch_size, verbose)


def run_examples(
    graph: ResolvedGraph, x: Any, family: KernelFamily, batch_size: int = 32, verbose: int = 0
) -> Simulation:
    """Computes a graph for all examples. Arguments are those of `simulate`."""
    arrays = read_arrays(graph.origin.inputs, x)
    batch_size = graph.origin.batch_size(len(arrays[0]), batch_size)
    labels = {tensor.label: tensor for tensor in graph.tensors.values() if tensor.params}
    outputs: dict[str, list[Any]] = {name: [] for name in graph.outputs}
    inside: dict[str, list[Any]] = {label: [] for label in labels}
    stream, numbers = Stream(graph.origin.states), prepare(graph, family)
    for start in show_progress(range(0, len(arrays[0]), batch_size), "The simulation", verbose):
        batch = [array[start : start + batch_size] for array in arrays]
        with stream:
            tensors = run_batch(graph, batch, family, numbers)
        for name, tensor in graph.outputs.items():
            outputs[name].append(tensors[tensor])
        for label, tensor in labels.items():
            inside[label].append(tensors[tensor])
    of_examples = set(graph.inputs.values())
    for node in graph.nodes:
        if of_examples.intersection(x for x in node.inputs if isinstance(x, Tensor)):
            of_examples.update(node.outputs)

    def joined(parts: list[np.ndarray], tensor: Tensor) -> Any:
        """Joins all batches; of tensors without examples, such as weights, returns the first."""
        has_examples = tensor in of_examples and parts[0].ndim > 0
        values = np.concatenate(parts) if has_examples else parts[0]
        return values if tensor.params is None else Codes(values, tensor.params)

    in_float = [
        node.call.name.removeprefix(PREFIX) for node in graph.nodes if node.computes_in_float
    ]
    return Simulation(
        family.name,
        ByName({name: joined(parts, graph.outputs[name]) for name, parts in outputs.items()}),
        ByName({label: joined(parts, labels[label]) for label, parts in inside.items()}),
        tuple(dict.fromkeys(in_float)),
    )


def run_batch(
    graph: ResolvedGraph, batch: list[np.ndarray], family: KernelFamily, numbers: Prepared
) -> dict[Tensor, np.ndarray]:
    """Computes all tensors for a batch: quantized values, or real ones where not quantized."""
    tensors = graph.inputs.values()
    inputs = [_as_input(x, tensor, numbers) for x, tensor in zip(batch, tensors, strict=True)]
    return {
        tensor: np.asarray(values)
        if tensor.params is None
        else (np.asarray(values) + tensor.params.zero_point).astype(tensor.params.dtype)
        for tensor, values in run(graph, inputs, family, compute_in_float, numbers).items()
    }


def _as_input(x: np.ndarray, tensor: Tensor, numbers: Prepared) -> Any:
    """Converts an input to what `run` takes; real numbers are quantized as for the file."""
    params = tensor.params
    if params is None:
        return tf.constant(x, tensor.dtype)
    if x.dtype == params.dtype:
        dtype = get_held_dtype(params).as_numpy_dtype
        return tf.constant(x.astype(dtype) - dtype(params.zero_point))
    return numbers.quantized(tf.constant(x, tf.float32), tensor)
