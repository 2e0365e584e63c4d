"""Pictures and pages: SVG and HTML, written without other libraries."""

from __future__ import annotations

from keras_qat.pictures.model import plot_model
from keras_qat.pictures.quantizers import plot_quantizers
from keras_qat.pictures.svg import Picture

__all__ = ["Picture", "plot_model", "plot_quantizers"]
