"""Makes a quantization-aware model from a plan, and turns it back into a float model."""
