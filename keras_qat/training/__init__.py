"""What a quantization-aware model is made of: layers, observers, schedules, calibration."""
