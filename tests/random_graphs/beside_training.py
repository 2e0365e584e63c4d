"""Compares the integers of a resolved graph with what training computes.

Model, file and simulation read one resolved graph, so an incorrect value in it changes all of them.
Training does not read that graph: it computes each layer in float, with fake-quantized weights.
Here, each layer of the model receives the float values of the integers upstream. Its integer
outputs must be close to its float outputs: within half a step, plus the rounding inside kernels.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic import fake_quant
from keras_qat.arithmetic.kernel_families import KernelFamily
from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.graph.calls import Call, Value, flatten_values
from keras_qat.graph.precision import compute_in_float32
from keras_qat.graph.rebuild_model import evaluate_graph
from keras_qat.helper_layers import elementwise_functions
from keras_qat.integer_graph.execute import prepare
from keras_qat.integer_graph.fold_weights import (
    BIAS_MAX,
    LARGEST_MULTIPLIER,
    LEAST_MULTIPLIER,
    LEAST_SCALE,
    find_divisor,
)
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.simulate import run_batch
from keras_qat.keras2.backend import get_keras_mask, set_keras_mask, swap_attributes
from keras_qat.ops.node import Constant, Node, Tensor
from keras_qat.ops.op import FixedRange
from keras_qat.ops.weights import Weights
from keras_qat.training.batch_norm import fold_modes
from keras_qat.training.calibration.watch import infer
from keras_qat.training.fake_quantization.phase import QUANTIZED
from keras_qat.training.fake_quantization.weight_quantizer import get_weight
from keras_qat.training.layers import Quantize, QuantizeWrapper
from keras_qat.training.scheduled_layer import ScheduledLayer, assuming

NEXT = 0.51
"""Maximum distance to the nearest quantized value in steps, including float32 errors."""

OF_FACTOR = 0.5
"""Steps by which 255 times a factor in 256ths may be off, as in XNNPACK."""

TWICE = 0.25
"""Further steps that a fixed-point product may be off, because it is rounded twice."""

MORE: dict[int, dict[str, float]] = {
    8: {
        **{"leaky_relu": OF_FACTOR, "requantize": OF_FACTOR, "select": OF_FACTOR},
        **{"contract": TWICE, "matmul": TWICE},
        **{"divide": 0.5, "group_norm": 0.5, "layer_norm": 0.5, "unit_norm": 0.5, "softmax": 1.0},
    },
    16: {
        **{"contract": 1.0, "matmul": 1.0, "mean": 0.5},
        **{"sigmoid": 2.0, "tanh": 2.0, "softmax": 32.0},
    },
}
"""Bits -> operator -> steps that its kernel may be off in addition.

The causes are 16-bit tables and tensors inside it, and with 16 bits, multipliers of 15 bits.
"""

RECURRENT = ("gru", "lstm", "masked", "simple_rnn", "conv_lstm")
"""Beginnings of names of operators that round at each step."""

MEAN = {8: 8.0, 16: 64.0}
"""Bits -> steps that those may be off on average, because a rounded sum can switch a gate."""


def assert_alike_in_training(graph: ResolvedGraph, inputs: list[np.ndarray]) -> None:
    """Asserts that values, levels and weights are the same as in training."""
    assert_levels_are_those_of_training(graph)
    assert_weights_are_those_of_training(graph)
    assert_values_are_those_of_training(graph, inputs)


def assert_values_are_those_of_training(graph: ResolvedGraph, inputs: list[np.ndarray]) -> None:
    """Asserts that all quantized values are close to what training computes from their inputs."""
    family = graph.origin.family
    computed = run_batch(graph, inputs, family, prepare(graph, family))
    known = {x for value, x in graph.tensors.items() if graph.values.get(x) is value}
    makers = {output: node for node in graph.nodes for output in node.outputs}
    differing: list[str] = []

    def forced(value: Value, real: Any) -> Any:
        """Returns the float values of a value's integers, or training's result for others."""
        tensor = graph.tensors.get(value)
        if tensor not in known or tensor.params is None or graph.values[tensor] is not value:
            return real
        ours = np.reshape(tensor.params.dequantize(computed[tensor]), real.shape)
        low, high = ends_of(tensor.params)
        steps = np.abs(ours - np.clip(real, low, high)) / tensor.params.scale
        if may_be_extreme(makers.get(tensor)):
            steps = np.where((ours == low) | (ours == high), 0.0, steps)
        name = name_of(tensor, makers)
        far, most = steps.max(initial=0.0), allowed_steps(tensor, makers, known, family)
        if name.startswith(RECURRENT):
            far, most = steps.mean(), MEAN[16 if tensor.params.bits == 16 else 8]
        if not far <= most:
            differing.append(f"{tensor.name} ({name}): {far:.3f} steps off, not {most:.3f}")
        result = tf.constant(ours, real.dtype)
        set_keras_mask(result, get_keras_mask(real))
        return result

    def apply(call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
        return tf.nest.map_structure(forced, call.outputs, unrounded(call, args, kwargs))

    calls = graph.origin.calls
    layers = dict.fromkeys(call.layer for call in calls.calls)
    with assuming(QUANTIZED, [x for x in layers if isinstance(x, ScheduledLayer)]):
        pairs = zip(flatten_values(calls.inputs), inputs, strict=True)
        given = [forced(value, tf.constant(x, value.dtype)) for value, x in pairs]
        evaluate_graph(calls, given, apply)
    assert not differing, f"not what training computes: {differing}"


def may_be_extreme(node: Node | None) -> bool:
    """Returns whether a function may be infinite or mask scores. Training's value then differs."""
    if node is None:
        return False
    is_function = type(node.call.layer).__module__ == elementwise_functions.__name__
    return is_function or bool(node.op and node.op.has_mark)


