"""Scores for `tune`: how much worse a quantized model is than its float model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_qat.analysis.verify.labels import are_probabilities
from keras_qat.analysis.verify.results import compute_sqnr
from keras_qat.keras2.backend import keras
from keras_qat.keras2.losses import find_losses

Arrays = list[np.ndarray]
Metric = Callable[..., float]
"""A function `metric(labels, predictions)` that returns larger values for better predictions."""

BLOCKS = 20
"""The validation data is split into this many blocks, to see how much the metric varies."""

STUDENT = 2.09
"""Factor for a 95 % confidence interval from 20 blocks (Student's t, 19 degrees of freedom)."""

LARGER_IS_BETTER = (
    *("acc", "auc", "precision", "recall", "f1", "fbeta", "iou", "dice", "cosine", "r2", "kappa"),
    *("sensitivity", "specificity", "psnr", "ssim"),
)
"""Metrics with one of these words in their name are better if larger. Other metrics are errors."""


class Score(NamedTuple):
    """The score of a quantized model on the validation data.

    Args:
        value: the metric.
        drop: how much worse the metric is than the float model's, in points (see `Judge`).
        margin: uncertainty of the drop: the 95 % confidence interval is `drop` ± `margin`.
        noise: signal-to-quantization-noise ratio of the outputs in dB.
    """

    value: float
    drop: float
    margin: float
    noise: float


class Judge:
    """Scores quantized models on the validation data.

    Predictions are compared with labels or, without labels, with the float model's predictions. The
    drop of a metric is in points. For a metric such as accuracy, between 0 and 1, a point is 0.01.
    For other metrics, such as a loss, a point is 1 % of the float model's value.

    Args:
        model: the float model. It must be compiled if there are labels but no `metric`.
        x: validation inputs, an array for each input.
        y: an array of labels for each output. None without labels.
        metric: a function `metric(labels, predictions)`. None means the first compiled metric.

    Raises:
        ValueError: if the metric cannot be computed.
    """

    def __init__(
        self, model: keras.Model, x: Arrays, y: Arrays | None, metric: Metric | None = None
    ) -> None:
        self._x = x
        self._exact = self.predict(model)
        self.has_probabilities = all(map(are_probabilities, self._exact))
        self._labels = self._exact if y is None else y
        self._metric = self._make_metric(model, y, metric)
        self.name, self.float_value = self._metric(self._labels, self._exact)
        grows = any(word in self.name.lower() for word in LARGER_IS_BETTER)
        self._is_error = metric is None and y is not None and not grows
        self._is_share = not self._is_error and 0 <= self.float_value <= 1
        self._float_blocks = self._measure_blocks(self._exact)

    def predict(self, model: keras.Model) -> Arrays:
        return tf.nest.flatten(model.predict(unwrap(self._x), verbose=0))

    def score(self, model: keras.Model) -> Score:
        """Score a quantized model. `predict` rounds like the TFLite file, so no file is needed."""
        outputs = self.predict(model)
        value = self._metric(self._labels, outputs)[1]
        blocks = zip(self._float_blocks, self._measure_blocks(outputs), strict=True)
        drops = [self._find_drop(exact, block) for exact, block in blocks]
        deviation = float(np.std(drops, ddof=1)) if drops else float("inf")
        ratios = [compute_sqnr(*pair) for pair in zip(self._exact, outputs, strict=True)]
        noise = float(np.mean([ratio for ratio in ratios if ratio is not None] or [0.0]))
        drop = self._find_drop(self.float_value, value)
        return Score(value, drop, STUDENT * deviation / BLOCKS**0.5, noise)

    def describe(self, value: float) -> str:
        """Format a value of the metric. For example, an accuracy of 0.912 becomes "91.20 %"."""
        return f"{100 * value:.2f} %" if self._is_share else f"{value:.4g}"

    def _find_drop(self, exact: float, value: float) -> float:
        loss = 100 * (value - exact if self._is_error else exact - value)
        return loss if self._is_share else loss / max(abs(self.float_value), 1e-12)

    def _measure_blocks(self, outputs: Arrays) -> list[float]:
        """Return the metric for each of `BLOCKS` blocks of examples. Return [] for few examples."""
        count = len(self._x[0])
        blocks = np.array_split(np.arange(count), BLOCKS) if count >= 2 * BLOCKS else []
        return [
            self._metric([y[block] for y in self._labels], [z[block] for z in outputs])[1]
            for block in blocks
        ]

    def _make_metric(
        self, model: keras.Model, y: Arrays | None, metric: Metric | None
    ) -> Callable[[Arrays, Arrays], tuple[str, float]]:
        """Return a function that computes the metric's name and value from labels and outputs."""
        if y is None:
            if metric is not None:
                raise ValueError("metric= needs labels: pass validation=(x, y).")
            losses = find_losses(model, model.output_names)
            classes = [
                (loss is not None and loss.kind == "classes") or are_probabilities(outputs)
                for loss, outputs in zip(losses, self._exact, strict=True)
            ]
            return lambda exact, outputs: measure_agreement(exact, outputs, classes)
        if metric is not None:
            name = getattr(metric, "__name__", "metric")
            return lambda labels, outputs: (name, float(metric(unwrap(labels), unwrap(outputs))))
        if not getattr(model, "_is_compiled", False):
            raise ValueError(
                f"'{model.name}' is not compiled, so there is no metric to tune for. Compile it "
                f"with metrics=[...], or pass a function of labels and predictions as metric."
            )
        return _make_compiled_metric(model, self._exact)


def measure_agreement(exact: Arrays, outputs: Arrays, classes: list[bool]) -> tuple[str, float]:
    """Compare a quantized model's outputs with the float model's. Return `(name, agreement)`.

    The agreement is 1 for equal outputs. For an output with classes, it is the share of examples
    with the same argmax. For other outputs, it is 1 - mean squared error / variance.
    """
    shares = []
    for x, z, is_classes in zip(exact, outputs, classes, strict=True):
        if is_classes:
            shares.append(np.mean(x.argmax(-1) == z.argmax(-1)))
        else:
            error = np.mean(np.square(np.subtract(x, z, dtype=np.float64)))
            shares.append(1 - error / max(float(np.var(x, 0, dtype=np.float64).mean()), 1e-30))
    return "agreement with the float model", float(np.mean(shares))


def _make_compiled_metric(
    model: keras.Model, outputs: Arrays
) -> Callable[[Arrays, Arrays], tuple[str, float]]:
    """Return a function that computes the first compiled metric, or the loss if there is none.

    The function passes the outputs to `evaluate` of a model that returns its inputs unchanged.
    """
    inputs = [keras.Input(y.shape[1:], dtype=y.dtype.name) for y in outputs]
    identities = [keras.layers.Activation("linear", name=name) for name in model.output_names]
    ends = [identity(x) for identity, x in zip(identities, inputs, strict=True)]
    evaluator = keras.Model(inputs, unwrap(ends))
    evaluator.compile_from_config(model.get_compile_config())

    def compute(labels: Arrays, outputs: Arrays) -> tuple[str, float]:
        values = evaluator.evaluate(
            unwrap(outputs), unwrap(labels), batch_size=1024, verbose=0, return_dict=True
        )
        metrics = [name for name in values if not name.endswith("loss")]
        name = (metrics or ["loss"])[0]
        return name, float(values[name])

    return compute


def unwrap(arrays: list[Any]) -> Any:
    """Return `arrays[0]` for a single input or output, otherwise `arrays`, as Keras expects."""
    return arrays if len(arrays) > 1 else arrays[0]
