"""Expansions: TensorFlow functions that compute operations from simpler ones, by subject."""
