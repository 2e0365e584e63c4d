"""The operators (`Op`), in one file for each kind, such as `conv.py` for convolutions."""
