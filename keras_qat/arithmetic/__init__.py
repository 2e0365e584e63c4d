"""Integer arithmetic of TFLite's kernels: scales and zero points, fixed point, rounding.

Each runtime, such as XNNPACK or TFLite Micro, rounds differently. A `KernelFamily` describes the
rounding of one runtime.
"""
