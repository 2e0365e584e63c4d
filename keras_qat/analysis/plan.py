"""`plan`: shows how each tensor would be quantized, and which operators a target lacks."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable
from typing import Any

from keras_qat.config.recipe import Recipe
from keras_qat.config.targets import Target
from keras_qat.config.targets.target import settings
from keras_qat.export.float_subgraphs import explain_refusal
from keras_qat.export.target_problems import (
    count_channel_bytes,
    find_file_problems,
    write_planned_file,
)
from keras_qat.graph.facts import describe_arguments
from keras_qat.graph.operations import is_operation, name_in_tensorflow
from keras_qat.graph.precision import use_float32
from keras_qat.imports.keras3 import as_keras_2
from keras_qat.imports.read_float import read_float
from keras_qat.integer_graph.resolve import resolve
from keras_qat.keras2.backend import keras
from keras_qat.lowering.passes import showing_passes
from keras_qat.ops.registry import is_listed
from keras_qat.placement import place
from keras_qat.placement.plan import Plan
from keras_qat.placement.settings import NOT_IN_FILE, Scope
from keras_qat.rewriting.rewrite import explain_missing_config, rewrite
from keras_qat.training.fake_quantization.observers import LastValue
from keras_qat.training.schedule import check_quantized, is_quantized, list_quantizers


def plan(
    model: keras.Model,
    recipe: str | Recipe | None = None,
    *,
    scope: Scope | None = None,
    target: str | Target | None = None,
    inputs: Any = None,
    outputs: Iterable[str] | None = None,
    show_passes: bool = False,
) -> Plan:
    """Shows how `quantize_model` would quantize each tensor and why, before any training.

    With a `target`, the plan also lists operators that would not run there, with advice.

    Args:
        model: a float model, as for `quantize_model`. It is not changed.
        recipe: a recipe or its name. The default is the target's recipe, or "int8" without a
            target.
        scope: the layers to quantize: a name, a prefix of names, a pattern with `*`, a class name,
            or a list of these. The prefix "a" selects names such as `a_1`, `a/b`, `a.b` and `a-b`.
            Also a function `scope(layer)` that returns True for the layers to quantize.
        target: the device or runtime: a name such as "tflm", or a `keras_qat.targets.Target`.
        inputs: `keras.Input(shape)`, or a list or dict of these. Only needed for a subclassed model
            that was not called yet.
        outputs: names of the tensors that exported files return, by default the model's outputs.
        show_passes: for debugging: whether to print how the model's graph is rewritten. The
            environment variable `KERAS_QAT_SHOW_PASSES=1` does the same for all functions.

    Returns:
        The plan. Print it, or read its `rows`, `float_layers` and `problems`.

    Raises:
        ValueError: if the model cannot be read or quantized, or if recipe or target are unknown.
            Each entry of the scope must match a layer.

    Example:
        >>> print(keras_qat.plan(model, target="ethos_u55"))
    """
    if is_quantized(model):
        raise ValueError(
            f"'{model.name}' is already quantized. Plan the float model, or print "
            f"keras_qat.summary(model)."
        )
    recipe, family, device = settings(recipe, None, target)
    model, graph = read_float(as_keras_2(model), inputs, recipe.activations.bits < 16)
    with showing_passes(show_passes):
        planned = place(graph, recipe, scope, family, outputs, device)
    if device is None:
        return _add_obstacles(planned)
    with use_float32():
        qat = rewrite(planned, model)
        check_quantized(qat)
        for quantizer in list_quantizers(qat):
            for observer in quantizer.observers:
                if isinstance(observer, LastValue):  # Kernels do not support every scale.
                    observer.set(0.0, 1.0, batches=1.0)
        contents = write_planned_file(resolve(qat), device)
    return dataclasses.replace(
        planned,
        target=device,
        problems=find_file_problems(contents, device),
        channel_bytes=count_channel_bytes(contents, device),
    )


def _add_obstacles(planned: Plan) -> Plan:
    reasons, refusals = dict(planned.float_layers), dict[Hashable, str]()
    for call in planned.graph.calls:
        if reasons.get(call.name, NOT_IN_FILE) == NOT_IN_FILE:
            continue
        if problem := explain_missing_config(call.layer):
            reasons[call.name] += f"; quantize_model cannot copy it either, as {problem}"
        elif is_operation(call.layer) or (call.layer.built and not is_listed(call.layer)):
            arguments = describe_arguments(call, lambda value: (value.shape, value.dtype))
            key = name_in_tensorflow(call.layer) or id(call.layer), arguments
            if key not in refusals:
                refusals[key] = explain_refusal(call)
            if refusals[key]:
                reasons[call.name] += f"; no file can hold it: {refusals[key]}"
    return dataclasses.replace(planned, float_layers=reasons)
