"""What TFLite's integer kernels without weights compute, in plain TensorFlow and exactly.

`int8`: XNNPACK's, and TFLite's own where it has none. `int16`: TFLite's. `grid`: what whole numbers
stand for. `fixed_point`: how kernels multiply by real numbers. `inputs`: what a call gives them.
"""
