"""Ranges of quantizers: observed from tensors, learned by training, or fitted to weights."""
