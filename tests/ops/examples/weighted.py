"""Examples of operators with weights."""

from keras_qat.helper_layers.keras_variants import WITH_MASK_INPUT
from keras_qat.helper_layers.operations import Indices, OnGrid, WeightTensor
from keras_qat.keras2.backend import keras
from tests.ops.examples.example import Example, chosen, sizes

_layers = keras.layers


def _options(numbers, axes, equal):
    """Returns options: strides or dilation, of which Keras supports one at a time, and a bias."""
    strides, dilation = (list(sizes(numbers, 1, 4, axes)) for _ in range(2))
    if equal:
        strides = strides[:1] * axes
    if numbers.random() < 0.5:
        strides = [1] * axes
    else:
        dilation = [1] * axes
    return {
        "strides": strides,
        "dilation_rate": dilation,
        "padding": str(numbers.choice(["same", "valid"])),
        "use_bias": bool(numbers.random() < 0.8),
    }


def _conv(numbers):
    axes = int(numbers.integers(1, 3))
    groups = int(numbers.choice([1, 1, 2, 3]))
    filters = groups * int(numbers.integers(1, 8))
    channels = groups * int(numbers.integers(1, 6))
    size = sizes(numbers, 1, 4, axes)
    options = _options(numbers, axes, False)
    if axes == 1 and numbers.random() < 0.4:
        options["padding"] = "causal"
    kind = _layers.Conv1D if axes == 1 else _layers.Conv2D
    return Example(
        kind(filters, size, groups=groups, **options), ((12, 10, channels)[-axes - 1 :],)
    )


def _depthwise_conv(numbers):
    axes = int(numbers.integers(1, 3))
    kind = _layers.DepthwiseConv1D if axes == 1 else _layers.DepthwiseConv2D
    size, multiplier = sizes(numbers, 1, 5, axes), int(numbers.integers(1, 4))
    layer = kind(size, depth_multiplier=multiplier, **_options(numbers, axes, True))
    return Example(layer, ((12, 13, int(numbers.integers(1, 9)))[-axes - 1 :],))


def _transpose_conv(numbers):
    axes = int(numbers.integers(1, 3))
    kind = _layers.Conv1DTranspose if axes == 1 else _layers.Conv2DTranspose
    strides, size = sizes(numbers, 1, 4, axes), sizes(numbers, 1, 5, axes)
    padding, added = str(numbers.choice(["same", "valid"])), None
    if numbers.random() < 0.4:
        lowest = [0 if padding == "valid" or length % 2 else 1 for length in size]
        known = [(low, stride) for low, stride in zip(lowest, strides, strict=True)]
        if all(low < stride for low, stride in known):
            added = [int(numbers.integers(low, stride)) for low, stride in known]
    layer = kind(
        int(numbers.integers(1, 20)),
        size,
        strides=strides,
        padding=padding,
        output_padding=added,
        use_bias=bool(numbers.random() < 0.8),
    )
    return Example(layer, ((4, 5, int(numbers.integers(1, 8)))[-axes - 1 :],))


def _dense(numbers):
    rank = int(numbers.integers(1, 5))
    layer = _layers.Dense(int(numbers.integers(1, 20)), use_bias=bool(numbers.random() < 0.8))
    return Example(layer, ((2, 3, 4, int(numbers.integers(1, 30)))[-rank:],))


def _einsum_dense(*equations):
    """Returns examples of equations, with their output shape, input shape and bias axes."""

    def example(numbers):
        equation, output, shape, biases = chosen(numbers, *equations)
        bias = chosen(numbers, *biases)
        return Example(_layers.EinsumDense(equation, output, bias_axes=bias), (shape,))

    return example


def _embedding(numbers):
    layer = _layers.Embedding(int(numbers.integers(3, 40)), int(numbers.integers(1, 7)))
    rank = int(numbers.integers(0, 3))
    return Example(layer, ((4, 5)[:rank],), (str(numbers.choice(["int32", "int64", "uint8"])),))


def _affine(numbers):
    rank = int(numbers.integers(1, 5))
    shape = (2, 3, 4, int(numbers.integers(1, 9)))[-rank:]
    layer = chosen(
        numbers,
        _layers.BatchNormalization(),
        _layers.Rescaling(0.5, 0.25),
        _layers.Normalization(mean=0.5, variance=2.0, axis=None),
        _layers.Normalization(mean=[0.5] * shape[-1], variance=[2.0] * shape[-1]),
    )
    return Example(layer, (shape,))


def _prelu(numbers):
    shape = sizes(numbers, 1, 7, numbers.integers(1, 4))
    shared = [axis + 1 for axis in range(len(shape)) if numbers.random() < 0.5]
    return Example(_layers.PReLU(shared_axes=shared or None), (shape,))


def _weight(numbers):
    shape = sizes(numbers, 1, 6, numbers.integers(0, 4))

    def build(x):
        layer = WeightTensor([shape])
        y = layer(x)
        layer.parts[0].assign(numbers.normal(size=shape) * 10.0 ** numbers.uniform(-2, 2))
        return y

    return Example(build, ((3,),))


