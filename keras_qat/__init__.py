"""Quantization-aware training for Keras 2, down to the int8 file that runs.

`quantize_model` makes a `QuantizedModel` of a float one; `plan` says beforehand what it would do,
as a `Plan`. `quantizers` lists each `Quantizer`, `summary` gives a `Summary`, `verify` a `Report`,
`simulate` a `Simulation`, `resolve` the `ResolvedGraph` that all exports are written from.
"""

from keras_qat import callbacks, layers, recipes, specs, targets
from keras_qat.calibrate import calibrate
from keras_qat.distill import Distiller
from keras_qat.export import export_c, export_onnx, export_saved_model, export_tflite, read_metadata
from keras_qat.keras2.backend import keras
from keras_qat.keras3 import from_keras_3, to_keras_3
from keras_qat.pictures import Picture, plot_model, plot_quantizers
from keras_qat.plan import Plan
from keras_qat.post_training import (
    bias_correction,
    equalize,
    learn_rounding,
    reestimate_batch_norm,
)
from keras_qat.quantize import Quantizer, plan, quantize_model, quantizers
from keras_qat.recipes import Recipe
from keras_qat.resolved.graph import ResolvedGraph
from keras_qat.resolved.resolve import resolve
from keras_qat.rewrite import QuantizedModel
from keras_qat.rules import register_op, register_rule
from keras_qat.runner import TFLiteModel
from keras_qat.schedule import freeze_batch_norm, freeze_ranges, set_quantization
from keras_qat.search_bits import search_bits
from keras_qat.sensitivity import sensitivity
from keras_qat.simulate import Simulation, simulate
from keras_qat.strip import strip_quantization
from keras_qat.summary import Summary, summary
from keras_qat.verify import Report, verify
from keras_qat.version import __version__

__all__ = [
    "Distiller",
    "Picture",
    "Plan",
    "QuantizedModel",
    "Quantizer",
    "Recipe",
    "Report",
    "ResolvedGraph",
    "Simulation",
    "Summary",
    "TFLiteModel",
    "__version__",
    "bias_correction",
    "calibrate",
    "callbacks",
    "equalize",
    "export_c",
    "export_onnx",
    "export_saved_model",
    "export_tflite",
    "freeze_batch_norm",
    "freeze_ranges",
    "from_keras_3",
    "keras",
    "layers",
    "learn_rounding",
    "plan",
    "plot_model",
    "plot_quantizers",
    "quantize_model",
    "quantizers",
    "read_metadata",
    "recipes",
    "reestimate_batch_norm",
    "register_op",
    "register_rule",
    "resolve",
    "search_bits",
    "sensitivity",
    "set_quantization",
    "simulate",
    "specs",
    "strip_quantization",
    "summary",
    "targets",
    "to_keras_3",
    "verify",
]
