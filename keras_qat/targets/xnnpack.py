"""XNNPACK, and TFLite's own kernels where it has none: phones and desktops."""

from __future__ import annotations

from keras_qat.targets.target import Target

__all__ = ["XNNPACK"]

XNNPACK = Target(
    name="xnnpack",
    title="LiteRT",
    kernels="xnnpack",
    batch_size=None,
    operators=None,
    source="run here: what keras_qat writes, LiteRT runs",
)
