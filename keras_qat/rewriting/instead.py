"""What to do instead of using attributes that a quantized model does not have."""

VERBS = (
    *("bias_correction", "calibrate", "diagnose", "export_c", "export_onnx", "export_saved_model"),
    *("export_tflite", "freeze_batch_norm", "freeze_ranges", "learn_rounding", "plot_model"),
    *("plot_quantizers", "quantizers", "reestimate_batch_norm", "resolve", "set_quantization"),
    *("simulate", "strip_quantization", "verify"),
)
"""Functions of the library that people try as methods."""
INSTEAD = {
    **{verb: f"Call keras_qat.{verb}(model, ...)." for verb in VERBS},
    "add": "Add layers to the float model, and quantize that.",
}
"""Attributes that people try -> what to do."""
