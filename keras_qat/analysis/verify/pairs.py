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
"""Maximum difference of equal scales, in units in the last place of float32. Another program may
compute the same scale in another order."""


class UnknownLayers(ValueError):
    """Raised if a file does not name the model's layers. Earlier versions wrote such files."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """A tensor that file and model have in common.

    Args:
        name: the layer of the float model that computes the tensor, with the number of the call. If
            layers are fused, the name is the layer with weights.
        layers: all layers between the previous common tensors and this tensor.
        value: the tensor of the quantization-aware model.
        ours: the tensor of the resolved graph.
        tensor: the tensor of the file.
    """

    name: str
    layers: tuple[str, ...]
    value: Value
    ours: ModelTensor
    tensor: Tensor

    @property
    def params(self) -> QuantParams | None:
        """The model's quantization parameters. None if only the file quantizes the tensor."""
        return self.ours.params

    @property
    def scale_ulps(self) -> int | None:
        """Distance between the scales of file and model, in units in the last place of float32."""
        if self.params is None:
            return None
        ends = np.array([self.params.scale, self.tensor.scale], np.float32).view(np.int32)
        return abs(int(ends[0]) - int(ends[1]))

    @property
    def has_same_range(self) -> bool:
        """Whether a quantized value stands for the same float value in file and model."""
        ulps = self.scale_ulps
        if self.params is None or ulps is None:
            return True
        offset = 128 if self.tensor.dtype == np.uint8 else 0
        return ulps <= NEAR and self.params.zero_point + offset == self.tensor.zero_point


def match_tensors(resolved: ResolvedGraph, file: FileGraph) -> tuple[list[Pair], tuple[str, ...]]:
    """Matches the tensors of a quantization-aware model and of its file by their names.

    Returns:
        The common tensors in the order of computation, and the layers without a common tensor.

    Raises:
        UnknownLayers: if the file does not name its layers, or has layers that the model lacks.
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
    """Returns a dict from layers to their float operators in the file, such as "ADD, MUL"."""
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
            f"{list_some(names)}. Verify the model that the file was exported from."
        )


def _name_layers_between(value: Value, known: Container[Value]) -> tuple[str, ...]:
    """Return the names of the user's layers from the last `known` values to `value`."""
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
    """Return the float model's name of the layer that computes a value."""
    producer = value.producer
    if producer is not None and isinstance(producer.layer, Quantize):
        return _get_layer_name(producer.args[0])
    return value.name.removeprefix(PREFIX)
