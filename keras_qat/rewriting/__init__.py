"""The plan becomes a quantization-aware model, and that a float model again."""
