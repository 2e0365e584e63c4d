"""Traces custom layers: runs their `call` on symbolic tensors to get calls of other layers."""
