"""Adapts Keras 2: finds its package, and reads private attributes of layers and models."""
