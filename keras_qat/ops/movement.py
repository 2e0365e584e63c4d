"""Helpers for operators that only move values, such as RESHAPE and GATHER.

`IDENTITY` is for layers that do nothing at inference, such as Dropout. `emit_by_converter` lets
TFLite's converter choose the operators of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.kernel_families import REFERENCE
from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.graph.calls import Call, Value
from keras_qat.helper_layers.operations import CarryMask, Regularize, TrainingOnly
from keras_qat.keras2.backend import layers
from keras_qat.ops.emission import Emission
from keras_qat.ops.node import Node, Tensor
from keras_qat.ops.op import Arguments, Attributes, Emit, Op, SharedRange
from keras_qat.tflite.op_versions import choose_version
from keras_qat.tflite.schema import OPERATORS, SCOPE, TYPES, new, operator_code, unpack
from keras_qat.tflite.splice import splice_model
from keras_qat.tracing.replaced_functions import OwnGradient

Part = tuple[int | None, int | None, int]
"""A slice (begin, end, step) along one axis, as in `x[begin:end:step]`."""

MAX_SLICED = 5
"""The maximum number of axes of STRIDED_SLICE in TFLite."""


def call_on_values(a: Arguments) -> Any:
    """Calls the layer on quantized values instead of float values. Used as `Op.compute`."""

    def convert(value: Any) -> Any:
        return tf.cast(value, a.q[0].dtype) if value.dtype.is_floating else value

    return tf.nest.map_structure(convert, a.run_layer(a.q))


def transpose(x: Any, order: Sequence[int]) -> Any:
    return x if list(order) == sorted(order) else tf.transpose(x, order)


def get_source(call: Call) -> Any:
    """Returns the first argument of a call: the tensor to move, or a list of tensors."""
    return call.args[0]


def read_integers(argument: Any) -> tuple[int, ...] | None:
    """Returns an argument as a tuple of integers.

    Returns None if the argument is None, or if it is known only at run time.
    """
    if argument is None:
        return None
    leaves = tf.nest.flatten(argument)
    known = [tf.get_static_value(leaf) if tf.is_tensor(leaf) else leaf for leaf in leaves]
    if any(part is None or isinstance(part, Value) for part in known):
        return None
    return tuple(int(value) for part in known for value in np.ravel(part))


def read_integer(argument: Any, default: int | None = None) -> int | None:
    """Returns an argument as an integer. Returns None if it is known only at run time."""
    known = read_integers(default if argument is None else argument)
    return known[0] if known else None


def read_window(option: Any, axes: int) -> tuple[int, ...] | None:
    """Returns the size or the strides of a pooling window, without batch and channels.

    For two axes, 2 and [1, 2, 2, 1] both become (2, 2). Returns None for unknown sizes, and for
    windows over several examples or channels.
    """
    sizes = read_integers(option)
    if sizes is None or len(sizes) == axes:
        return sizes
    if len(sizes) == 1:
        return sizes * axes
    return sizes[1:-1] if sizes[0] == sizes[-1] == 1 else None


def get_rank(call: Call) -> int:
    """Returns the rank of a call's first argument, but 1 for a list of tensors."""
    return len(getattr(get_source(call), "shape", ())) or 1


def read_axes(argument: Any, rank: int) -> tuple[int, ...] | None:
    """Returns the argument `axis` of an operation as sorted, non-negative axes.

    Without this argument, returns all axes. Returns None if the axes are known only at run time.
    """
    if argument is None:
        return tuple(range(rank))
    axes = read_integers(argument)
    return None if axes is None else tuple(sorted({axis % rank for axis in axes}))


def make_movement(name: str, doc: str, emit: Emit, **fields: Any) -> Op:
    """Returns an `Op` that only moves values. Calls must have options known before run time."""
    more: Callable[..., str | None] = fields.pop("accepts", lambda call, attributes: None)

    def accepts(call: Call, attributes: Attributes) -> str | None:
        if not isinstance(get_source(call), Value):
            return "its input is not a single tensor"
        if any(value is None for value in attributes.values()):
            return "its options are known only at run time"
        return more(call, attributes)

    fields = {"compute": call_on_values, "output": SharedRange(), **fields}
    return Op(name, emit=emit, doc=doc, accepts=accepts, **fields)


def emit_slice(
    e: Emission, source: int, target: int, parts: Sequence[Part], dropped: Sequence[int] = ()
) -> None:
    """Adds a STRIDED_SLICE. `parts` has a slice for each axis. The axes `dropped` are removed."""
    begins, ends, steps = ([part[field] for part in parts] for field in range(3))
    for axis in dropped:
        ends[axis] = (begins[axis] or 0) + 1
    constants = [
        e.constant(name, [value or 0 for value in values])
        for name, values in {"begin": begins, "end": ends, "strides": steps}.items()
    ]
    e.add(
        "STRIDED_SLICE",
        [source, *constants],
        [target],
        beginMask=_mask(begin is None for begin in begins),
        endMask=_mask(end is None for end in ends),
        shrinkAxisMask=_mask(axis in dropped for axis in range(len(parts))),
    )


def _mask(flags: Iterable[bool]) -> int:
    return sum(1 << bit for bit, flag in enumerate(flags) if flag)


MOVES = {
    *("BATCH_TO_SPACE_ND", "BROADCAST_TO", "CONCATENATION", "DEPTH_TO_SPACE", "EXPAND_DIMS"),
    *("GATHER", "GATHER_ND", "IF", "MAXIMUM", "MAX_POOL_2D", "MINIMUM", "MIRROR_PAD", "PACK"),
    *("PAD", "PADV2", "RANK", "REDUCE_MAX", "REDUCE_MIN", "RESHAPE", "RESIZE_NEAREST_NEIGHBOR"),
    *("REVERSE_V2", "SELECT", "SELECT_V2", "SHAPE", "SLICE", "SPACE_TO_BATCH_ND"),
    *("SPACE_TO_DEPTH", "SPLIT", "SPLIT_V", "SQUEEZE", "STRIDED_SLICE", "TILE", "TRANSPOSE"),
    *("UNPACK", "WHILE"),
}
"""TFLite operators that only move, copy or select values, or only return sizes."""


