"""The version of the library, written into exported files."""

__version__ = "0.3.0"
