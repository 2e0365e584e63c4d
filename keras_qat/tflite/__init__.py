"""Writes TFLite files from the resolved graph, reads them, and runs them."""
