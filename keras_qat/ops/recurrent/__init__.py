"""Operators of recurrent layers. LSTM is one operator. The steps of other layers are unrolled."""
