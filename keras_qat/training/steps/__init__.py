"""Training steps: custom training, optimizers, and operations that quantizers share."""
