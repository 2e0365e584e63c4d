"""Computes how much worse a quantized model is than its float model, with a confidence interval."""

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
"""A function (labels, predictions) -> metric. Better predictions have larger metrics."""

BLOCKS = 20
"""Number of blocks of examples for estimating the confidence interval."""

STUDENT = 2.09
"""97.5th percentile of Student's t distribution with 19 degrees of freedom."""

LARGER_IS_BETTER = (
    *("acc", "auc", "precision", "recall", "f1", "fbeta", "iou", "dice", "cosine", "r2", "kappa"),
    *("sensitivity", "specificity", "psnr", "ssim"),
)
"""If a metric's name contains one of these words, larger is better. Other metrics are errors."""


class Score(NamedTuple):
    """The score of a quantized model on the validation data.

    Args:
        value: the metric.
        drop: how much worse the metric is than the float model's, in points (see `Judge`).
        margin: half of the 95 % confidence interval of the drop, in points.
        noise: SQNR of the outputs in dB, relative to the float model's outputs.
    """

    value: float
    drop: float
    margin: float
    noise: float


class Judge:
    """Compares predictions with labels or, without labels, with the float model's predictions.

    A drop is in points. For a metric between 0 and 1 that is larger for better models, a point is
    0.01. For other metrics, it is 1 % of the float model's value. The confidence interval is
    computed from the differences of both models' metrics, because both read the same examples.

    Args:
        model: the float model, compiled if there are labels and no `metric`.
        x: validation inputs, an array for each input.
        y: labels, an array for each output; None without labels.
        metric: a function of labels and predictions; None for the model's first metric.

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
        """Return the outputs of a model for the validation data."""
        return tf.nest.flatten(model.predict(unwrap(self._x), verbose=0))

    def score(self, model: keras.Model) -> Score:
        """Return the score of a quantized model. Its `predict` returns the outputs of its file."""
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
        """Return a value of the metric as text."""
        return f"{100 * value:.2f} %" if self._is_share else f"{value:.4g}"

    def _find_drop(self, exact: float, value: float) -> float:
        loss = 100 * (value - exact if self._is_error else exact - value)
        return loss if self._is_share else loss / max(abs(self.float_value), 1e-12)

    def _measure_blocks(self, outputs: Arrays) -> list[float]:
        """Return the metric for each block of examples; [] if there are too few examples."""
        count = len(self._x[0])
        blocks = np.array_split(np.arange(count), BLOCKS) if count >= 2 * BLOCKS else []
        return [
            self._metric([y[block] for y in self._labels], [z[block] for z in outputs])[1]
            for block in blocks
        ]

    def _make_metric(
        self, model: keras.Model, y: Arrays | None, metric: Metric | None
    ) -> Callable[[Arrays, Arrays], tuple[str, float]]:
        """Return a function of labels and outputs that returns the metric's name and value."""
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
                f"with metrics=[...], or pass metric=, a function of labels and predictions."
            )
        return _make_compiled_metric(model, self._exact)


def measure_agreement(exact: Arrays, outputs: Arrays, classes: list[bool]) -> tuple[str, float]:
    """Return how well a quantized model's outputs agree with the float model's, 0 to 1.

    For classes, the result is the share of equal classes. For values, it is the explained variance:
    1 - mean squared error / variance.
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
    """Return a function that computes the model's first metric, or its loss if it has none.

    The function passes the outputs to an identity model that is compiled like `model`.
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
    """Return the only item of a list, or a longer list unchanged, because Keras expects that."""
    return arrays if len(arrays) > 1 else arrays[0]
