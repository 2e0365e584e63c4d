"""Everything that touches Keras 2: which package it is, models as graphs, phases, precision.

`tests/test_rooms.py` keeps Keras' private attributes in here.
"""
