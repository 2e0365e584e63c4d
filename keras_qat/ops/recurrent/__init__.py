"""Operators of recurrent layers. An LSTM is one TFLite operator; others are unrolled into steps."""
