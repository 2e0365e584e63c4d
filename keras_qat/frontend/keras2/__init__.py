"""Everything that touches Keras 2's internals: package, model graphs, training phase, precision.

`tests/test_rooms.py` keeps Keras' private attributes inside this room.
"""
