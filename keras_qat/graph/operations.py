"""Identifies calls of TensorFlow functions, and reads their arguments.

Keras creates a layer if a TensorFlow function is called on a symbolic tensor. The layer stores the
name of the function, such as "math.add" or "compat.v1.shape". `get_kind` maps the name to a kind of
operation, "add" or "shape". Other modules only compare kinds.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from keras_qat.graph.calls import Call, Value
from keras_qat.helper_layers.operations import FlattenTime, RestoreTime
from keras_qat.keras2.backend import keras, layers

FUNCTIONS = {
    "": """
        argsort boolean_mask broadcast_to cast clip_by_norm clip_by_value concat
        convert_to_tensor einsum ensure_shape expand_dims eye fill gather gather_nd identity
        identity_n norm one_hot ones ones_like pad range rank realdiv repeat reshape reverse
        reverse_sequence roll sequence_mask shape size slice sort split squeeze stack
        stop_gradient strided_slice tensordot tile transpose unstack where zeros zeros_like
        """,
    "__operators__": "add eq getitem ne",
    "debugging": "check_numerics",
    "dtypes": "complex",
    "image": """
        adjust_brightness adjust_contrast central_crop convert_image_dtype crop_to_bounding_box
        extract_patches flip_left_right flip_up_down grayscale_to_rgb pad_to_bounding_box
        per_image_standardization resize resize_with_crop_or_pad resize_with_pad rgb_to_grayscale
        rgb_to_yiq rgb_to_yuv rot90 transpose yiq_to_rgb yuv_to_rgb
        """,
    "keras.backend": "batch_flatten cast_to_floatx",
    "linalg": "band_part matmul matrix_transpose norm normalize",
    "math": """
        abs accumulate_n acos acosh add add_n angle argmax argmin asin asinh atan atan2 atanh ceil
        conj cos cosh cumprod cumsum cumulative_logsumexp divide divide_no_nan equal erf erfc exp
        expm1 floor floormod greater greater_equal imag is_finite is_inf is_nan l2_normalize less
        less_equal log log1p log_sigmoid logical_and logical_not logical_or maximum minimum multiply
        multiply_no_nan negative not_equal polyval pow real reciprocal reciprocal_no_nan reduce_all
        reduce_any reduce_euclidean_norm reduce_logsumexp reduce_max reduce_mean reduce_min
        reduce_prod reduce_std reduce_sum reduce_variance rint round rsqrt scalar_mul sigmoid sign
        sin sinh softplus sqrt square squared_difference subtract tan tanh top_k truediv xdivy
        """,
    "nn": """
        avg_pool avg_pool1d avg_pool2d avg_pool3d batch_normalization bias_add conv1d
        conv1d_transpose conv2d conv2d_transpose conv3d convolution crelu depth_to_space
        depthwise_conv2d elu embedding_lookup gelu leaky_relu local_response_normalization
        log_softmax max_pool max_pool1d max_pool2d max_pool3d moments relu relu6 selu
        separable_conv2d silu softmax softsign space_to_depth top_k
        """,
    "signal": """
        dct fft frame idct mfccs_from_log_mel_spectrograms overlap_and_add rfft stft
        """,
    "compat.v1": """
        boolean_mask floor_div gather gather_nd norm ones_like pad shape size squeeze transpose
        where zeros_like
        """,
    "compat.v1.image": """
        resize resize_bicubic resize_bilinear resize_images resize_nearest_neighbor
        """,
    "compat.v1.math": "reduce_logsumexp reduce_prod scalar_mul",
    "compat.v1.nn": """
        avg_pool conv1d conv2d conv3d convolution crelu depthwise_conv2d embedding_lookup
        fused_batch_norm log_softmax max_pool separable_conv2d weighted_moments
        """,
}
"""Maps TensorFlow modules to functions. A function's name is its kind, except in `OTHER_KINDS`."""

