"""Matches the tensors of a model and of its TFLite file by their names."""

from __future__ import annotations

import dataclasses
from collections.abc import Container

import numpy as np

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.graph.calls import Value, flatten_values
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.ops.node import Tensor as ModelTensor
from keras_qat.tflite.reader import FileGraph, Tensor
from keras_qat.tflite.schema import SCOPE, find_scope
from keras_qat.training.layers import Quantize, QuantizeWrapper
from keras_qat.training.quantizers import PREFIX
from keras_qat.training.readiness import list_some

NEAR = 8
"""Scales that differ by up to this many units in the last place (ULP) of float32 count as equal."""


class UnknownLayers(ValueError):
    """Raised if the names of a file's tensors are not names of the model's layers."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """A tensor that file and model have in common.

    Args:
        name: the layer of the float model that computes the tensor. If the model calls the layer
            again, the name has a number. For fused layers, it is the layer with weights.
        layers: names of the layers that compute this tensor from the tensors of earlier pairs.
        value: the tensor in the quantization-aware Keras model.
        ours: the same tensor in the model's graph of integer operators.
        tensor: the same tensor in the file.
    """

    name: str
    layers: tuple[str, ...]
    value: Value
    ours: ModelTensor
    tensor: Tensor

    @property
    def params(self) -> QuantParams | None:
        """The tensor's quantization parameters in the model. None if it is float there."""
        return self.ours.params

    @property
    def scale_ulps(self) -> int | None:
        """Difference between the scales in file and model, in units in the last place (ULP)."""
        if self.params is None:
            return None
        ends = np.array([self.params.scale, self.tensor.scale], np.float32).view(np.int32)
        return abs(int(ends[0]) - int(ends[1]))

    @property
    def has_same_range(self) -> bool:
        """Whether scale and zero point are the same in file and model."""
        ulps = self.scale_ulps
        if self.params is None or ulps is None:
            return True
        offset = 128 if self.tensor.dtype == np.uint8 else 0
        return ulps <= NEAR and self.params.zero_point + offset == self.tensor.zero_point


def match_tensors(resolved: ResolvedGraph, file: FileGraph) -> tuple[list[Pair], tuple[str, ...]]:
    """Matches the tensors of a quantization-aware model and of its file by their names.

    Returns:
        The matching tensors in the order of computation. Also the names of layers without an output
        in the file, for example a Conv2D that is fused with a ReLU.

    Raises:
        UnknownLayers: if the file was not exported from this model by this version of keras_qat.
    """
    _check_scopes(resolved, file)
    by_name = {tensor.name: tensor for tensor in file.tensors}
    ends = {
        tensor: in_file[name]
        for ours, in_file in ((resolved.inputs, file.inputs), (resolved.outputs, file.outputs))
        for name, tensor in ours.items()
        if name in in_file
    }
    tensors: dict[Value, tuple[ModelTensor, Tensor]] = {}
    merged: list[Value] = []
    for tensor, value in resolved.values.items():
        match = by_name.get(f"{SCOPE}/{tensor.name}", ends.get(tensor))
        if match is not None and match.is_quantized:
            tensors[value] = tensor, match
        elif tensor.params is not None:
            merged.append(value)
    pairs = [
        Pair(_get_layer_name(value), _name_layers_between(value, tensors), value, *both)
        for value, both in tensors.items()
    ]
    return pairs, tuple(dict.fromkeys(map(_get_layer_name, merged)))


def find_float_operations(resolved: ResolvedGraph, file: FileGraph) -> dict[str, str]:
    """Maps each layer that the file computes in float to its operators, such as "ADD, MUL"."""
    scopes = _list_scopes(resolved)
    kernels_of: dict[str, list[str]] = {}
    for operation in file.operations:
        outputs = [file.tensors[index] for index in operation.outputs]
        floats = [tensor for tensor in outputs if tensor.dtype.kind == "f"]
        if floats and operation.kernel != "DEQUANTIZE":
            scope = find_scope(floats[0].name, scopes)
            name = scope.removeprefix(PREFIX) if scope else floats[0].name.split(";")[0]
            kernels_of.setdefault(name, []).append(operation.kernel)
    return {name: ", ".join(dict.fromkeys(kernels)) for name, kernels in kernels_of.items()}


def _list_scopes(resolved: ResolvedGraph) -> set[str]:
    outputs = [tensor for node in resolved.nodes for tensor in node.outputs]
    tensors = {tensor.name for tensor in [*resolved.inputs.values(), *outputs]}
    return tensors | {node.name for node in resolved.nodes}


def _check_scopes(resolved: ResolvedGraph, file: FileGraph) -> None:
    ends = {tensor.index for tensor in [*file.inputs.values(), *file.outputs.values()]}
    computed_names = [
        file.tensors[index].name
        for operation in file.operations
        for index in operation.outputs
        if index not in ends
    ]
    ours = [name for name in computed_names if name.startswith(f"{SCOPE}/")]
    if not ours and computed_names:
        raise UnknownLayers(
            "The TFLite file does not name its layers: it was not written by this version of "
            "keras_qat.export_tflite. Export it again, or leave out per_layer=True."
        )
    scopes = _list_scopes(resolved)
    unknown = [name for name in ours if find_scope(name, scopes) is None]
    if unknown:
        names = [name.split(";")[0].removeprefix(f"{SCOPE}/") for name in unknown]
        raise UnknownLayers(
            f"The TFLite file belongs to another model: it has layers that the model lacks, "
            f"{list_some(names)}. Pass the model that the file was exported from."
        )


def _name_layers_between(value: Value, known: Container[Value]) -> tuple[str, ...]:
    """Return the float model's layers on the paths from `known` values to `value`."""
    names: list[str] = []
    pending = [value]
    while pending:
        current = pending.pop(0)
        call = current.producer
        if call is None or (current is not value and current in known):
            continue
        layer = call.layer
        if isinstance(layer, QuantizeWrapper):
            path = layer.name.removeprefix(PREFIX).removesuffix(layer.layer.name)
            names += [path + sublayer.name for sublayer in reversed(layer.sublayers)]
        elif not isinstance(layer, Quantize):
            names.append(_get_layer_name(current))
        pending += flatten_values(call.args) if isinstance(layer, Quantize) else call.inputs
    return tuple(dict.fromkeys(reversed(names)))


def _get_layer_name(value: Value) -> str:
    producer = value.producer
    if producer is not None and isinstance(producer.layer, Quantize):
        return _get_layer_name(producer.args[0])
    return value.name.removeprefix(PREFIX)
