"""Tests of models of Keras 3, which are skipped on TensorFlow 2.15 because it has no Keras 3."""
