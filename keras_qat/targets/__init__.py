"""Where files run: what each place has kernels for, as data."""

from keras_qat.targets.target import Kernel, Problem, Target, problems
from keras_qat.targets.tflm import TFLM

__all__ = ["TFLM", "Kernel", "Problem", "Target", "problems"]
