"""Reads float models, and converts models of Keras 3 to Keras 2."""