def emit_by_converter(e: Emission) -> None:
    """Converts a call's layer with TFLite's converter, and adds the operators to the file.

    Raises:
        ValueError: if the layer computes new values.
    """
    node, params = e.node, e.node.output.params
    model = unpack(_convert(node))
    if params is not None:
        _quantize(model, params, node)
    (signature,), main = model.signatureDefs, model.subgraphs[0]
    by_name = {f"x{number}": index for number, index in enumerate(e.inputs)}
    by_name |= {f"y{number}": index for number, index in enumerate(e.outputs)}
    named = [*signature.inputs, *signature.outputs]
    ends = {entry.tensorIndex: by_name[entry.name.decode()] for entry in named}
    inputs, outputs = ([ends[int(index)] for index in end] for end in (main.inputs, main.outputs))
    splice_model(e.builder, model, inputs, outputs, params, prefix=f"{SCOPE}/{node.name}/")


def _convert(node: Node) -> bytes:
    """Return a float TFLite file that contains only the node's layer."""
    specs = [
        tf.TensorSpec(x.shape, x.dtype, f"x{number}")
        for number, x in enumerate(node.inputs)
        if isinstance(x, Tensor)
    ]

    def serve(*tensors: Any) -> dict[str, Any]:
        result = Arguments(REFERENCE, {}, [], [], None, node.call).run_layer(list(tensors))  # type: ignore[arg-type]
        return {f"y{number}": y for number, y in enumerate(tf.nest.flatten(result))}

    function = tf.function(serve, input_signature=specs, autograph=False)
    module = tf.Module()
    module.weights = list(node.call.layer.weights)
    concrete = function.get_concrete_function()
    converter = tf.lite.TFLiteConverter.from_concrete_functions([concrete], module)
    contents: bytes = converter.convert()
    return contents


def _quantize(model: Any, params: QuantParams, node: Node) -> None:
    """Make float tensors of a file int8 or int16. All operators must be in `MOVES`."""
    dtype = TYPES[params.dtype.name]
    for graph in model.subgraphs:
        floats = {
            index for index, tensor in enumerate(graph.tensors) if tensor.type == TYPES["float32"]
        }
        for operator in graph.operators:
            name = OPERATORS[operator_code(model.operatorCodes[operator.opcodeIndex])]
            read = floats.intersection(map(int, [*operator.inputs, *operator.outputs]))
            if read and name not in MOVES:
                raise _make_error(node, f"TFLite's converter turns it into {name}")
        for index in floats:
            if not _quantize_constant(model, graph.tensors[index], params):
                raise _make_error(node, "it has constants that are not 0")
            graph.tensors[index].type = dtype
        for operator in graph.operators:
            number = operator_code(model.operatorCodes[operator.opcodeIndex])
            code = {"builtinCode": number, "deprecatedBuiltinCode": min(number, 127)}
            version = choose_version(number, operator, graph.tensors)
            model.operatorCodes.append(new("OperatorCodeT", **code, version=version))
            operator.opcodeIndex = len(model.operatorCodes) - 1


def _make_error(node: Node, why: str) -> ValueError:
    kind = type(node.call.layer).__name__
    return ValueError(f"{node.name}: {kind} does more than move its values: {why}.")


def _quantize_constant(model: Any, tensor: Any, params: QuantParams) -> bool:
    """Quantize a float constant that contains only zeros. Return False for other constants."""
    data = model.buffers[tensor.buffer].data
    if data is None:
        return True
    values = np.asarray(data, np.uint8).view(np.float32)
    zeros = np.full(values.shape, params.zero_point, params.dtype)
    model.buffers.append(new("BufferT", data=zeros.view(np.uint8).reshape(-1)))
    tensor.buffer = len(model.buffers) - 1
    return not values.any()


def _accepts_identity(call: Call, attributes: Attributes) -> str | None:
    x, y = call.inputs[0], call.output
    if getattr(call.layer, "mask_value", 0) != 0:
        return "its mask_value is not 0"
    if x.dtype != y.dtype and not (x.is_float and y.is_float):
        return f"converts {call.inputs[0].dtype} to {call.output.dtype}"
    return None


IDENTITY = make_movement(
    "identity",
    "does nothing at inference: layers that regularize or augment in training, or pass on a mask",
    lambda e: e.builder.copy(e.source, e.outputs[0]),
    compute=lambda a: a.q[0],
    accepts=_accepts_identity,
    alias=True,
    elementwise=True,
    layers=(
        *(layers.InputLayer, layers.Identity, layers.ActivityRegularization, Regularize),
        *(layers.Dropout, layers.SpatialDropout1D, layers.SpatialDropout2D),
        *(layers.SpatialDropout3D, layers.GaussianNoise, layers.GaussianDropout),
        *(layers.AlphaDropout, layers.RandomFlip, layers.RandomRotation, layers.RandomZoom),
        *(layers.RandomTranslation, layers.RandomContrast, layers.RandomBrightness),
        *(layers.RandomHeight, layers.RandomWidth, TrainingOnly, CarryMask),
        *(layers.Masking, OwnGradient),
    ),
    kinds=("identity", "stop_gradient", "ensure_shape", "convert_to_tensor", "check_numerics"),
)

MOVE = make_movement(
    "move", "custom layers that only move, copy or select values", emit_by_converter
)
"""The operator of layers that a user registers as "move"."""
