"""Pictures and HTML pages of models and reports."""

from __future__ import annotations

from keras_qat.analysis.drawing.model_graph import plot_model
from keras_qat.analysis.drawing.pages import Picture
from keras_qat.analysis.drawing.quantizers import plot_quantizers

__all__ = ["Picture", "plot_model", "plot_quantizers"]
