"""Operators of recurrent layers: LSTM as one kernel, all others unrolled into steps."""
