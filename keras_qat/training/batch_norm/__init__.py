"""Folding of BatchNormalization into the weights of the layer before it."""
