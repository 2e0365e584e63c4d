"""The steps of a user with a model, from quantizing to running the file, with assertions."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.analysis.verify.pairs import match_tensors
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.keras2.backend import keras
from keras_qat.ops.node import Constant, Tensor
from keras_qat.ops.op import SharedRange
from keras_qat.recipes import Recipe
from keras_qat.targets import TFLM, Target, problems
from keras_qat.tflite.interpreter import Kernels, Refusal
from keras_qat.tflite.micro_interpreter import open_file
from keras_qat.tflite.reader import FileGraph
from tests.comparison import KERNELS
from tests.random_graphs.beside_training import assert_alike_in_training, quantizer_of

REASONS = ("NaN or infinity", "TFLite's converter refuses")

SOME = 16
"""Number of examples to compare."""


class Refused(Exception):
    """Raised for models that nothing can handle: NaN after training, layers that Keras refuses."""


def live(model: Any, inputs: list[np.ndarray], recipe: Recipe, folder: Path) -> None:
    """Plans, quantizes, trains, saves, loads, calibrates, exports, verifies and simulates.

    Raises:
        AssertionError: if model, file and simulation differ in integer layers of the plan.
        Refused: if there is nothing to compare.
    """
    qat = quantized(model, recipe, None)
    if recipe.activations.observer.startswith("learned"):
        keras_qat.calibrate(qat, inputs if len(inputs) > 1 else inputs[0], method="mse")
    train_a_step(qat, inputs)
    try:
        qat.save(folder / "qat.keras")
    except TypeError as error:  # Keras does not save `x[..., 0]`, in float models either.
        raise Refused(str(error)) from error
    loaded = keras.models.load_model(folder / "qat.keras")
    given = inputs if len(inputs) > 1 else inputs[0]
    options = {}
    if recipe.fold == "correction":
        sizes = [float(np.abs(array).max()) for array in inputs if array.dtype.kind == "f"]
        options["input_range"] = (-max(sizes, default=1.0), max(sizes, default=1.0))
    try:
        before, after = (keras_qat.simulate(variant, given).outputs for variant in (qat, loaded))
        keras_qat.calibrate(loaded, given)
        contents = keras_qat.export_tflite(loaded, **options)
    except ValueError as error:
        if any(reason in str(error) for reason in REASONS):
            raise Refused(str(error)) from error
        raise
    for name in before:
        np.testing.assert_array_equal(values_of(before[name]), values_of(after[name]))
    compare(loaded, [array[:SOME] for array in inputs], contents, options)
    assert_examples_are_independent(loaded, inputs, options)
    fixed = keras_qat.export_tflite(loaded, batch_size=1, **options)
    one = {name: array[:1] for name, array in zip(qat.input_names, inputs, strict=True)}
    for kernels in with_kernels(contents, KERNELS):
        free, same = (open_file(variant, kernels).run(one, 1) for variant in (contents, fixed))
        for name in exact_outputs(keras_qat.resolve(loaded, **options)):
            np.testing.assert_array_equal(free[name], same[name])


def assert_examples_are_independent(
    qat: Any, inputs: list[np.ndarray], options: dict[str, Any]
) -> None:
    """Asserts that outputs do not depend on the order and the batches of examples."""

    def outputs(arrays: list[np.ndarray], size: int) -> dict[str, Any]:
        x = arrays if len(arrays) > 1 else arrays[0]
        return keras_qat.simulate(qat, x, batch_size=size, **options).outputs

    some = [array[:SOME] for array in inputs]
    once, again = outputs(some, SOME), outputs([array[::-1] for array in some], 5)
    for name in exact_outputs(keras_qat.resolve(qat, **options)):
        values = values_of(once[name])
        if len(values) == len(some[0]):
            np.testing.assert_array_equal(values_of(again[name])[::-1], values)


def quantized(model: Any, recipe: Recipe, target: Target | None) -> Any:
    """Plans and quantizes. If the model stays in float, `quantize_model` must report that."""
    planned = keras_qat.plan(model, recipe, target=target)
    str(planned)
    if any(row.spec for row in planned.rows):
        return keras_qat.quantize_model(model, recipe, target=target)
    with pytest.warns(UserWarning, match=f"quantizes nothing in '{model.name}'"):
        keras_qat.quantize_model(model, recipe, target=target)
    raise Refused("nothing is quantized")


def live_on(target: Target, model: Any, inputs: list[np.ndarray], recipe: Recipe) -> None:
    """Plans and quantizes for a target, calibrates, exports, verifies and simulates.

    Its file runs with the target's kernels, and in LiteRT's reference kernels. For TFLite Micro,
    all operators of the file must be available.

    Raises:
        AssertionError: if model, file and simulation differ in integer layers of the plan, or if
            `problems` and TFLite Micro disagree whether the file runs.
        Refused: if there is nothing to compare.
    """
    qat = quantized(model, recipe, target)
    given = inputs if len(inputs) > 1 else inputs[0]
    try:
        keras_qat.calibrate(qat, given)
        with warnings.catch_warnings():  # Warnings about missing operators are checked below.
            warnings.filterwarnings("ignore", f"target {target.name}: operators missing")
            contents = keras_qat.export_tflite(qat)
    except ValueError as error:
        if any(reason in str(error) for reason in REASONS):
            raise Refused(str(error)) from error
        raise
    families: tuple[Kernels, ...] = tuple(dict.fromkeys((target.kernels, "reference")))
    if target.kernels == "tflm" and not runs_in_tflite_micro(contents, qat, inputs):
        families = ("reference",)
    if problems(contents, "xnnpack"):  # LiteRT has no 16-bit LSTM.
        families = tuple(family for family in families if family == "tflm")
    if not families:
        return
    qat.kernels = families[0]
    compare(qat, [array[:SOME] for array in inputs], contents, {}, families)


def runs_in_tflite_micro(contents: bytes, qat: Any, inputs: list[np.ndarray]) -> bool:
    """Returns whether TFLite Micro runs a file, which `problems` must predict."""
    lacking = problems(contents, TFLM)
    one = {name: array[:1] for name, array in zip(qat.input_names, inputs, strict=True)}
    refusal = ""
    try:
        open_file(contents, "tflm").run(one)
    except ValueError as error:
        refusal = str(error)
    assert bool(lacking) == bool(refusal), f"{lacking} may lack; TFLite Micro says: {refusal!r}"
    return not refusal


def train_a_step(qat: Any, inputs: list[np.ndarray]) -> None:
    """Runs gradient descent on the squares of the outputs, in a custom loop."""
    x = inputs if len(inputs) > 1 else inputs[0]
    with tf.GradientTape() as tape:
        outputs = [
            tensor for tensor in tf.nest.flatten(qat(x, training=True)) if tensor.dtype.is_floating
        ]
        loss = tf.add_n([tf.reduce_mean(tf.square(output)) for output in outputs] or [tf.zeros([])])
    try:
        gradients = tape.gradient(loss, qat.trainable_variables)
    except LookupError as error:  # TensorFlow has no gradient of AdjustContrast.
        raise Refused(str(error)) from error
    for variable, gradient in zip(qat.trainable_variables, gradients, strict=True):
        if gradient is not None:
            gradient = tf.convert_to_tensor(gradient)
            variable.assign_sub(1e-3 * gradient / (1.0 + tf.norm(gradient)))


def with_kernels(contents: bytes, families: tuple[Kernels, ...]) -> tuple[Kernels, ...]:
    """Returns the families whose kernels LiteRT has. ELU has no reference kernel."""
    try:
        open_file(contents, "reference")
    except Refusal:
        return tuple(family for family in families if family != "reference")
    return families


def values_of(output: Any) -> np.ndarray:
    return output if isinstance(output, np.ndarray) else output.codes


def compare(
    qat: Any,
    inputs: list[np.ndarray],
    contents: bytes,
    options: dict[str, Any],
    families: tuple[Kernels, ...] = KERNELS,
) -> None:
    """Asserts that model, file and simulation agree on every value computed in integers.

    The model rounds like the first kernel family. Models of `recipes.contrib` round like in
    training, as their page states.
    """
    families = with_kernels(contents, families)
    if not families:
        return
    resolved = keras_qat.resolve(qat, **options)
    assert_alike_in_training(resolved, inputs)
    if options:
        inputs = [on_grid(*item) for item in zip(inputs, resolved.inputs.values(), strict=True)]
    given = inputs if len(inputs) > 1 else inputs[0]
    report = keras_qat.verify(qat, contents, given, kernels=families[0], per_layer=True)
    in_integers = exact_outputs(resolved)
    if options:
        trained = as_trained(resolved)
        pairs, _ = match_tensors(resolved, FileGraph(contents))
        for tensor, there in zip(report.tensors, pairs, strict=True):
            if tensor.fed is not None and there.ours in trained:
                assert tensor.fed.max_difference <= 1, (
                    f"a layer that is exact in training: {tensor}"
                )
    else:
        differing = [
            (tensor.name, tensor.fed.identical, tensor.fed.max_difference, tensor.kernels)
            for tensor in report.tensors
            if tensor.fed is not None
            and tensor.fed.identical < 1
            and "DEQUANTIZE" not in tensor.kernels
            and not set(tensor.kernels)
            & set(", ".join(report.float_operations.values()).split(", "))
        ]
        assert not differing, f"layers of the file differ from the model: {differing}"
        for tensor in report.outputs:
            assert tensor.identical == 1 or tensor.name not in in_integers, tensor
    for kernels in families:
        file = open_file(contents, kernels)
        result = file.run(dict(zip(qat.input_names, inputs, strict=True)))
        simulated = keras_qat.simulate(qat, given, kernels, **options)
        for name in in_integers:
            codes = values_of(simulated.outputs[name])
            differing = np.count_nonzero(codes != result[name])
            assert not differing, f"{kernels}: {differing} of {codes.size} values of {name} differ"


def exact_outputs(graph: ResolvedGraph) -> set[str]:
    """Returns the names of outputs that only integer operators compute."""
    return {name for name, output in graph.outputs.items() if is_exact(graph, output)}


def is_exact(graph: ResolvedGraph, tensor: Tensor) -> bool:
    """Returns whether only integer operators compute a tensor from quantized inputs."""
    makers = {output: node for node in graph.nodes for output in node.outputs}
    wanted, seen = [tensor], set()
    while wanted:
        current = wanted.pop()
        if current in seen:
            continue
        seen.add(current)
        node = makers.get(current)
        if node is None:
            if current.params is None and tf.as_dtype(current.dtype).is_floating:
                return False
            continue
        if node.op is None:
            return False
        wanted += [tensor for tensor in node.inputs if not isinstance(tensor, Constant)]
    return True


def on_grid(values: np.ndarray, tensor: Tensor) -> np.ndarray:
    """Returns the float values of quantized inputs, which are next to the given values."""
    params = tensor.params
    return values if params is None else params.dequantize(params.quantize(values))


def as_trained(graph: ResolvedGraph) -> set[Tensor]:
    """Returns the tensors of integer kernels that only read values that training quantizes, too.

    These values are inputs, outputs of quantizers, and moved values, without constants, which are
    float in training. Weights are the same as in training.
    """
    exact, result = set(graph.inputs.values()), set()
    for node in graph.nodes:
        tensors = [tensor for tensor in node.inputs if isinstance(tensor, Tensor)]
        if node.op is None or any(tensor.params is None for tensor in tensors):
            continue
        is_exact = exact.issuperset(tensors) and not (node.weights and node.weights.rounding)
        for output in node.outputs:
            moves = node.op.output == SharedRange() and all(
                isinstance(tensor, Tensor) and tensor.params == output.params
                for tensor in node.inputs
            )
            if is_exact:
                result.add(output)
            if quantizer_of(graph.values.get(output)) is not None or (moves and is_exact):
                exact.add(output)
    return result
