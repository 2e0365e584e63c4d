"""The ways in which BatchNormalization folds into the weights before it."""