def allowed_steps(
    tensor: Tensor, makers: dict[Tensor, Node], known: set[Tensor], family: KernelFamily
) -> float:
    """Returns how many steps a value may be from what training computes from `known` tensors.

    It is half a step, plus the rounding of biases, constants and tensors in between, and of weights
    that kernels store differently.
    """
    node, params = makers.get(tensor), tensor.params
    if node is None or node.op is None or params is None:
        return NEXT
    bits = 16 if params.bits == 16 else 8
    steps, rounded = NEXT + MORE[bits].get(node.op.name, 0.0), 0.0
    if family.sums is None:
        steps += TWICE
    for operand in node.inputs:
        if isinstance(operand, Constant):
            others = [x.params for x in node.inputs if isinstance(x, Tensor) and x.params]
            factor = max(1.0, *(largest(x) for x in others)) if node.op.name == "multiply" else 1.0
            rounded += 0.5 * operand.params.scale * factor
        elif operand not in known and operand.params is not None:
            rounded += allowed_steps(operand, makers, known, family) * operand.params.scale
    if isinstance(node.op.output, FixedRange):
        own = node.op.output.params(params.bits)
        if own.scale != params.scale:
            rounded, steps = rounded + 0.5 * own.scale, steps + OF_FACTOR
    if node.weights is not None and node.inputs[0].params is not None:
        scale = float(np.max(node.weights.scale))
        source = node.inputs[0].params
        products = node.weights.count / (node.weights.scale.size if node.weights.name else 1)
        rounded += 0.5 * source.scale * scale
        rounded += node.weights.rounding * scale * largest(source) * products
        steps += 1.0 if bits == 16 else 0.0  # Multipliers have 15 bits: see `fold_weights`.
    return steps + rounded / float(params.scale)


def ends_of(params: QuantParams) -> np.ndarray:
    """Returns the float values of the lowest and the highest quantized value."""
    return params.dequantize(np.array([params.lowest, params.highest]))


def largest(params: QuantParams) -> float:
    """Returns the largest magnitude in a range."""
    return float(np.abs(ends_of(params)).max())


def name_of(tensor: Tensor, makers: dict[Tensor, Node]) -> str:
    """Returns the name of the operator that computes a tensor, before it was rounded again."""
    node = makers.get(tensor)
    if node is None or node.op is None:
        return "input" if node is None else "float"
    is_again = node.op.name == "requantize" and isinstance(node.inputs[0], Tensor)
    return name_of(node.inputs[0], makers) if is_again else node.op.name