OTHER_KINDS = {
    "__operators__.eq": "equal",
    "__operators__.ne": "not_equal",
    "math.truediv": "divide",
    "image.transpose": "transpose_image",
    **dict.fromkeys(("nn.max_pool1d", "nn.max_pool2d"), "max_pool"),
    **dict.fromkeys(("nn.avg_pool1d", "nn.avg_pool2d"), "avg_pool"),
    # TensorFlow 1 samples images at other coordinates.
    "compat.v1.image.resize": "v1_resize_images",
    "compat.v1.image.resize_bicubic": "v1_resize_bicubic",
    "compat.v1.image.resize_bilinear": "v1_resize_bilinear",
    "compat.v1.image.resize_images": "v1_resize_images",
    "compat.v1.image.resize_nearest_neighbor": "v1_resize_nearest_neighbor",
}
"""Maps names in TensorFlow to kinds that differ from the name."""

KINDS = {
    name: OTHER_KINDS.get(name, function)
    for module, functions in FUNCTIONS.items()
    for function in functions.split()
    for name in [f"{module}.{function}".lstrip(".")]
}
"""Maps names in TensorFlow to kinds."""

NAMES = {kind: [name for name in KINDS if KINDS[name] == kind] for kind in KINDS.values()}
"""Maps kinds to names in TensorFlow."""

COMMUTES = ("add", "multiply", "maximum", "minimum")

MOVES = {
    *("broadcast_to", "concat", "ensure_shape", "expand_dims", "gather", "gather_nd", "getitem"),
    *("identity", "matrix_transpose", "repeat", "reshape", "reverse", "roll", "slice", "split"),
    *("squeeze", "stack", "stop_gradient", "strided_slice", "tile", "transpose", "unstack"),
}
"""Kinds of operations that only move elements."""

MOVING_LAYERS = (
    *(layers.Reshape, layers.Flatten, layers.Permute, layers.RepeatVector, layers.Concatenate),
    *(layers.Cropping1D, FlattenTime, RestoreTime),
)

READS_SHAPES = {"ones_like", "rank", "shape", "size", "zeros_like"}
"""Kinds of operations that only read the shapes of their inputs."""


OTHER_NAMES = {
    "dilations": ("rate", "dilation_rate"),
    "filters": ("filter",),
    "indices": ("ids",),
    "input": ("value",),
    "strides": ("stride",),
    "x": ("self",),
    "y": ("other",),
}
"""Maps names of arguments to synonyms. For example, `tf.nn.conv1d` has `stride`, not `strides`."""

CANONICAL_NAMES = {other: name for name, others in OTHER_NAMES.items() for other in others}

CHANNELS_LAST = ("NWC", "NHWC", "NDHWC")


def is_operation(layer: object) -> bool:
    """Returns True if Keras created the layer for a TensorFlow operation."""
    return type(layer).__name__ in ("TFOpLambda", "SlicingOpLambda")


@functools.cache
def get_operation_class() -> type:
    return type(tf.abs(keras.Input((1,)))._keras_history.layer)


def name_in_tensorflow(layer: keras.layers.Layer) -> str:
    """Returns the name of an operation in TensorFlow ("math.add"), or "" for any other layer."""
    return str(layer.symbol) if is_operation(layer) else ""


def get_kind(step: Call | keras.layers.Layer) -> str:
    """Returns the kind of an operation, such as "add", or "" for any other layer.

    The kind of an operation without an entry in `KINDS` is its name in TensorFlow.
    """
    name = name_in_tensorflow(step.layer if isinstance(step, Call) else step)
    return KINDS.get(name, name)


def draws_random_numbers(layer: keras.layers.Layer) -> bool:
    name = name_in_tensorflow(layer)
    return "random" in name or "dropout" in name


def moves_elements(call: Call) -> bool:
    """Returns True if a call only moves elements, like a reshape."""
    return get_kind(call) in MOVES or type(call.layer) in MOVING_LAYERS


def get_operands(call: Call, *names: str) -> list[Any]:
    """Returns the arguments of a call that have the given names. Missing arguments are None.

    The names are as in TensorFlow 2, even for functions of TensorFlow 1.
    """
    function = call.layer.function if is_operation(call.layer) else type(call.layer).call
    positional = zip(_list_parameters(function), call.args, strict=False)
    given = {**dict(positional), **call.kwargs}
    aliases = ((name, *OTHER_NAMES.get(name, ())) for name in names)
    return [next((x for x in map(given.get, same) if x is not None), None) for same in aliases]


