"""Models of Keras 2 and Keras 3 in, a graph of layer calls out."""
