"""How one tensor is quantized: the three kinds of specification, as plain data."""

from keras_qat.config.specs import (
    FixedSpec,
    QuantSpec,
    SharedSpec,
    Spec,
)

__all__ = [
    "FixedSpec",
    "QuantSpec",
    "SharedSpec",
    "Spec",
]
