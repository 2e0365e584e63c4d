"""Reads data, writes files, and shows progress."""
