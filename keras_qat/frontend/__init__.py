"""Reads Keras 2 and Keras 3 models into a graph of layer calls."""
