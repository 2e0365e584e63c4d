"""Tests each model of `keras.applications` in Keras 3: its conversion and its int8 file.

The file is compared with the file of Keras 2's model of the same name and weights. Models have no
classifier and the smallest images that they accept, because they differ in their blocks.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import keras_qat
from keras_qat.keras2.backend import keras as keras_2
from keras_qat.tflite.interpreter import FileInterpreter
from tests.helpers import observe, rng
from tests.imports.keras3.comparison import assert_equal_outputs

keras = pytest.importorskip("keras", minversion="3.0")

NAMES = [name for name, value in vars(keras.applications).items() if inspect.isfunction(value)]
SIZES = {"InceptionV3": 75, "InceptionResNetV2": 75, "Xception": 71}
"""The minimum height and width, if it is not 32."""


LARGE = {
    *("ConvNeXtBase", "ConvNeXtLarge", "ConvNeXtXLarge", "InceptionResNetV2", "NASNetLarge"),
    *("EfficientNetB5", "EfficientNetB6", "EfficientNetB7", "EfficientNetV2M", "EfficientNetV2L"),
    *("ResNet101", "ResNet101V2", "ResNet152", "ResNet152V2"),
}
"""Models that need minutes and gigabytes. They are skipped if `--seeds` requests fewer."""


def options(name: str) -> dict[str, Any]:
    size = SIZES.get(name, 32)
    return {"weights": None, "include_top": False, "pooling": "avg", "input_shape": (size, size, 3)}


def codes(model: Any, x: np.ndarray) -> np.ndarray:
    """Returns the values of a model's int8 file, with ranges from `x` without dropout."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras_2.layers.Dropout):
            layer.rate = 0.0
    qat = observe(keras_qat.quantize_model(model), x, batches=1)
    file = FileInterpreter(keras_qat.export_tflite(qat))
    (output,) = file.run({qat.input_names[0]: x}).values()
    return output


def compare(build: Callable[[Any], Any]) -> None:
    keras.utils.set_random_seed(1)
    model = build(keras.applications)
    converted = keras_qat.from_keras_3(model)
    size = model.input_shape[1]
    x = rng(1).uniform(0, 255, (3, size, size, 3)).astype(np.float32)
    assert_equal_outputs(model, converted, x)
    del model
    twin = build(keras_2.applications)
    twin.set_weights(converted.get_weights())
    expected = codes(twin, x)
    del twin
    assert len(np.unique(expected)) > 20
    np.testing.assert_array_equal(codes(converted, x), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_model_has_the_codes_of_its_twin(name, seeds):
    if name in LARGE and seeds < 200:
        pytest.skip("large: with --seeds 200")
    compare(lambda apps: getattr(apps, name)(**options(name)))


def test_all_models_of_keras_3_are_listed():
    """Keras 3 lacks the RegNet and ResNet-RS models of Keras 2."""
    ours = {name for name, value in vars(keras_2.applications).items() if inspect.isfunction(value)}
    missing = ours - set(NAMES)
    assert not set(NAMES) - ours
    assert len(NAMES) >= 40 and all(name.startswith(("RegNet", "ResNetRS")) for name in missing)
