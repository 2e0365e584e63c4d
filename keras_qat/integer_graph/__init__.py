"""Integer inference of quantization-aware models. A `ResolvedGraph` describes the computation."""
