"""Calibration: ranges from data, without training."""
