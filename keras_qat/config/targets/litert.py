"""LiteRT with XNNPACK, and TFLite's own kernels where XNNPACK has none: phones and desktops."""

from __future__ import annotations

from keras_qat.config.targets.target import Target
from keras_qat.tflite.site import Site


def _lstm_of_int8(site: Site) -> str | None:
    is_lstm = site.operation.kernel == "UNIDIRECTIONAL_SEQUENCE_LSTM"
    is_wide = is_lstm and site.outputs[0].type == "int16"
    return "no kernel for int16" if is_wide else None


def _fft_of_a_power_of_two(site: Site) -> str | None:
    sizes = site.constant(1) if site.operation.kernel == "RFFT2D" else None
    refused = [int(size) for size in ([] if sizes is None else sizes) if size & (size - 1)]
    if not refused:
        return None
    next_power = 1 << refused[0].bit_length()
    return f"powers of two only, not {refused[0]}: fft_length={next_power} pads with zeros"


XNNPACK = Target(
    name="xnnpack",
    title="LiteRT",
    kernels="xnnpack",
    batch_size=None,
    operators=None,
    checks=(_lstm_of_int8, _fft_of_a_power_of_two),
    source="run: LiteRT runs all files that keras_qat writes",
)
