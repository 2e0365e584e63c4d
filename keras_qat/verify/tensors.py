"""Which tensor of a TFLite file is which tensor of the model."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from keras_qat import fake_quant
from keras_qat.export.names import SCOPE, as_scope, in_scope, scope_of
from keras_qat.flatbuffer import FileGraph, Tensor
from keras_qat.keras2.graph import Call, Graph, Value, values_in
from keras_qat.kinds import RANGE_KEEPING, ROUNDING, kind_of
from keras_qat.layers import Quantize, QuantizeWrapper
from keras_qat.rewrite import PREFIX

__all__ = ["Levels", "Pair", "Pairing", "float_operations", "levels_of", "pair"]

NEAR = 8
"""Ranges that are not further apart than this, in units of the last place of float32, are equal:
converters compute the same scale in another order. Over 256 codes it is no ten-thousandth step."""


@dataclasses.dataclass(frozen=True)
class Levels:
    """The codes that a tensor of the model can hold, as int8 or int16.

    Args:
        scale: real value of one step.
        zero_point: the code of 0.
        bits: 2 to 8, whose codes begin at -128 whatever their number; or 16.
    """

    scale: float
    zero_point: int
    bits: int

    @classmethod
    def of(cls, quantizer: Any) -> Levels:
        """Those of a trained quantizer."""
        minimum, maximum = quantizer.current_range()
        bits = quantizer.spec.bits
        scale, zero_point = fake_quant.scale_of(minimum, maximum, bits)
        return cls(float(np.float32(scale)), zero_point - 2 ** (max(bits, 8) - 1), bits)


@dataclasses.dataclass(frozen=True)
class Pair:
    """A tensor that both sides have.

    Args:
        name: the layer of the user's float model that computes it (and the number of its call);
            that with the kernel, if others are merged into it.
        layers: all layers between it and the tensors before it that both sides have.
        value: the tensor of the quantization-aware model.
        tensor: that of the file.
        levels: the model's codes; None if only the file quantizes it.
    """

    name: str
    layers: tuple[str, ...]
    value: Value
    tensor: Tensor
    levels: Levels | None

    @property
    def scale_ulps(self) -> int | None:
        """How far the scales are apart, in units of the last place of float32."""
        if self.levels is None:
            return None
        ends = np.array([self.levels.scale, self.tensor.scale], np.float32).view(np.int32)
        return abs(int(ends[0]) - int(ends[1]))

    @property
    def has_same_range(self) -> bool:
        """Whether the model's codes are the file's."""
        if self.levels is None:
            return True
        ulps = self.scale_ulps
        assert ulps is not None
        return ulps <= NEAR and self.levels.zero_point == self.tensor.zero_point


@dataclasses.dataclass(frozen=True)
class Pairing:
    """What both sides have, and what only the model has.

    Args:
        pairs: the tensors of both, in order of computation.
        merged: layers whose quantized result is no tensor of the file.
    """

    pairs: list[Pair]
    merged: tuple[str, ...]


def levels_of(graph: Graph) -> dict[Value, Levels]:
    """The codes of each tensor of a quantization-aware model that only takes on levels."""
    found: dict[Value, Levels] = {}
    for call in graph.calls:
        kind = kind_of(call)
        if _quantizer(call) is not None:
            found[call.output] = Levels.of(_quantizer(call))
        elif kind in RANGE_KEEPING and kind not in ROUNDING:
            ranges = {found.get(value) for value in call.inputs}
            known = ranges.pop() if len(ranges) == 1 else None
            if known is not None:
                found.update(dict.fromkeys(values_in(call.outputs), known))
    return found


def pair(graph: Graph, file: FileGraph, output_names: list[str]) -> Pairing:
    """Finds the tensors of a quantization-aware model in its file.

    A tensor of the file is the result of the call in whose name scope it was computed. Of several
    it is the last one that has the call's range: the others are steps inside. Of a call with
    several results, as tf.split, it is the one at its place among those of one operation.

    Raises:
        ValueError: if the file does not name its layers, or has layers that the model has not.
    """
    levels, consumers = levels_of(graph), graph.consumers()

    def quantized(value: Value) -> Value:
        """The value itself, or that behind its quantizer."""
        if value not in levels:
            for reader in consumers[value]:
                if isinstance(reader.layer, Quantize) and reader.inputs[0] is value:
                    return reader.output
        return value

    candidates: dict[Value, list[Tensor]] = {value: [] for value in graph.values()}
    for value, tensor in _by_scope(graph, file) + _ends(graph, file, output_names):
        candidates[quantized(value)].append(tensor)
    found = {}
    for value, tensors in candidates.items():
        fitting = [each for each in tensors if each.is_quantized and _fits(value, each)]
        pairs = [_pair(value, each, levels.get(value)) for each in fitting]
        same = [each for each in pairs if each.has_same_range] or pairs
        if same:
            found[value] = same[-1]
    own = [call.output for call in graph.calls if _quantizer(call) is not None]
    return Pairing(
        [
            dataclasses.replace(each, layers=_layers_between(value, found))
            for value, each in found.items()
        ],
        tuple(dict.fromkeys(_layer_name(value) for value in own if value not in found)),
    )


def float_operations(graph: Graph, file: FileGraph) -> dict[str, str]:
    """What a file computes in float: name of each tensor's layer -> the operations there."""
    scopes = _scopes(graph)
    found: dict[str, list[str]] = {}
    for operation in file.operations:
        floats = [
            file.tensors[index]
            for index in operation.outputs
            if file.tensors[index].dtype.kind == "f"
        ]
        if floats and operation.kernel != "DEQUANTIZE":
            scope = in_scope(floats[0].name, scopes)
            name = _layer_name(scopes[scope][0]) if scope else floats[0].name
            found.setdefault(name, []).append(operation.kernel)
    return {name: ", ".join(dict.fromkeys(kernels)) for name, kernels in found.items()}


