"""What an activation quantizer costs by itself: forms of it, forward and backward.

    python -m benchmarks.quantizer                       all roles and sizes
    python -m benchmarks.quantizer --roles relu6 --sizes 16x48x48x96

Each form is a traced function: BatchNormalization, what stands behind it, and the gradients. All of
a size run in turns in one process. Milliseconds are the least of CPU time, those of
BatchNormalization alone taken off; memory is what the gradient reads besides the input of
BatchNormalization and the quantized tensor, which are kept in any case: bytes for each number.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic import fake_quant, plain_operations

SIZES = ("16x48x48x96", "16x24x24x144", "16x12x12x192", "16x6x6x576", "16x3x3x960")
CEILINGS = {"linear": None, "relu": math.inf, "relu6": 6.0}
"""Role -> upper end of its ReLU."""

EPSILON, WARM_UP = 1e-3, 2

Form = Callable[[Any, Any, Any, "float | None"], Any]
"""From what is quantized, the range and the ReLU's upper end to what comes out."""


def in_float(x: Any, low: Any, high: Any, ceiling: float | None) -> Any:
    """No quantizer: the ReLU."""
    return {None: tf.identity, math.inf: tf.nn.relu, 6.0: tf.nn.relu6}[ceiling](x)


def tensorflow(x: Any, low: Any, high: Any, ceiling: float | None) -> Any:
    """TensorFlow's operation behind the ReLU, with its own gradients."""
    return fake_quant.fake_quantize(in_float(x, low, high, ceiling), low, high)


def without_relu(x: Any, low: Any, high: Any, ceiling: float | None) -> Any:
    """The same without the ReLU, which the range's ends compute."""
    return fake_quant.fake_quantize(x, low, high)


def in_library(x: Any, low: Any, high: Any, ceiling: float | None) -> Any:
    """The library's."""
    return fake_quant.fake_quantize_if(True, x, low, high, ceiling=ceiling)


def mask(x: Any, low: Any, high: Any, ceiling: float | None) -> Any:
    """A mask is kept for the gradient, and selects in it: the library's form before."""
    low, high = plain_operations.nudged_range(low, high)

    @tf.custom_gradient
    def quantized(x: Any) -> Any:
        inside = (x > 0 if ceiling else x >= low) & (x <= high)
        y = fake_quant.fake_quantize(x, low, high)
        return y, lambda up: tf.raw_ops.Select(condition=inside, x=up, y=tf.zeros_like(up))

    return quantized(x)


def scaled(x: Any, low: Any, high: Any, ceiling: float | None) -> Any:
    """`x` is kept; the gradient is ReLU6's at `x`, brought to 0..6."""
    low, high = plain_operations.nudged_range(low, high)

    @tf.custom_gradient
    def quantized(x: Any) -> Any:
        def gradient(up: Any) -> Any:
            factor = 6.0 / (high - low)
            at = x * factor if ceiling else (x - low) * factor
            return tf.raw_ops.Relu6Grad(gradients=up, features=at)

        return fake_quant.fake_quantize(x, low, high), gradient

    return quantized(x)


def again(x: Any, low: Any, high: Any, ceiling: float | None) -> Any:
    """As `scaled`; nothing is kept: BatchNormalization is computed again, to 0..6."""
    low, high = plain_operations.nudged_range(low, high)
    z, gamma, beta = x.op.inputs[:3]
    mean, variance = x.op.outputs[1:3]
    factor = gamma * tf.math.rsqrt(variance + EPSILON)
    offset = beta - mean * factor

    @tf.custom_gradient
    def quantized(x: Any) -> Any:
        def gradient(up: Any) -> Any:
            to_6 = 6.0 / (high - low)
            at = tf.raw_ops.FusedBatchNormV3(
                x=z,
                scale=factor * to_6,
                offset=(offset if ceiling else offset - low) * to_6,
                mean=tf.zeros_like(mean),
                variance=tf.ones_like(mean),
                epsilon=0.0,
                is_training=False,
            ).y
            return tf.raw_ops.Relu6Grad(gradients=up, features=at)

        return fake_quant.fake_quantize(x, low, high), gradient

    return quantized(x)


def fixed(x: Any, low: Any, high: Any, ceiling: float | None) -> Any:
    """The range ends where ReLU6 does: its gradient, of `x`."""

    @tf.custom_gradient
    def quantized(x: Any) -> Any:
        y = fake_quant.fake_quantize(x, 0.0, 6.0)
        return y, lambda up: tf.raw_ops.Relu6Grad(gradients=up, features=x)

    return quantized(x)


def of_output(x: Any, low: Any, high: Any, ceiling: float | None) -> Any:
    """ReLU's gradient at the output: wrong where that is rounded to 0, and above the range."""

    @tf.custom_gradient
    def quantized(x: Any) -> Any:
        y = fake_quant.fake_quantize(x, low, high)
        return y, lambda up: tf.raw_ops.ReluGrad(gradients=up, features=y)

    return quantized(x)


