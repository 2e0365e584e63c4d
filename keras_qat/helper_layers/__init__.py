"""Serializable Keras layers that lowering creates for operations that no Keras layer computes."""
