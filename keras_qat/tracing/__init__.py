"""Traces custom layers: runs their `call` on symbolic tensors, and records the calls inside."""
