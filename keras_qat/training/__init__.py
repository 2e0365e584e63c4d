"""Training of quantization-aware models: layers, quantizers, schedules, calibration."""
