"""Operators: a row each, in a file for each family of them."""
