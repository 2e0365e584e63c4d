"""Quantizers and their ranges, which are observed, learned, or follow the weights."""
