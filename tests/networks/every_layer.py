"""A small use of every Keras layer class: shapes of inputs, and arguments."""

from collections.abc import Callable
from typing import Any

from tests.helpers import keras, layers

VECTOR, SEQUENCE, IMAGE, VOLUME = (5,), (6, 4), (8, 8, 4), (4, 4, 4, 3)

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("Conv1D", "Conv2D", "Conv3D", "SeparableConv1D", "SeparableConv2D"), (3, 2)),
    **dict.fromkeys(("Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose"), (3, 2)),
    **dict.fromkeys(("DepthwiseConv1D", "DepthwiseConv2D", "Dense", "LSTM", "GRU"), (3,)),
    **dict.fromkeys(("LocallyConnected1D", "LocallyConnected2D", "ConvLSTM1D"), (3, 2)),
    **dict.fromkeys(("ConvLSTM2D", "ConvLSTM3D", "CenterCrop", "Resizing", "RandomCrop"), (3, 2)),
    **dict.fromkeys(("Dropout", "SpatialDropout1D", "SpatialDropout2D", "AlphaDropout"), (0.1,)),
    **dict.fromkeys(("SpatialDropout3D", "GaussianDropout", "GaussianNoise"), (0.1,)),
    **dict.fromkeys(("RandomRotation", "RandomZoom", "RandomContrast", "RandomHeight"), (0.1,)),
    **dict.fromkeys(("RandomBrightness", "RandomWidth", "ActivityRegularization"), (0.1,)),
    "SimpleRNN": (3,),
    "Activation": ("relu",),
    "EinsumDense": ("ab,bc->ac", 3),
    "GroupNormalization": (2,),
    "Permute": ((2, 1),),
    "RandomTranslation": (0.1, 0.1),
    "RepeatVector": (3,),
    "Rescaling": (0.5,),
    "Reshape": ((-1,),),
    "Discretization": ([0.0, 1.0],),
}
"""Required arguments of the constructors."""

TOGETHER = (
    *("Add", "Subtract", "Multiply", "Average", "Maximum", "Minimum", "Concatenate"),
    *("Attention", "AdditiveAttention"),
)

SHAPES = {
    "1D": SEQUENCE,
    "2D": IMAGE,
    "3D": VOLUME,
    "Permute": SEQUENCE,
    "Masking": SEQUENCE,
    "LSTM": SEQUENCE,
    "GRU": SEQUENCE,
    "RNN": SEQUENCE,
    "Random": IMAGE,
    "Resizing": IMAGE,
    "CenterCrop": IMAGE,
    "GroupNormalization": IMAGE,
    "ttention": SEQUENCE,
}
"""A word in a layer's name -> the shape of its inputs. Other layers read vectors."""

SPECIAL: dict[str, Callable[[], tuple[Any, Any]]] = {
    "Bidirectional": lambda: (SEQUENCE, layers.Bidirectional(layers.LSTM(3))),
    "TimeDistributed": lambda: (SEQUENCE, layers.TimeDistributed(layers.Dense(3))),
    "RNN": lambda: (SEQUENCE, layers.RNN(layers.LSTMCell(3))),
    "Lambda": lambda: (VECTOR, layers.Lambda(abs)),
    "ConvLSTM1D": lambda: ((3, 6, 2), layers.ConvLSTM1D(3, 2)),
    "ConvLSTM2D": lambda: ((3, 6, 6, 2), layers.ConvLSTM2D(3, 2)),
    "ConvLSTM3D": lambda: ((3, 4, 4, 4, 2), layers.ConvLSTM3D(3, 2)),
    "Normalization": lambda: (VECTOR, layers.Normalization(mean=0.5, variance=2.0)),
}


def example(name: str) -> Any:
    """Returns a model of that layer."""
    if name == "MultiHeadAttention":
        x = keras.Input(SEQUENCE)
        return keras.Model(x, layers.MultiHeadAttention(2, 3)(x, x))
    if name == "Dot":
        both = [keras.Input(SEQUENCE), keras.Input(SEQUENCE)]
        return keras.Model(both, layers.Dot(axes=2)(both))
    if name in ("Embedding", "CategoryEncoding"):
        x = keras.Input((4,), dtype="int32")
        encode = layers.CategoryEncoding(9, output_mode="multi_hot")
        return keras.Model(x, layers.Embedding(9, 3)(x) if name == "Embedding" else encode(x))
    if name in SPECIAL:
        shape, layer = SPECIAL[name]()
        x = keras.Input(shape)
        return keras.Model(x, layer(x))
    shape = next((shape for part, shape in SHAPES.items() if part in name), VECTOR)
    layer = getattr(layers, name)(*ARGUMENTS.get(name, ()))
    if name in TOGETHER:
        both = [keras.Input(shape), keras.Input(shape)]
        return keras.Model(both, layer(both))
    x = keras.Input(shape)
    return keras.Model(x, layer(x))
