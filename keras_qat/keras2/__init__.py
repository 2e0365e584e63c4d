"""Adapts Keras 2: finds its package, and reads layers and models from its private attributes."""
