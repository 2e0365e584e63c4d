"""TFLite files: written operator by operator from the resolved graph, read, and run."""
