"""How Keras runs training steps, optimizers and callbacks, and what is changed about it."""
