"""The resolved graph of a quantization-aware model, and inference with it."""
