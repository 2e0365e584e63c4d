"""Creates a quantization-aware model from a plan, and converts it back to a float model."""