def compiled(x: Any, low: Any, high: Any, ceiling: float | None) -> Any:
    """`x` is kept; XLA computes rounding and gradient, each in one pass."""
    low, high = plain_operations.nudged_range(low, high)

    @tf.custom_gradient
    def quantized(x: Any) -> Any:
        @tf.function(jit_compile=True, autograph=False)
        def forward(x: Any, low: Any, high: Any) -> Any:
            return fake_quant.fake_quantize(x, low, high)

        @tf.function(jit_compile=True, autograph=False)
        def backward(x: Any, up: Any, low: Any, high: Any) -> Any:
            return tf.where((x > 0 if ceiling else x >= low) & (x <= high), up, 0.0)

        return forward(x, low, high), lambda up: backward(x, up, low, high)

    return quantized(x)


FORMS: dict[str, Form] = {
    "float": in_float,
    "library": in_library,
    "tensorflow": tensorflow,
    "without relu": without_relu,
    "mask": mask,
    "scaled": scaled,
    "again": again,
    "fixed 0..6": fixed,
    "of output": of_output,
    "xla": compiled,
}
ROLES_OF = {"fixed 0..6": ("relu6",), "of output": ("relu", "relu6")}
"""The roles of forms that are not for all."""

OBSERVED = {"smallest": tf.reduce_min, "largest": tf.reduce_max}
"""What is observed, which comes on top of a form."""

IN_HALF = ("float", "library")
"""The forms that take half precision."""


def traced(form: Form | None, role: str, shape: list[int], dtype: Any, observe: Any = None) -> Any:
    """A step of a form as a function of input, upstream gradient and BatchNormalization's weights.

    Returns:
        It, and the bytes for each number that it keeps.
    """
    kept: list[int] = []

    def step(z: Any, upstream: Any, gamma: Any, beta: Any) -> Any:
        none, ends = tf.zeros(0), (tf.constant(0.0 if CEILINGS[role] else -3.0), tf.constant(3.0))
        x, *_ = tf.raw_ops.FusedBatchNormV3(
            x=z, scale=gamma, offset=beta, mean=none, variance=none, epsilon=EPSILON
        )
        y = x if form is None else form(x, *ends, CEILINGS[role])
        result = [] if observe is None else [observe(x)]
        before = set(tf.compat.v1.get_default_graph().get_operations())
        gradients = tf.gradients(y, [z, gamma, beta], upstream)
        added = set(tf.compat.v1.get_default_graph().get_operations()) - before
        read = {_source(tensor) for op in added for tensor in op.inputs if tensor.op in before}
        read -= {_source(item) for item in (z, y, upstream)}
        kept.append(sum(_bytes(tensor, math.prod(shape)) for tensor in read))
        return y, *gradients, *result

    channels = tf.TensorSpec([shape[-1]])
    specs = [tf.TensorSpec(shape, dtype), tf.TensorSpec(shape, dtype), channels, channels]
    function = tf.function(step, autograph=False, input_signature=specs).get_concrete_function()
    return function, kept[0]


def _source(tensor: Any) -> Any:
    """The tensor that this one is, under all names that it has."""
    while tensor.op.type in ("Identity", "IdentityN"):
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor.ref()


def _bytes(reference: Any, size: int) -> int:
    tensor = reference.deref()
    return tensor.dtype.size if tensor.shape.num_elements() == size else 0


def measure(role: str, shape: list[int], dtype: Any, turns: int) -> dict[str, tuple[float, int]]:
    """Milliseconds, and bytes kept for each number, of each form."""
    random = np.random.default_rng(1)
    z, upstream = (tf.constant(random.normal(size=shape), dtype) for _ in range(2))
    gamma, beta = tf.ones(shape[-1]), tf.zeros(shape[-1])
    functions = {"none": traced(None, role, shape, dtype)}
    for name, form in FORMS.items():
        is_meant = role in ROLES_OF.get(name, CEILINGS)
        if is_meant and (dtype == tf.float32 or name in IN_HALF):
            functions[name] = traced(form, role, shape, dtype)
    for name, observe in OBSERVED.items():
        functions[name] = traced(None, role, shape, dtype, observe)
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(WARM_UP + turns):
        for name, (function, _) in functions.items():
            start = time.process_time()
            function(z, upstream, gamma, beta)
            if turn >= WARM_UP:
                times[name].append(time.process_time() - start)
    least = {name: 1000 * min(item) for name, item in times.items()}
    base = least.pop("none")
    return {name: (value - base, functions[name][1]) for name, value in least.items()}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--roles", nargs="*", default=list(CEILINGS), choices=list(CEILINGS))
    parser.add_argument("--sizes", nargs="*", default=SIZES, metavar="SIZE")
    parser.add_argument("--dtype", default="float32", help="float32, float16 or bfloat16")
    parser.add_argument("--turns", type=int, default=20)
    arguments = parser.parse_args()
    for role in arguments.roles:
        rows: dict[str, list[str]] = {}
        for size in arguments.sizes:
            shape = [int(item) for item in size.split("x")]
            result = measure(role, shape, tf.as_dtype(arguments.dtype), arguments.turns)
            for name, (ms, kept) in result.items():
                rows.setdefault(name, [f"{kept}"]).append(f"{ms:.2f}")
        heads = [role, "bytes", *arguments.sizes]
        print("| " + " | ".join(heads) + " |\n|" + " --- |" * len(heads))
        for name, cells in rows.items():
            print("| " + " | ".join([name, *cells]) + " |")
        print(flush=True)


if __name__ == "__main__":
    main()
