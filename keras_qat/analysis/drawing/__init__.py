"""Pictures and pages: SVG and HTML, written without other libraries."""

from __future__ import annotations

from keras_qat.analysis.drawing.model_graph import plot_model
from keras_qat.analysis.drawing.quantizers import plot_quantizers
from keras_qat.analysis.drawing.svg import Picture

__all__ = ["Picture", "plot_model", "plot_quantizers"]
