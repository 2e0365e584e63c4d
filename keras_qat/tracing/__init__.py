"""Tracing runs a layer's `call` on symbolic tensors, and records the operations inside."""