def _pair(value: Value, tensor: Tensor, levels: Levels | None) -> Pair:
    return Pair(_layer_name(value), (), value, tensor, levels)


def _scopes(graph: Graph) -> dict[str, list[Value]]:
    """Name scope of each call, and of each input -> its values."""
    return {as_scope(value.name): [value] for value in values_in(graph.inputs)} | {
        scope_of(call): values_in(call.outputs) for call in graph.calls
    }


def _by_scope(graph: Graph, file: FileGraph) -> list[tuple[Value, Tensor]]:
    """The tensors that operations of the file compute, with the call they are named after."""
    scopes = _scopes(graph)
    ends = {each.index for each in [*file.inputs.values(), *file.outputs.values()]}
    made = [
        (file.tensors[index], place, len(operation.outputs))
        for operation in file.operations
        for place, index in enumerate(operation.outputs)
        if index not in ends
    ]
    ours = [each for each in made if each[0].name.startswith(f"{SCOPE}/")]
    if not ours and made:
        raise ValueError(
            "The TFLite file does not say which layer is which: it was not written by this "
            "version of keras_qat.export_tflite. Export it again, or leave out per_layer=True."
        )
    found, unknown = [], []
    for tensor, place, count in ours:
        scope = in_scope(tensor.name, scopes)
        if scope is None:
            unknown.append(tensor.name.split(";")[0].removeprefix(f"{SCOPE}/"))
            continue
        values = scopes[scope]
        if len(values) == 1:
            found.append((values[0], tensor))
        elif len(values) == count:
            found.append((values[place], tensor))
    if unknown:
        raise ValueError(
            f"The TFLite file belongs to another model: it computes {', '.join(unknown[:5])}"
            f"{', ...' if len(unknown) > 5 else ''}, which are no layers of this one. Verify the "
            f"model that the file was exported from."
        )
    return found


def _ends(graph: Graph, file: FileGraph, output_names: list[str]) -> list[tuple[Value, Tensor]]:
    """The file's inputs and outputs by their names, for those not named after a call."""
    inputs = [
        (value, file.inputs[value.name])
        for value in values_in(graph.inputs)
        if value.name in file.inputs
    ]
    outputs = zip(values_in(graph.outputs), output_names, strict=True)
    return inputs + [
        (value, file.outputs[name])
        for value, name in outputs
        if name in file.outputs and not file.outputs[name].name.startswith(f"{SCOPE}/")
    ]


def _fits(value: Value, tensor: Tensor) -> bool:
    """Whether a tensor of the file holds a value's entries in their order.

    Axes of size 1 come and go, and the first ones may be joined to one of unknown size.
    """
    here = [size or -1 for size in value.shape[1:] if size != 1]
    there = [size for size in tensor.shape[1:] if size != 1]
    if len(there) > len(here):
        return False
    return all(
        -1 in pair or pair[0] == pair[1] for pair in zip(here[::-1], there[::-1], strict=False)
    ) and (len(here) == len(there) or tensor.shape[0] == -1)


def _layers_between(value: Value, found: dict[Value, Pair]) -> tuple[str, ...]:
    """The user's layers that compute a value from others that are found."""
    names: list[str] = []
    wanted = [value]
    while wanted:
        current = wanted.pop(0)
        if current.producer is None or (current is not value and current in found):
            continue
        layer = current.producer.layer
        if isinstance(layer, QuantizeWrapper):
            path = layer.name.removeprefix(PREFIX).removesuffix(layer.layer.name)
            names += [path + each.name for each in reversed(layer.sublayers)]
        elif not isinstance(layer, Quantize):
            names.append(_layer_name(current))
        wanted += current.producer.inputs
    return tuple(dict.fromkeys(reversed(names)))


def _layer_name(value: Value) -> str:
    """The name in the float model of the layer behind whose quantizer a value is."""
    producer = value.producer
    if producer is not None and isinstance(producer.layer, Quantize):
        return _layer_name(producer.inputs[0])
    return value.name.removeprefix(PREFIX)


def _quantizer(call: Call) -> Any:
    if isinstance(call.layer, QuantizeWrapper):
        return call.layer.output_quantizer
    return call.layer.quantizer if isinstance(call.layer, Quantize) else None
