"""Compares quantization-aware models with their files and with the integer simulation."""

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

import keras_qat
from keras_qat.tflite.interpreter import FileInterpreter
from tests.helpers import export_exact, keras, observe

KERNELS = ("xnnpack", "reference")

RUNNABLE = (*KERNELS, "tflm")
"""Kernel families whose files run on x86."""


@dataclasses.dataclass(frozen=True)
class Exported:
    """A quantization-aware model, inputs, its file, and the report of their comparison."""

    model: Any
    x: Any
    contents: bytes
    file: FileInterpreter
    report: Any

    @property
    def operations(self) -> list[str]:
        """The operators of the file, in order."""
        return [name for name, _, _ in self.file.operations()]


def export(
    model: Any,
    *inputs: np.ndarray,
    recipe: Any = "int8",
    strict: bool = False,
    per_layer: bool = False,
) -> Exported:
    """Quantizes a model, lets it observe the inputs, exports and verifies it."""
    qat = observe(keras_qat.quantize_model(model, recipe, strict=strict), *inputs)
    contents = keras_qat.export_tflite(qat)
    x = list(inputs) if len(inputs) > 1 else inputs[0]
    report = keras_qat.verify(qat, contents, x, per_layer=per_layer)
    return Exported(qat, x, contents, FileInterpreter(contents), report)


@keras.utils.register_keras_serializable("tests")
class Product(keras.layers.Layer):
    """A custom layer, which files compute as FULLY_CONNECTED."""

    def build(self, input_shape):
        self.kernel = self.add_weight("kernel", (input_shape[-1], 7))
        super().build(input_shape)

    def call(self, inputs):
        return tf.matmul(inputs, self.kernel)

    def compute_output_shape(self, input_shape):
        return (*input_shape[:-1], 7)


def assert_kept(qat: Any, x: Any, path: Any) -> None:
    """Asserts that the file equals the model, and that the loaded model writes the same file.

    Args:
        qat: the calibrated model.
        x: its inputs.
        path: a folder to save the model in.
    """
    contents = export_exact(qat, x)
    qat.save(path / "qat.keras")
    assert keras_qat.export_tflite(keras.models.load_model(path / "qat.keras")) == contents


def assert_in_integers(model: Any, x: Any, path: Any) -> None:
    """Asserts that a model computes the same before it is quantized, then calls `assert_kept`.

    Args:
        model: a float model without layers that stay in float.
        x: its inputs.
        path: a folder to save the quantized model in.
    """
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.set_quantization(qat, False)
    np.testing.assert_allclose(qat(x), model(x), rtol=1e-4, atol=1e-5)
    keras_qat.set_quantization(qat, True)
    keras_qat.calibrate(qat, x)
    assert_kept(qat, x, path)


def assert_identical(
    qat: Any, x: Any, kernels: Any, contents: bytes | None = None, **options: Any
) -> keras_qat.Simulation:
    """Asserts that the simulation and the file have the same quantized values and scales."""
    file = FileInterpreter(contents or keras_qat.export_tflite(qat, **options), kernels)
    simulated = keras_qat.simulate(qat, x, kernels, **options)
    arrays = qat._flatten_to_reference_inputs(x)
    outputs = file.run(dict(zip(qat.input_names, arrays, strict=True)))
    assert set(outputs) == set(simulated.outputs)
    for name, codes in outputs.items():
        output = simulated.outputs[name]
        if isinstance(output, np.ndarray):  # Integers are not quantized.
            np.testing.assert_array_equal(output, codes)
            continue
        end = file.outputs[name]
        assert (output.scale, output.zero_point) == (np.float32(end.scale), end.zero_point), name
        differing = np.count_nonzero(output.codes != codes)
        assert differing == 0, f"{name}: {differing} of {codes.size} codes differ"
    return simulated
