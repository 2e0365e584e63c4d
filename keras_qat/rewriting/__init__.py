"""Makes a quantization-aware model from a plan, and a float model from that again."""
