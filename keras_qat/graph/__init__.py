"""A Keras model as a graph of layer calls, and what is known about its tensors."""
