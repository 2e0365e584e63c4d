"""Creates a quantization-aware model, and converts it back to a float model."""
