"""Serializable layers for operations without a Keras layer. Lowering creates these layers."""
