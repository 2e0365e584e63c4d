"""LiteRT with XNNPACK, and TFLite's own kernels where XNNPACK has none: phones and desktops."""

from __future__ import annotations

from keras_qat.config.targets.target import Target
from keras_qat.tflite.site import Site


def _lstm_of_int8(site: Site) -> str | None:
    is_lstm = site.operation.kernel == "UNIDIRECTIONAL_SEQUENCE_LSTM"
    is_wide = is_lstm and site.outputs[0].type == "int16"
    return "no kernel for int16" if is_wide else None


XNNPACK = Target(
    name="xnnpack",
    title="LiteRT",
    kernels="xnnpack",
    batch_size=None,
    operators=None,
    checks=(_lstm_of_int8,),
    source="run: LiteRT runs all files that keras_qat writes",
)
