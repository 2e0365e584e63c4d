"""Finds the package of Keras 2, and accesses private attributes of its layers and models."""
