"""The version of the library, written into exported files."""

__version__ = "1.0.0rc1"