def _on_grid(numbers):
    shape = sizes(numbers, 1, 6, numbers.integers(1, 4))
    number = numbers.normal(scale=2.0, size=chosen(numbers, (), shape[-1:])).tolist()
    return Example(OnGrid(number), (shape,))


def _indices(numbers):
    shape = sizes(numbers, 1, 6, numbers.integers(1, 4))
    return Example(Indices(), (shape,), ("int32",))


def _lstm(numbers):
    options = {
        name: bool(numbers.random() < 0.5)
        for name in ("return_sequences", "go_backwards", "use_bias", "unroll")
    }
    steps, features, units = sizes(numbers, 1, 9, 3)
    return Example(_layers.LSTM(units, **options), ((steps, features),))


def _unrolled(kind, **others):
    """Returns an unrolled recurrent layer, perhaps with a state. `others` are its options."""

    def example(numbers):
        names = ("return_sequences", "go_backwards", "use_bias")
        options = {name: bool(numbers.random() < 0.5) for name in names}
        chosen_too = {name: chosen(numbers, *values) for name, values in others.items()}
        steps, features, units = sizes(numbers, 1, 7, 3)
        layer = kind(units, **options, **chosen_too)
        if numbers.random() < 0.25:
            zeroes = bool(numbers.random() < 0.5)
            config = {**layer.get_config(), "zero_output_for_mask": zeroes}
            masked = WITH_MASK_INPUT[kind].from_config(config)
            return _with_mask(masked, steps, features)
        if numbers.random() < 0.5:
            return Example(layer, ((steps, features),))
        return Example(lambda *given: layer([*given]), ((steps, features), (units,)))

    return example


def _with_mask(layer, steps, features):
    return Example(
        lambda *given: layer([*given]), ((steps, features), (steps,)), ("float32", "bool")
    )


def _masked_lstm(numbers):
    names = ("return_sequences", "go_backwards", "use_bias")
    options = {name: bool(numbers.random() < 0.5) for name in names}
    steps, features, units = sizes(numbers, 1, 7, 3)
    kind = WITH_MASK_INPUT[_layers.LSTM](
        units, recurrent_activation=chosen(numbers, *_SIGMOIDS), **options
    )
    return _with_mask(kind, steps, features)


def _conv_lstm(numbers):
    axes = int(numbers.integers(1, 3))
    kind = _layers.ConvLSTM1D if axes == 1 else _layers.ConvLSTM2D
    options = {name: bool(numbers.random() < 0.5) for name in ("return_sequences", "go_backwards")}
    steps, channels, filters = sizes(numbers, 1, 5, 3)
    layer = kind(
        filters,
        sizes(numbers, 1, 4, axes),
        recurrent_activation=chosen(numbers, *_SIGMOIDS),
        **options,
        **_options(numbers, axes, False),
    )
    return Example(layer, ((steps, *(8, 7)[-axes:], channels),))


_SIGMOIDS = ("sigmoid", "hard_sigmoid")

EXAMPLES = {
    "lstm": _lstm,
    "masked_lstm": _masked_lstm,
    "gru": _unrolled(_layers.GRU, reset_after=(True, False), recurrent_activation=_SIGMOIDS),
    "conv_lstm": _conv_lstm,
    "simple_rnn": _unrolled(_layers.SimpleRNN),
    "simple_rnn_relu": _unrolled(_layers.SimpleRNN, activation=("relu",)),
    "weight": _weight,
    "indices": _indices,
    "on_grid": _on_grid,
    "conv": _conv,
    "depthwise_conv": _depthwise_conv,
    "transpose_conv": _transpose_conv,
    "dense": _dense,
    "einsum_dense": _einsum_dense(
        ("ab,bc->ac", 7, (5,), (None, "c")),
        ("...x,xy->...y", 6, (3, 4), (None, "y")),
        ("abcd,cde->abe", (None, 9), (3, 2, 5), (None, "e")),
        ("abc,bd->adc", (8, 4), (3, 4), (None,)),
    ),
    "einsum_dense_heads": _einsum_dense(
        ("abc,cde->abde", (None, 3, 4), (2, 5), (None, "de")),
        ("abcd,cdef->abef", (None, 2, 3), (2, 3, 2), (None, "ef")),
        ("abc,cde->adbe", (2, None, 3), (4, 5), (None,)),
    ),
    "einsum_dense_per_tensor": _einsum_dense(
        ("abc,cde->abde", (None, 3, 4), (2, 5), ("e", "d")),
        ("ab,cb->ac", 7, (5,), (None, "c")),
        ("abc,dc->adb", (6, None), (3, 4), (None, "d")),
        ("abc,bde->aecd", (3, None, 4), (3, 5), (None, "ed", "e", "d")),
        ("ab,bcde->acde", (2, 3, 2), (4,), (None, "cde", "ce", "c")),
    ),
    "embedding": _embedding,
    "affine": _affine,
    "prelu": _prelu,
}