def get_argument(call: Call, name: str) -> Any:
    """Returns a named argument of a call, or None if it is missing."""
    return get_operands(call, name)[0]


def bind_arguments(call: Call) -> tuple[list[Any], dict[str, Any]]:
    """Returns the first argument of an operation in a list, and the other arguments in a dict.

    The keys are names in TensorFlow 2. `name` and arguments that equal a default are omitted.
    """
    signature = _get_signature(call.layer.function)
    args, kwargs = list[Any](), dict[str, Any]()
    for name, value in signature.bind(*call.args, **call.kwargs).arguments.items():
        parameter = signature.parameters[name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            args += value
        elif parameter.kind is parameter.VAR_KEYWORD:
            kwargs.update(value)
        elif not args:
            args.append(value)
        elif not _is_default(value, parameter.default):
            kwargs[CANONICAL_NAMES.get(name, name)] = value
    kwargs.pop("name", None)
    return args, kwargs


def call_function(call: Call, *args: Any, **kwargs: Any) -> Any:
    """Calls the function of an operation with arguments as from `bind_arguments`."""
    function = call.layer.function
    names = {CANONICAL_NAMES.get(name, name): name for name in _get_signature(function).parameters}
    return function(*args, **{names.get(name, name): value for name, value in kwargs.items()})


def _is_default(value: object, default: object) -> bool:
    if isinstance(value, str) and value in CHANNELS_LAST:
        return True
    is_plain = isinstance(value, (bool, int, float, str)) and type(value) is type(default)
    return value is None or (is_plain and value == default)


_get_signature = functools.cache(inspect.signature)


@functools.cache
def _list_parameters(function: Callable[..., object]) -> tuple[str, ...]:
    names = inspect.signature(function).parameters
    is_method = "self" in names and "other" not in names  # `x == y` compares self with other.
    return tuple(names)[is_method:]


def list_arguments(call: Call) -> list[Any]:
    """Returns the arguments of an operation in the order of the parameters, without `name`."""
    given: dict[Any, Any] = dict(enumerate(call.args))
    if call.kwargs:
        given = inspect.signature(call.layer.function).bind(*call.args, **call.kwargs).arguments
        given.pop("name", None)
    return list(given.values())


def read_scalar(leaf: object) -> float | None:
    """Converts a scalar argument to a float. Returns None for any other argument."""
    if tf.is_tensor(leaf):
        leaf = tf.get_static_value(leaf)
    if not isinstance(leaf, (int, float, np.number, np.ndarray)) or isinstance(leaf, bool):
        return None
    return float(leaf) if np.ndim(leaf) == 0 and np.asarray(leaf).dtype.kind in "iuf" else None


def read_array(leaf: object) -> NDArray[Any] | None:
    """Converts a numeric argument to an array. Returns None for any other argument."""
    if tf.is_tensor(leaf) and not isinstance(leaf, tf.Variable):
        leaf = tf.get_static_value(leaf)
    if isinstance(leaf, (list, tuple)) and leaf:  # Keras saves arrays as lists.
        leaves = tf.nest.flatten(leaf)
        leaf = np.asarray(leaf) if all(read_scalar(item) is not None for item in leaves) else None
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "iuf":
        return leaf
    return None if read_scalar(leaf) is None else np.asarray(leaf)


def list_operands(call: Call) -> list[Value | NDArray[Any]]:
    """Returns the tensors (`Value`s) and constants (arrays) among a call's arguments, in order."""
    found: list[Value | NDArray[Any] | None] = []
    for argument in (*call.args, *call.kwargs.values()):
        constant = None if isinstance(argument, Value) else read_array(argument)
        leaves = tf.nest.flatten(argument) if constant is None else [constant]
        found += [leaf if isinstance(leaf, Value) else read_array(leaf) for leaf in leaves]
    return [leaf for leaf in found if leaf is not None]
