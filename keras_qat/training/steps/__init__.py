"""How Keras runs training steps, and the operations that quantizers share in a step."""
