"""Operators: one row each, in a file for each family of operators."""
