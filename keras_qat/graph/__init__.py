"""Represents a Keras model as a graph of layer calls, and analyzes its tensors."""
