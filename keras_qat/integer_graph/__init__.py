"""The resolved graph of a quantization-aware model, and what computes it."""
