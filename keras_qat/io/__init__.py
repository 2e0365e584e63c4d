"""Reads data, writes files, and shows the progress of both."""
