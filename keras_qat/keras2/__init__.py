"""Imports Keras 2, and reads private attributes of Keras' layers and models."""
