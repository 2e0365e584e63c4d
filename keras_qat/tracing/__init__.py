"""Traces a custom layer: runs its `call` on symbolic tensors, which gives calls of other layers."""
