"""How integer kernels compute: scales and zero points, fixed-point numbers, roundings.

Each family of kernels rounds in its own way: `families.Family` names them, and every integer
computation of `keras_qat.ops` takes one as an argument.
"""
