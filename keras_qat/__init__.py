"""Quantization-aware training for Keras 2, with exact int8 export.

`quantize_model` converts a float model to a `QuantizedModel`, which you train and export with
`export_tflite`. `plan` shows the conversion in advance. `verify` compares an exported file with its
model.
"""

from keras_qat import callbacks, layers, recipes, specs, targets
from keras_qat.analysis.diagnose import diagnose
from keras_qat.analysis.plan import plan
from keras_qat.analysis.summary import Summary, summary
from keras_qat.analysis.tune import TuneResult, tune
from keras_qat.analysis.verify import Report, verify
from keras_qat.config.recipe import Recipe
from keras_qat.export import export_c, export_saved_model, export_tflite, read_metadata
from keras_qat.imports.keras3 import from_keras_3
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.resolve import resolve
from keras_qat.integer_graph.simulate import Simulation, simulate
from keras_qat.keras2.backend import keras
from keras_qat.ops.registry import register_op
from keras_qat.placement.plan import Plan
from keras_qat.rewrite import QuantizedModel
from keras_qat.rewriting.quantize import quantize_model
from keras_qat.rewriting.strip import strip_quantization
from keras_qat.rewriting.to_keras_3 import to_keras_3
from keras_qat.tflite.model import TFLiteModel
from keras_qat.training.calibration.calibrate import calibrate
from keras_qat.training.post_training import bias_correction, learn_rounding
from keras_qat.training.quantizers import Quantizer, quantizers
from keras_qat.training.schedule import freeze_batch_norm, freeze_ranges, set_quantization
from keras_qat.version import __version__

__all__ = [
    "Plan",
    "QuantizedModel",
    "Quantizer",
    "Recipe",
    "Report",
    "ResolvedGraph",
    "Simulation",
    "Summary",
    "TFLiteModel",
    "TuneResult",
    "__version__",
    "bias_correction",
    "calibrate",
    "callbacks",
    "diagnose",
    "export_c",
    "export_saved_model",
    "export_tflite",
    "freeze_batch_norm",
    "freeze_ranges",
    "from_keras_3",
    "keras",
    "layers",
    "learn_rounding",
    "plan",
    "quantize_model",
    "quantizers",
    "read_metadata",
    "recipes",
    "register_op",
    "resolve",
    "set_quantization",
    "simulate",
    "specs",
    "strip_quantization",
    "summary",
    "targets",
    "to_keras_3",
    "tune",
    "verify",
]


def __dir__() -> list[str]:
    return __all__
