"""Operators of recurrent layers. An LSTM is one TFLite operator. All others are unrolled."""
