"""The version of the library, as it is written into exported files."""

__version__ = "0.3.0"
