"""Writes TFLite files, reads them, and runs them."""
