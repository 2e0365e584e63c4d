"""Data in, files out, and the progress of both."""
