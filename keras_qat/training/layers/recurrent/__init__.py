"""Quantization-aware recurrent layers."""
