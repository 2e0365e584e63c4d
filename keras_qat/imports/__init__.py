"""Reads float models, and converts models of Keras 3 and of tfmot to Keras 2."""
