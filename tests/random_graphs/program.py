"""Prints a random model that fails as a program without the tests."""

import base64
import io
from typing import Any

import numpy as np

from keras_qat.recipes import Recipe

PROGRAM = """\
import base64, io
import numpy as np
import keras_qat
from keras_qat import keras, recipes

model = keras.models.model_from_json({json!r})
weights = np.load(io.BytesIO(base64.b64decode({weights!r})))
model.set_weights([weights[name] for name in weights])

numbers = np.random.default_rng({count})
inputs = [{inputs}]
inputs = inputs if len(inputs) > 1 else inputs[0]

qat = keras_qat.quantize_model(model, recipes.Recipe.from_config({recipe!r}), target={target!r})
keras_qat.calibrate(qat, inputs)
contents = keras_qat.export_tflite(qat{options})
report = keras_qat.verify(qat, contents, inputs, per_layer=True)
print(report)
"""


def as_program(
    model: Any, inputs: list[np.ndarray], recipe: Recipe, scale: float, target: str | None = None
) -> str:
    """Returns the source of a program that quantizes a model, exports it and verifies the file.

    Args:
        model: a float model.
        inputs: the result of `random_inputs` for it.
        recipe: the recipe.
        scale: scale of the inputs.
        target: a target's name.
    """
    archive = io.BytesIO()
    np.savez_compressed(archive, *model.get_weights())
    drawn = []
    for place, x in enumerate(inputs):
        if x.dtype.kind == "f":
            size = scale * 10.0 ** ((place + 1) % 3 - 1)
            drawn.append(f"np.float32({size!r} * numbers.normal(size={x.shape}))")
        else:
            drawn.append(f"numbers.integers(0, 3, {x.shape}).astype({x.dtype.name!r})")
    largest = max((float(np.abs(x).max()) for x in inputs if x.dtype.kind == "f"), default=1.0)
    return PROGRAM.format(
        json=model.to_json(),
        weights=base64.b64encode(archive.getvalue()).decode(),
        count=len(inputs[0]),
        inputs=", ".join(drawn),
        recipe=recipe.to_config(),
        target=target,
        options=f", input_range={(-largest, largest)}" * (recipe.fold == "correction"),
    )
