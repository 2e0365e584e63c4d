"""Definitions of operators (`Op`), in one file for each kind of operator."""