def unrounded(call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
    """Computes a call as in training, but without the quantizer of its output."""
    layer = call.layer
    if isinstance(layer, Quantize):
        return args[0]
    if not isinstance(layer, QuantizeWrapper):
        return infer(call, args, kwargs)
    with swap_attributes(layer, output_quantizer=None):
        real = infer(call, args, kwargs)
    result = fake_quant.apply_relu(real, layer.ceiling)
    set_keras_mask(result, get_keras_mask(real))
    return result


def assert_levels_are_those_of_training(graph: ResolvedGraph) -> None:
    """Asserts that the quantized values of each tensor represent the levels of training."""
    for tensor, value in graph.values.items():
        quantizer, params = quantizer_of(value), tensor.params
        if quantizer is not None and params is not None:
            levels = params.dequantize(np.arange(params.lowest, params.highest + 1))
            trained = quantizer(tf.constant(levels), QUANTIZED).numpy()
            steps = np.abs(trained - levels).max() / params.scale
            assert steps < NEXT - 0.5, f"{tensor.name}: levels are {steps:.3f} steps off"


def quantizer_of(value: Value | None) -> Any:
    layer = None if value is None or value.producer is None else value.producer.layer
    is_one = isinstance(layer, Quantize)
    return layer.quantizer if is_one else getattr(layer, "output_quantizer", None)


def assert_weights_are_those_of_training(graph: ResolvedGraph) -> None:
    for node in graph.nodes:
        op, weights = node.op, node.weights
        if op is None or weights is None or not op.is_weighted or op.is_table:
            continue
        if weights.recurrent is not None:
            for part in (weights, weights.recurrent):
                kernel = get_weight(node.layer.layer, part.name)
                trained = node.layer.weight_quantizers[part.name](kernel, QUANTIZED)
                far = np.abs(part.q * part.scale - trained) / part.scale
                assert far.max() < 1e-4, f"{part.name} of {node.name}: {far.max()} steps off"
        else:
            with compute_in_float32(node.layer):
                _assert_sums_are_those_of_training(node, weights)


def _assert_sums_are_those_of_training(node: Node, weights: Weights) -> None:
    """Compares sums of products with random values, which are equal if all weights are."""
    wrapper, source = node.layer, node.inputs[0]
    assert isinstance(source, Tensor) and source.params and node.output.params
    numbers = np.random.default_rng(0)
    shape = [2, *(6 if size is None else size for size in source.shape[1:])]
    x = tf.constant(numbers.normal(size=shape), tf.float32)
    compute = fold_modes.FOLDS[wrapper.fold]
    bias = np.asarray(compute(wrapper, tf.zeros_like(x), QUANTIZED), np.float64)
    trained = np.asarray(compute(wrapper, x, QUANTIZED), np.float64) - bias

    scale = np.asarray(weights.scale, np.float64)
    wide = source.params.bits == 16
    unit = float(source.params.scale) * scale
    multiplier = unit / float(node.output.params.scale)
    kernel = weights.q * scale
    slack = weights.rounding * scale
    is_wider = (scale < 1.001 * LEAST_SCALE) | (wide & (multiplier < 1.001 * LEAST_MULTIPLIER))
    if weights.bias is not None and not wide and weights.name:
        large = np.abs(weights.bias) > BIAS_MAX / 2
        is_wider |= large.reshape(scale.shape) if scale.size > 1 else large.any()
    slack += np.where(is_wider, 0.5 * find_divisor(weights.bits) * scale, 0.0)
    slack[multiplier > 0.999 * LARGEST_MULTIPLIER[16 if wide else 8]] = np.inf
    ours = linear(wrapper.layer, weights.name, kernel, x)
    size = linear(wrapper.layer, weights.name, np.abs(kernel), tf.abs(x))
    slack = linear(wrapper.layer, weights.name, slack + np.zeros_like(kernel), tf.abs(x))
    share = 2.0**-15 if wide else 2e-6
    far = np.abs(ours - trained) - slack - share * size - 1e-6 * np.abs(bias)
    assert not far.max() > 0, f"{node.name}: sums of products differ by {far.max()}"

    held = np.zeros(1) if weights.bias is None else np.asarray(weights.bias, np.float64)
    unit = unit.reshape(held.shape) if unit.size > 1 and weights.bias is not None else unit.max()
    far = np.abs(held * unit - bias) - 0.5 * unit * (weights.bias is not None) - 1e-6 * np.abs(bias)
    assert not far.max() > 0, f"{node.name}: a bias differs by {far.max()}"


def linear(layer: Any, name: str, kernel: np.ndarray, x: Any) -> np.ndarray:
    """Computes a layer with another kernel and without its bias."""
    if not name:
        return np.asarray(x * kernel, np.float64)
    without = {"use_bias": False, "bias": None}
    changed = {key: value for key, value in without.items() if hasattr(layer, key)}
    with swap_attributes(layer, **{name: tf.constant(kernel, tf.float32)}, **changed):
        return np.asarray(layer.call(x), np.float64)
