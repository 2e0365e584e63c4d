"""Integer simulation: computes the results of an exported file without the file."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from keras_qat.arithmetic.kernel_families import KernelFamily, kernel_family
from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.integer_graph.execute import Prepared, prepare, run
from keras_qat.integer_graph.float_nodes import compute_in_float
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.passes import pack_if_requested
from keras_qat.integer_graph.resolve import resolve_to_export
from keras_qat.io.counts import check_counts
from keras_qat.io.data import read_arrays, show_progress
from keras_qat.io.inputs import explain_batch_size
from keras_qat.keras2.backend import keras, one_at_a_time
from keras_qat.messages import ByName
from keras_qat.ops.node import Tensor
from keras_qat.ops.op import get_held_dtype
from keras_qat.training.quantizers import PREFIX
from keras_qat.training.recurrent import Stream


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedArray:
    """Quantized values of a tensor.

    Args:
        codes: the quantized values, int8 or int16.
        params: the quantization parameters.
    """

    codes: NDArray
    params: QuantParams

    @property
    def scale(self) -> np.float32:
        """The float value of one step."""
        return np.float32(self.params.scale)

    @property
    def zero_point(self) -> int:
        """The quantized value of zero."""
        return int(self.params.zero_point)

    @property
    def values(self) -> NDArray[np.float32]:
        """The float values."""
        return self.params.dequantize(self.codes)


@dataclasses.dataclass(frozen=True)
class Simulation:
    """The result of a simulation.

    Args:
        kernels: name of the kernel family.
        outputs: each output of the model by name: a `QuantizedArray`, or a float array.
        tensors: each quantized tensor of the model by its name in the float model.
        float_layers: layers that the file computes in float. TFLite may round their results
            differently, so later quantized values may differ from the file by one.
    """

    kernels: str
    outputs: dict[str, Any]
    tensors: dict[str, QuantizedArray]
    float_layers: tuple[str, ...]


@one_at_a_time
def simulate(
    model: keras.Model,
    x: Any,
    kernels: str | None = None,
    *,
    input_range: tuple[float, float] | None = None,
    pack_int4: bool | None = None,
    batch_size: int = 32,
    verbose: int = 0,
) -> Simulation:
    """Computes exactly the quantized values that the exported file returns.

    Args:
        model: a trained quantization-aware model.
        x: inputs, as for `verify`: float values, or quantized values with the type int8 or int16.
            States of a stateful model start at zero, and are kept between batches.
        kernels: the kernel family that determines the rounding: "xnnpack" (x86), "xnnpack_arm64"
            (phones with 64-bit ARM), "tflm" (TFLite Micro) or "reference" (TFLite's portable
            kernels). The default is the target's family, or "xnnpack" without a target.
        input_range: minimum and maximum of the model's inputs if they have no quantizer, as in
            `recipes.contrib`. By default, these inputs and their consumers are float.
        pack_int4: whether weights are packed in 4 bits, as in `export_tflite`. The default is
            `model.pack_int4`.
        batch_size: the batch size.
        verbose: 1 shows progress.

    Returns:
        The quantized values of the outputs and of every quantized tensor of the model.

    Raises:
        ValueError: if the model is not quantized, a quantizer has no usable range, the inputs do
            not fit the model, or the kernel family is unknown.

    Example:
        >>> golden = keras_qat.simulate(qat, x_test, kernels="reference")
        >>> golden.outputs["logits"].codes, golden.outputs["logits"].scale
    """
    check_counts(batch_size=batch_size)
    graph = resolve_to_export(model, input_range=input_range)
    family = kernel_family(kernels) if kernels else graph.origin.file_family
    graph = pack_if_requested(graph, pack_int4, family)
    return run_examples(graph, x, family, batch_size, verbose)


def run_examples(
    graph: ResolvedGraph, x: Any, family: KernelFamily, batch_size: int = 32, verbose: int = 0
) -> Simulation:
    """Computes a resolved graph for all examples. `x` and the options are as in `simulate`."""
    arrays = read_arrays(graph.origin.inputs, x)
    batch_size = graph.origin.batch_size(len(arrays[0]), batch_size)
    named = {tensor.label: tensor for tensor in graph.tensors.values() if tensor.params}
    wanted = {*graph.outputs.values(), *named.values()}
    batches: dict[Tensor, list[NDArray]] = {tensor: [] for tensor in wanted}
    stream, prepared = Stream(graph.origin.states), prepare(graph, family)
    for start in show_progress(range(0, len(arrays[0]), batch_size), "The simulation", verbose):
        batch = [array[start : start + batch_size] for array in arrays]
        with stream, explain_batch_size(graph.name, graph.origin.fixed_batch, len(batch[0])):
            tensors = run_batch(graph, batch, family, prepared)
        for tensor in wanted:
            batches[tensor].append(tensors[tensor])
    per_example = set(graph.inputs.values())
    for node in graph.nodes:
        if per_example.intersection(x for x in node.inputs if isinstance(x, Tensor)):
            per_example.update(node.outputs)

    def concatenate(tensor: Tensor) -> Any:
        # Tensors that do not depend on examples, such as weights, are equal in all batches.
        first = batches[tensor][0]
        is_batched = tensor in per_example and first.ndim > 0
        axis = tensor.shape.index(None) if None in tensor.shape else 0  # [2, batch, ...]: stacked.
        values = np.concatenate(batches[tensor], axis) if is_batched else first
        return values if tensor.params is None else QuantizedArray(values, tensor.params)

    float_layers = [
        node.call.name.removeprefix(PREFIX) for node in graph.nodes if node.computes_in_float
    ]
    return Simulation(
        family.name,
        ByName({name: concatenate(tensor) for name, tensor in graph.outputs.items()}),
        ByName({label: concatenate(tensor) for label, tensor in named.items()}),
        tuple(dict.fromkeys(float_layers)),
    )


def run_batch(
    graph: ResolvedGraph, batch: list[NDArray], family: KernelFamily, prepared: Prepared
) -> dict[Tensor, NDArray]:
    """Returns all tensors for a batch. Tensors with `params` contain quantized values."""
    tensors = graph.inputs.values()
    inputs = [_to_tensor(x, tensor, prepared) for x, tensor in zip(batch, tensors, strict=True)]
    return {
        tensor: np.asarray(values)
        if tensor.params is None
        else (np.asarray(values) + tensor.params.zero_point).astype(tensor.params.dtype)
        for tensor, values in run(graph, inputs, family, compute_in_float, prepared).items()
    }


def _to_tensor(x: NDArray, tensor: Tensor, prepared: Prepared) -> tf.Tensor:
    """Convert an input for `run`, which expects quantized values minus the zero point."""
    params = tensor.params
    if params is None:
        return tf.constant(x, tensor.dtype)
    if x.dtype == params.dtype:
        dtype = get_held_dtype(params).as_numpy_dtype
        return tf.constant(x.astype(dtype) - dtype(params.zero_point))
    return prepared.quantize(tf.constant(x, tf.float32), tensor)
