"""Integer arithmetic of TFLite's kernels: scales and zero points, fixed point, rounding.

Runtimes round in different ways. `kernel_families` describes each of them, and every integer
computation has one of these descriptions as an argument.
"""
