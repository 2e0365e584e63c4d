"""The table of TensorFlow functions: the names of each in TensorFlow, and its kind.

Keras records a function that is called on a symbolic tensor as a layer with the function's name in
TensorFlow, such as "math.add" or "compat.v1.shape". `get_kind` returns the kind, "add" or "shape",
which is what other modules compare.
"""

from __future__ import annotations

from typing import Any

from keras_qat.graph.calls import Call
from keras_qat.helper_layers.operations import FlattenTime, RestoreTime
from keras_qat.keras2.backend import layers

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
        adjust_brightness adjust_contrast adjust_gamma adjust_hue adjust_saturation central_crop
        convert_image_dtype crop_to_bounding_box extract_patches flip_left_right flip_up_down
        grayscale_to_rgb hsv_to_rgb pad_to_bounding_box per_image_standardization resize
        resize_with_crop_or_pad resize_with_pad rgb_to_grayscale rgb_to_hsv rgb_to_yiq rgb_to_yuv
        rot90 transpose yiq_to_rgb yuv_to_rgb
        """,
    "keras.backend": "batch_flatten cast_to_floatx",
    "linalg": """
        band_part cross diag diag_part matmul matrix_transpose norm normalize set_diag trace
        """,
    "math": """
        abs accumulate_n acos acosh add add_n angle argmax argmin asin asinh atan atan2 atanh ceil
        conj cos cosh cumprod cumsum cumulative_logsumexp divide divide_no_nan equal erf erfc exp
        expm1 floor floormod greater greater_equal imag is_finite is_inf is_nan l2_normalize less
        less_equal log log1p log_sigmoid logical_and logical_not logical_or maximum minimum multiply
        multiply_no_nan negative not_equal polyval pow real reciprocal reciprocal_no_nan reduce_all
        reduce_any reduce_euclidean_norm reduce_logsumexp reduce_max reduce_mean reduce_min
        reduce_prod reduce_std reduce_sum reduce_variance rint round rsqrt scalar_mul segment_max
        segment_mean segment_min segment_sum sigmoid sign sin sinh softplus sqrt square
        squared_difference subtract tan tanh top_k truediv unsorted_segment_max
        unsorted_segment_mean unsorted_segment_min unsorted_segment_sqrt_n unsorted_segment_sum
        xdivy
        """,
    "nn": """
        avg_pool avg_pool1d avg_pool2d avg_pool3d batch_normalization bias_add conv1d
        conv1d_transpose conv2d conv2d_transpose conv3d convolution crelu depth_to_space
        depthwise_conv2d elu embedding_lookup gelu leaky_relu local_response_normalization
        log_softmax max_pool max_pool1d max_pool2d max_pool3d moments pool relu relu6 selu
        separable_conv2d silu softmax softsign space_to_depth top_k
        """,
    "signal": """
        dct fft fft2d fftshift frame idct ifft ifft2d ifftshift inverse_stft irfft irfft2d
        mfccs_from_log_mel_spectrograms overlap_and_add rfft rfft2d stft
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
        fused_batch_norm log_softmax max_pool pool separable_conv2d weighted_moments
        """,
}
"""Module of TensorFlow -> its functions. A function's kind is its name, except in `OTHER_KINDS`."""

OTHER_KINDS = {
    "__operators__.eq": "equal",
    "__operators__.ne": "not_equal",
    "math.truediv": "divide",
    "image.transpose": "transpose_image",
    **dict.fromkeys(("nn.max_pool1d", "nn.max_pool2d"), "max_pool"),
    **dict.fromkeys(("nn.avg_pool1d", "nn.avg_pool2d"), "avg_pool"),
    # TensorFlow 1 computes other pixels.
    "compat.v1.image.resize": "v1_resize_images",
    "compat.v1.image.resize_bicubic": "v1_resize_bicubic",
    "compat.v1.image.resize_bilinear": "v1_resize_bilinear",
    "compat.v1.image.resize_images": "v1_resize_images",
    "compat.v1.image.resize_nearest_neighbor": "v1_resize_nearest_neighbor",
}
"""Name in TensorFlow -> its kind, for functions whose kind is not their name."""

KINDS = {
    name: OTHER_KINDS.get(name, function)
    for module, functions in FUNCTIONS.items()
    for function in functions.split()
    for name in [f"{module}.{function}".lstrip(".")]
}
"""Name in TensorFlow -> the function's kind."""

NAMES = {kind: [name for name in KINDS if KINDS[name] == kind] for kind in KINDS.values()}
"""Kind -> the names of its functions in TensorFlow."""

COMMUTES = ("add", "multiply", "maximum", "minimum")
"""Operations whose two operands may be exchanged."""

MOVES = {
    *("broadcast_to", "concat", "ensure_shape", "expand_dims", "gather", "gather_nd", "getitem"),
    *("identity", "matrix_transpose", "repeat", "reshape", "reverse", "roll", "slice", "split"),
    *("squeeze", "stack", "stop_gradient", "strided_slice", "tile", "transpose", "unstack"),
}
"""Kinds whose results consist of elements of their inputs."""

MOVING_LAYERS = (
    *(layers.Reshape, layers.Flatten, layers.Permute, layers.RepeatVector, layers.Concatenate),
    *(layers.Cropping1D, FlattenTime, RestoreTime),
)
"""Layers whose results consist of elements of their inputs."""

READS_SHAPES = {"ones_like", "rank", "shape", "size", "zeros_like"}
"""Kinds whose results depend on the shapes of their inputs alone."""


def is_operation(layer: Any) -> bool:
    """Returns whether a layer is a TensorFlow operation that was called on a symbolic tensor."""
    return type(layer).__name__ in ("TFOpLambda", "SlicingOpLambda")


def name_in_tensorflow(layer: Any) -> str:
    """Returns TensorFlow's name of the operation that a layer is, as in "math.add"; "" if none."""
    return str(layer.symbol) if is_operation(layer) else ""


def get_kind(step: Any) -> str:
    """Returns the kind of operation of a call or a layer; "" if it is no operation.

    The kind of a function that is not in the table is its name in TensorFlow.
    """
    name = name_in_tensorflow(step.layer if isinstance(step, Call) else step)
    return KINDS.get(name, name)


def draws_random_numbers(layer: Any) -> bool:
    """Returns whether a layer is an operation that computes something else each time."""
    name = name_in_tensorflow(layer)
    return "random" in name or "dropout" in name


def moves_elements(call: Call) -> bool:
    """Returns whether the results of a call consist of elements of its inputs."""
    return get_kind(call) in MOVES or type(call.layer) in MOVING_LAYERS
