"""Integer arithmetic of TFLite's kernels: scales and zero points, fixed point, rounding.

Each runtime rounds differently. A `KernelFamily` describes the rounding of one runtime, and every
integer computation receives one.
"""
