"""`diagnose`: measures the quantization error of a model and its layers, and tries remedies."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_qat.analysis.verify.causes import is_constant
from keras_qat.analysis.verify.labels import Use
from keras_qat.analysis.verify.results import compute_sqnr
from keras_qat.analysis.verify.verdict import GOOD, grade_figures
from keras_qat.config.recipe import Recipe
from keras_qat.config.recipes import int8, int16x8
from keras_qat.graph.calls import flatten_values
from keras_qat.integer_graph.float_inference import evaluate_all, make_evaluator
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.resolve import resolve_to_export
from keras_qat.integer_graph.simulate import QuantizedArray, Simulation, run_examples
from keras_qat.io.counts import check_counts
from keras_qat.io.data import read_arrays, show_progress
from keras_qat.io.inputs import get_inputs, pack_inputs
from keras_qat.keras2.backend import keras, one_at_a_time
from keras_qat.messages import silent
from keras_qat.ops.node import Tensor
from keras_qat.placement.settings import OUT_OF_SCOPE
from keras_qat.rewriting.quantize import quantize_model
from keras_qat.rewriting.strip import strip_quantization
from keras_qat.training.calibration.calibrate import calibrate
from keras_qat.training.calibration.lost_values import explain_losses
from keras_qat.training.post_training.bias_correction import bias_correction
from keras_qat.training.quantizers import PREFIX
from keras_qat.training.recurrent import list_states
from keras_qat.training.schedule import check_quantized, get_float_reason, get_recipe

FITTED = 256
"""Maximum number of examples for calibrating the models on which remedies are tried."""
CALIBRATE = "calibrate(qat, x)"
SUSPECTS = 3
"""Maximum number of layers that `diagnose` tries with more bits or in float."""
GAIN = 3.0
"""A remedy is reported if it raises the SQNR by at least this many dB."""
BEYOND, USED = 0.01, 0.5
"""The range of an input is too narrow if more than 1 % of the values are outside. It is too wide if
the values use less than half of it."""


@dataclasses.dataclass(frozen=True)
class Quality:
    """How close a quantized model is to the float model.

    Args:
        sqnr: signal-to-quantization-noise ratio in dB, averaged over all outputs. None if the
            outputs do not depend on the example.
        agreement: share of rows with the same argmax in both models. None if each output has only
            one channel.
    """

    sqnr: float | None
    agreement: float | None

    def __str__(self) -> str:
        sqnr = "-" if self.sqnr is None else f"{self.sqnr:.1f}"
        return f"{sqnr:>7}{'-' if self.agreement is None else f'{self.agreement:.1%}':>8}"


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The result of `diagnose`. Prints as a table.

    Args:
        model: the model's name.
        examples: number of examples that were measured.
        now: quality of the unchanged model.
        problems: sentences, for example about an input range that is too narrow for the data.
        layers: maps the names of the layers that lose most SQNR to `(input, output)`: the SQNR of
            the layer's input and of its output, in dB.
        remedies: maps the code of a remedy, such as `"calibrate(qat, x)"`, to the quality of the
            model after it. The best remedy comes first. However, `calibrate(qat, x)` comes
            first if it gains at least half as many dB as the best remedy.
    """

    model: str
    examples: int
    now: Quality
    problems: tuple[str, ...]
    layers: dict[str, tuple[float, float]]
    remedies: dict[str, Quality]

    @property
    def is_good(self) -> bool:
        """True if the outputs are close enough to the float model's and there are no problems."""
        now = self.now
        use: Use = "values" if now.agreement is None else "classes or values"
        grade = grade_figures(use, now.sqnr, now.agreement, self.examples)
        return grade == GOOD and not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as JSON data."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.model}: quantized against float, {self.examples} examples"]
        lines += ["The model is good: its outputs are close to the float model's."] * self.is_good
        lines += [f"! {problem}" for problem in self.problems]
        lines += ["", "     dB  argmax", f"{self.now}  now"]
        lines += [f"{quality}  {code}" for code, quality in self.remedies.items()]
        if not self.remedies:
            lines.append(f"No remedy gains {GAIN:g} dB or more.")
        lines += ["", " before   after"] * bool(self.layers)
        lines += [f"{a:7.1f}{b:8.1f}  {name}" for name, (a, b) in self.layers.items()]
        return "\n".join(lines)


