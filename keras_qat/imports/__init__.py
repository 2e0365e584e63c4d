"""Reads a user's float model, and converts models of Keras 3 and of tfmot to Keras 2."""
