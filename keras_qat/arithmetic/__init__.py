"""Integer arithmetic as TFLite's kernels do it: scales and zero points, fixed point, rounding.

Runtimes round in different ways. `kernel_families` describes each of them, and every integer
computation takes one of these descriptions as an argument.
"""
