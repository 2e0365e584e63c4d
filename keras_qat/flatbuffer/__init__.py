"""TFLite files as data, in the objects of their schema.

`graph` reads a file as tensors and operations, and cuts it into pieces; `edit` changes one.
"""

from keras_qat.flatbuffer.edit import read_metadata
from keras_qat.flatbuffer.graph import FileGraph, Operation, Tensor

__all__ = ["FileGraph", "Operation", "Tensor", "read_metadata"]