@one_at_a_time
def diagnose(model: keras.Model, x: Any, *, examples: int = 64, verbose: int = 0) -> Diagnosis:
    """Finds problems of a quantized model, and measures which remedies help.

    Each remedy, such as `calibrate` with another method, is applied to a copy of the model. The
    copy is calibrated with half of the examples. The outputs of its TFLite file are simulated for
    the other half, and compared with the float model's outputs.

    Args:
        model: a model from `quantize_model` that was calibrated or trained.
        x: a few hundred inputs without labels, prepared as for training.
        examples: maximum number of examples to measure.
        verbose: 1 shows progress.

    Returns:
        A report that prints as a table. It lists problems of the data, the current quality, and the
        layers where the SQNR drops most. It also lists each remedy that gains at least 3 dB.

    Raises:
        ValueError: if the model is not quantized, is not calibrated or is stateful. Also if there
            are fewer than 8 examples, or if the data does not match the model.

    Example:
        >>> print(keras_qat.diagnose(qat, x_train[:200]))
    """
    check_counts(examples=examples)
    check_quantized(model)
    arrays = read_arrays(model, x)
    if len(arrays[0]) < 8:
        raise ValueError(
            f"diagnose needs at least 8 examples, but got {len(arrays[0])}. Pass a few hundred."
        )
    if list_states(model):
        raise ValueError(
            f"'{model.name}' keeps its states from batch to batch, which diagnose does not "
            f"support. Build the same model with stateful=False and diagnose that."
        )
    inputs = get_inputs(model)
    size = inputs.batch_size or 1
    is_tested = np.arange(len(arrays[0])) // size % 2 == 1

    def select(rows: NDArray[Any], count: int) -> Any:
        count = max(count // size, 1) * size
        return pack_inputs(inputs, [array[rows][:count] for array in arrays])

    fitted, tested = select(~is_tested, FITTED), select(is_tested, examples)
    graph = resolve_to_export(model)
    exact, inside = _compute_in_float(graph, read_arrays(model, tested))
    simulation = run_examples(graph, tested, graph.origin.file_family)
    falls = _find_falls(model, graph, simulation, inside)
    problems = [*_find_unfit_ranges(graph, arrays), *explain_losses(graph.origin.calls, arrays)]
    subjects = {problem.split(",")[0] for problem in problems}
    if is_constant(exact):
        problems.append(
            "The output of the float model is the same for all examples, perhaps because units are "
            "dead or weights are zero. Train the float model first."
        )
    tried = _list_remedies(model, fitted, list(falls))
    by_remedy: dict[str, Quality] = {}
    for code, treat in show_progress(tried.items(), "Remedies", verbose, len(tried), unit="remedy"):
        with silent(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")  # Such as deprecation warnings of other libraries.
            warnings.simplefilter("always", UserWarning)
            with contextlib.suppress(ValueError):  # The recipe may not support this remedy.
                treated = resolve_to_export(treat())
                by_remedy[code] = _measure(
                    run_examples(treated, tested, graph.origin.file_family), exact
                )
        if code == CALIBRATE:  # Calibration also checks the data.
            for text in (str(one.message) for one in caught):
                problems += [text] * (text.split(",")[0] not in subjects)
                subjects.add(text.split(",")[0])
    now = _measure(simulation, exact)
    remedies = _select_remedies(now, by_remedy)
    return Diagnosis(model.name, len(exact[0]), now, tuple(problems), falls, remedies)


def _select_remedies(now: Quality, by_remedy: dict[str, Quality]) -> dict[str, Quality]:
    """Return the remedies that raise the SQNR by `GAIN` or more. The best remedy comes first.

    Other remedies than `calibrate(qat, x)` may make the file larger or slower. If calibration
    helps, the others must exceed its SQNR by `GAIN`.
    """
    gain = {code: (after.sqnr or 0.0) - (now.sqnr or 0.0) for code, after in by_remedy.items()}
    calibration = gain.get(CALIBRATE, 0.0)
    least = calibration + GAIN if calibration >= GAIN else GAIN
    helpful = [code for code in gain if gain[code] >= (GAIN if code == CALIBRATE else least)]
    helpful.sort(key=lambda code: -gain[code])
    if CALIBRATE in helpful and calibration >= gain[helpful[0]] / 2:
        helpful.remove(CALIBRATE)
        helpful.insert(0, CALIBRATE)
    return {code: by_remedy[code] for code in helpful}


def _list_remedies(
    model: keras.Model, x: Any, suspects: list[str]
) -> dict[str, Callable[[], keras.Model]]:
    """Map remedies, such as "calibrate(qat, x)", to functions that return a treated model."""
    recipe: Recipe = get_recipe(model)

    def recalibrate(**options: Any) -> keras.Model:
        treated = quantize_model(model, recipe)  # Layers and weights are copied.
        calibrate(treated, x, **options)
        return treated

    def correct_biases() -> keras.Model:
        treated = recalibrate()
        bias_correction(treated, x)
        return treated

    def requantize(recipe: Recipe) -> keras.Model:
        for layer in model.layers:
            if (get_float_reason(layer) or "").startswith(OUT_OF_SCOPE):
                recipe = recipe.override(layer.name.removeprefix(PREFIX), quantize=False)
        treated = quantize_model(strip_quantization(model), recipe)
        calibrate(treated, x)
        return treated

    remedies: dict[str, Callable[[], keras.Model]] = {
        CALIBRATE: recalibrate,
        **{
            f"calibrate(qat, x, method={method!r})": partial(recalibrate, method=method)
            for method in ("mse", "percentile")
        },
        f"{CALIBRATE}; bias_correction(qat, x)": correct_biases,
    }
    bits = {"weight_bits": recipe.weights.bits, "activation_bits": recipe.activations.bits}
    more: dict[str, Any] = {name: 8 for name, count in bits.items() if count < 8}
    if more:
        remedies["recipes.int8()"] = partial(requantize, int8())
    more = more or {"quantize": False}
    options = ", ".join(f"{name}={value}" for name, value in more.items())
    for layers in [[layer] for layer in suspects] + [suspects] * (len(suspects) > 1):
        overridden, code = recipe, "recipe"
        with contextlib.suppress(ValueError):  # Overrides cannot change layers with 16 bits.
            for layer in layers:
                overridden = overridden.override(layer, **more)
                code += f".override({layer!r}, {options})"
            remedies[code] = partial(requantize, overridden)
    if recipe.activations.bits < 16:
        remedies["recipes.int16x8()"] = partial(requantize, int16x8())
    return remedies


def _compute_in_float(
    graph: ResolvedGraph, arrays: list[NDArray]
) -> tuple[list[NDArray], dict[Tensor, NDArray]]:
    """Compute a model in float. Return the outputs, and the values of all quantized tensors."""
    calls = graph.origin.calls
    inside = {tensor: value for tensor, value in graph.values.items() if tensor.params}
    outputs = flatten_values(calls.outputs)
    evaluate = make_evaluator(calls, [*outputs, *inside.values()])
    size = graph.origin.fixed_batch or len(arrays[0])
    results = evaluate_all(evaluate, calls, arrays, size)
    by_tensor = dict(zip(inside, results[len(outputs) :], strict=True))
    return results[: len(outputs)], by_tensor


def _measure(simulation: Simulation, exact: list[NDArray]) -> Quality:
    ratios, same = [], []
    for in_float, output in zip(exact, simulation.outputs.values(), strict=True):
        values = output.values if isinstance(output, QuantizedArray) else output
        ratios.append(compute_sqnr(in_float, values))
        if in_float.ndim > 1 and in_float.shape[-1] > 1:
            same.append(np.mean(in_float.argmax(-1) == values.argmax(-1)))
    known = [ratio for ratio in ratios if ratio is not None]
    return Quality(float(np.mean(known)) if known else None, float(np.mean(same)) if same else None)


def _find_falls(
    model: keras.Model, graph: ResolvedGraph, simulation: Simulation, exact: dict[Tensor, NDArray]
) -> dict[str, tuple[float, float]]:
    """Find the layers that lose most SQNR. Map each name to the SQNR of its input and output."""
    ratios: dict[object, float | None] = {
        tensor: compute_sqnr(values, computed)
        for tensor, values in exact.items()
        if (computed := simulation.tensors[tensor.label].values).shape == values.shape
    }
    config = getattr(model, "float_config", None) or {"layers": ()}
    names = sorted((layer["config"]["name"] for layer in config["layers"]), key=len, reverse=True)
    falls: dict[str, tuple[float, float]] = {}
    for node in graph.nodes:
        before = [ratio for x in node.inputs if (ratio := ratios.get(x)) is not None]
        after = ratios.get(node.outputs[0])
        if before and after is not None and after < min(before) - 1:
            part = node.call.origin.removeprefix(PREFIX)
            owners = (n for n in names if part == n or part.startswith((f"{n}_", f"{n}/")))
            name = next(owners, part)  # The longest name that matches.
            fall = min(before), after
            falls[name] = max(falls.get(name, fall), fall, key=lambda ends: ends[0] - ends[1])
    ranked = sorted(falls.items(), key=lambda item: item[1][1] - item[1][0])
    return dict(ranked[:SUSPECTS])


def _find_unfit_ranges(graph: ResolvedGraph, arrays: list[NDArray]) -> list[str]:
    """Return a sentence for each input if its range is too narrow or too wide for the data."""
    problems = []
    for (name, tensor), x in zip(graph.inputs.items(), arrays, strict=True):
        params = tensor.params
        if params is None:
            continue
        low, high = params.range
        lowest, highest = min(x.min(), 0.0), max(x.max(), 0.0)  # Each range includes zero.
        if params.zero_point == 0:  # A symmetric range.
            highest = max(-lowest, highest)
            lowest = -highest
        used = (min(highest, high) - max(lowest, low)) / (high - low)
        beyond = np.mean((x < low - params.scale) | (x > high + params.scale))
        if beyond > BEYOND or used < USED:
            problems.append(
                f"Input '{name}' uses {used:.1%} of its range, {low:.4g} to {high:.4g}, and "
                f"{beyond:.1%} of its values are outside."
            )
    return problems
