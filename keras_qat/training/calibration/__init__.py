"""Calibration: computes ranges from data, without training."""
