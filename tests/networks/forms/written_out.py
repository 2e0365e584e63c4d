"""Keras layers without an integer kernel, which are expanded."""

from tests.helpers import images, layers
from tests.networks.forms.form import Form, forms

LAYERS = {
    "volume": (lambda **more: layers.Conv3D(2, (2, 1, 2), padding="same", **more), (3, 4, 5, 2)),
    "groups": (
        lambda **more: layers.Conv3D(4, (3, 1, 2), groups=2, dilation_rate=(2, 1, 1), **more),
        (5, 2, 3, 4),
    ),
    "steps": (lambda **more: layers.Conv2D(2, (2, 1), padding="same", **more), (2, 4, 3, 2)),
    "steps_of_sequences": (
        lambda **more: layers.Conv1D(4, 3, dilation_rate=2, groups=2, **more),
        (2, 6, 2),
    ),
}
OTHERS = {
    "bicubic": lambda: layers.UpSampling2D(2, interpolation="bicubic"),
    "area": lambda: layers.Resizing(2, 3, "area"),
    "two axes": lambda: layers.Softmax(axis=[1, 2]),
    "axes apart": lambda: layers.Softmax(axis=(-1, 1)),
}


WRITTEN_OUT = {
    **{
        name: Form(
            lambda x, make=make: make(activation="relu")(x), (images(32, shape),), strips=True
        )
        for name, (make, shape) in LAYERS.items()
    },
    **forms({name: lambda x, f=f: f()(x) for name, f in OTHERS.items()}, images(16, (4, 6, 3))),
    "center crop": Form(lambda x: layers.CenterCrop(3, 4)(x), (images(8, (6, 7, 2)),)),
}
FORMS = {"written out": WRITTEN_OUT}
