"""Parts of a quantization-aware model: layers, observers, schedules, calibration."""
