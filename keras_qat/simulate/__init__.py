"""The bit-exact simulation: what the exported file computes, in integers, without the file."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from keras_qat.export.inference import check_exportable
from keras_qat.keras2 import graph as graph_lib
from keras_qat.keras2.graph import values_in
from keras_qat.kinds import kind_of
from keras_qat.quantize import quantizers
from keras_qat.simulate.codes import Codes, Grid
from keras_qat.simulate.walk import Walk

__all__ = ["Codes", "Grid", "Simulation", "simulate"]

Kernels = Literal["xnnpack", "reference"]


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What a simulated file gives.

    Args:
        kernels: the family of kernels.
        outputs: each output of the model by name: `Codes`, or an array if it is not quantized.
        tensors: likewise each quantized tensor inside, by its name in the float model.
        float_layers: layers that the file computes in float. What follows from them may differ in
            single codes.
    """

    kernels: str
    outputs: dict[str, Any]
    tensors: dict[str, Any]
    float_layers: tuple[str, ...]


def simulate(
    model: Any,
    x: Any,
    kernels: Kernels = "xnnpack",
    *,
    input_range: tuple[float, float] | None = None,
    batch_size: int = 32,
) -> Simulation:
    """Computes in integers what the exported file gives, code for code.

    Args:
        model: a trained quantization-aware model.
        x: inputs, as `model.predict` takes them; real numbers, or the codes of its type.
        kernels: whose rounding: "xnnpack", what phones run, or "reference", TFLite's portable
            kernels, which microcontrollers run.
        input_range: as in `export_tflite`.
        batch_size: how many examples are computed at a time.

    Returns:
        The codes of the outputs and of every quantized tensor inside.

    Raises:
        ValueError: if the model is not quantized, a quantizer has no usable range, there is a
            GELU with int16 activations, or on another family of kernels.

    Example:
        >>> golden = keras_qat.simulate(qat, x_test, kernels="reference")
        >>> golden.outputs["logits"].codes, golden.outputs["logits"].scale
    """
    if kernels not in ("xnnpack", "reference"):
        raise ValueError(f"kernels={kernels!r}: use 'xnnpack' or 'reference'.")
    check_exportable(model)
    graph = graph_lib.read(model)
    if any(each.spec.bits > 8 for each in quantizers(model)):
        refused = [call.name for call in graph.calls if kind_of(call) == "gelu"]
        if refused:
            raise ValueError(
                f"{', '.join(refused)}: GELU with int16 activations is not simulated. Compare the "
                f"file with keras_qat.verify instead."
            )
    walk = Walk(graph, kernels)
    values = values_in(graph.inputs)
    arrays = [np.asarray(each) for each in model._flatten_to_reference_inputs(x)]
    parts = []
    for start in range(0, len(arrays[0]), batch_size):
        inputs = [
            walk.start(value, array[start : start + batch_size], input_range)
            for value, array in zip(values, arrays, strict=True)
        ]
        outputs = tf.nest.flatten(graph_lib.evaluate(graph, inputs, walk.apply))
        parts.append((dict(zip(model.output_names, outputs, strict=True)), walk.named_tensors()))
    found, tensors = (
        {name: _joined([each[name] for each in batches]) for name in batches[0]}
        for batches in zip(*parts, strict=True)
    )
    return Simulation(kernels, found, tensors, tuple(walk.float_layers))


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], Codes):
        return Codes(np.concatenate([each.codes for each in parts]), parts[0].grid)
    return np.concatenate([np.asarray(each) for each in parts])
