"""docs/layers.md says of every layer of Keras what `plan` does with it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import keras_qat
from keras_qat.backend import keras
from tests.layer_examples import example

PAGE = Path(__file__).parent.parent / "docs" / "layers.md"

NO_LAYERS = {
    *("Layer", "InputLayer", "Wrapper", "AbstractRNNCell", "StackedRNNCells", "DenseFeatures"),
    *("LSTMCell", "GRUCell", "SimpleRNNCell", "experimental"),
    # Broken in Keras 2 itself.
    "SpectralNormalization",
}
"""Base classes, parts of layers and what is no layer."""

BEFORE_THE_MODEL = {
    *("Hashing", "HashedCrossing", "IntegerLookup", "StringLookup", "TextVectorization"),
}
"""What has no operation in TFLite."""


def table() -> dict[str, str]:
    """Layer -> what the page says it becomes."""
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", PAGE.read_text(), flags=re.M)
    return {name: verdict for names, verdict in rows for name in re.findall(r"`(\w+)`", names)}


def verdict(plan: Any) -> str:
    if plan.weights_only:
        return "weights int8"
    return "float" if plan.float_layers else "int8"


def layer_classes() -> set[str]:
    return {
        name
        for name in dir(keras.layers)
        if isinstance(getattr(keras.layers, name), type)
        and issubclass(getattr(keras.layers, name), keras.layers.Layer)
    }


def test_every_layer_is_on_the_page():
    aliases = {name for name in layer_classes() if getattr(keras.layers, name).__name__ != name}
    assert layer_classes() - NO_LAYERS - aliases == set(table())


@pytest.mark.parametrize("name", sorted(table()))
def test_the_page_says_what_the_plan_does(name):
    if name in BEFORE_THE_MODEL:
        assert table()[name] == "no operation"
        return
    assert verdict(keras_qat.plan(example(name))) == table()[name]


@pytest.mark.parametrize("name", sorted(set(table()) - BEFORE_THE_MODEL))
def test_shapes_stay_known(name):
    model = example(name)
    if not any(size is None for size in model.output_shape[1:]):
        assert keras_qat.quantize_model(model).output_shape == model.output_shape
