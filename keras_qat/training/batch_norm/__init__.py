"""The ways in which BatchNormalization folds into the weights in front of it."""
