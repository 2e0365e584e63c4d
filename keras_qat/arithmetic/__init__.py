"""Integer arithmetic of TFLite's kernels: scales and zero points, fixed point, rounding.

Each runtime rounds differently. `kernel_families` describes how, and every integer computation
receives such a `KernelFamily`.
"""
