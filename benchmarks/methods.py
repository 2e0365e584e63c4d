"""More of what `benchmarks.accuracy` measures: schedules, learned rounding, pruned networks.

    PYTHONPATH=tutorials python -m benchmarks.methods --directory build/methods --parts schedules

Options are those of `benchmarks.accuracy`. Parts: `schedules`, learning rates of fine-tuning with 8
bits, with BatchNormalization as in training or frozen; `rounding`, learned layer by layer and block
by block; `pruned`, a network with three zeros in four weights, and what becomes of them.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np

import keras_qat
from benchmarks import accuracy
from benchmarks.accuracy import Case, Rows, calibrated, of_float, of_qat, unlabelled
from keras_qat import recipes
from keras_qat.keras2.backend import keras
from keras_qat.training.schedule import schedule

RATES = (1e-3, 1e-4, 1e-5)
PRUNED = 0.75
"""Share of the weights of each kernel that are zero."""


def of_schedules() -> Rows:
    """Fine-tuning with 8 bits: learning rates, and BatchNormalization frozen or not."""

    def train(rate: float, frozen: bool, case: Case) -> float:
        qat = calibrated(case.model, unlabelled(case), "minmax", recipes.int8())
        if frozen:
            schedule(qat, freeze_from=0)
        return of_qat(case.fit(qat, rate / case.budget.rate), case.data)

    rows: Rows = {
        "calibrated": lambda case: of_qat(
            calibrated(case.model, unlabelled(case), "minmax", recipes.int8()), case.data
        )
    }
    for rate in RATES:
        rows[f"Adam {rate:g}"] = partial(train, rate, False)
        rows[f"Adam {rate:g}, BatchNormalization frozen"] = partial(train, rate, True)
    return rows


def of_rounding() -> Rows:
    """Rounding learned layer by layer and block by block."""

    def nearest(recipe: Any, case: Case) -> float:
        qat = calibrated(case.model, unlabelled(case), "mse", recipe, weights="mse")
        return of_qat(qat, case.data)

    def learn(recipe: Any, part: Any, case: Case) -> float:
        images, iterations = unlabelled(case), case.budget.iterations
        qat = calibrated(case.model, images, "mse", recipe)
        keras_qat.learn_rounding(qat, images, iterations=iterations, reconstruct=part)
        return of_qat(qat, case.data)

    rows: Rows = {}
    for weights, activations in ((4, 8), (3, 8), (4, 4), (2, 4)):
        recipe = (recipes.int8 if activations == 8 else recipes.low_bits)(weights, activations)
        bits = f"{weights}/{activations}"
        rows[f"{bits} to the nearest"] = partial(nearest, recipe)
        for part in ("layer", "block"):
            rows[f"{bits} {part} by {part}"] = partial(learn, recipe, part)
    return rows


def of_pruned() -> Rows:
    """A pruned network, trained in float as it was before, and then with zeros kept or not."""

    def pruned(case: Case) -> Any:
        model = keras.models.clone_model(case.model)
        path = case.trained_on.with_name(f"pruned-{case.trained_on.name}")
        if path.exists():
            model.load_weights(path)
            return model
        model.set_weights(case.model.get_weights())
        for kernel in _kernels(model):
            size = np.abs(kernel.numpy())
            kernel.assign(np.where(size > np.quantile(size, PRUNED), kernel.numpy(), 0))
        qat = keras_qat.quantize_model(model, recipes.int8().preserve("zeros"))
        keras_qat.set_quantization(qat, enabled=False)
        long = dataclasses.replace(case.budget, more=case.budget.epochs)
        qat = dataclasses.replace(case, budget=long).fit(qat, 3e-3 / case.budget.rate)
        model = keras_qat.strip_quantization(qat)
        model.save_weights(path)
        return model

    def train(recipe: Any, case: Case) -> float:
        model = pruned(case)
        qat = case.fit(calibrated(model, unlabelled(case), "mse", recipe))
        before, after = _zeros(model), _zeros(qat)
        print(f"{100 * np.sum(before & after) / np.sum(before):.1f} % of the zeros are kept")
        return of_qat(qat, case.data)

    rows: Rows = {"pruned, float": lambda case: of_float(pruned(case), case.data)}
    for name, recipe in (("8/8", recipes.int8()), ("4/4", recipes.low_bits(4, 4))):
        rows[f"pruned, {name}"] = partial(train, recipe)
        rows[f"pruned, {name}, zeros kept"] = partial(train, recipe.preserve("zeros"))
    return rows


def _zeros(model: Any) -> np.ndarray:
    return np.concatenate([kernel.numpy().ravel() == 0 for kernel in _kernels(model)])


def _kernels(model: Any) -> list[Any]:
    return [weight for weight in model.trainable_weights if "kernel" in weight.name]


PARTS = {
    "schedules": of_schedules,
    "rounding": of_rounding,
    "pruned": of_pruned,
}

if __name__ == "__main__":
    accuracy.PARTS |= PARTS
    accuracy.main()
