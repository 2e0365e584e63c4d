"""The demo's network with each recipe: accuracy, agreement, size and latency of the file.

    PYTHONPATH=tutorials python -m benchmarks.recipes

All begin with the same float network, trained on scikit-learn's digits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from demo import BATCH, EPOCHS, build, latencies, train
from demo_data import DATA

import keras_qat
from keras_qat.keras2.backend import keras
from keras_qat.tflite.interpreter import FileInterpreter

RECIPES: dict[str, tuple[str, float, dict[str, Any]]] = {
    "int8": ("int8", 3e-5, {}),
    "int16x8": ("int16x8", 3e-5, {}),
    "int4_weights": ("int4_weights", 1e-3, {}),
    "int4_weights, packed": ("int4_weights", 1e-3, {"pack_int4": True}),
}
"""Label -> recipe, learning rate of the fine-tuning, arguments of the export."""


def main() -> None:
    """Trains, exports and prints a table."""
    data, (epochs, qat_epochs) = DATA["digits"](), EPOCHS["digits"]
    keras.utils.set_random_seed(0)
    model = build(data.x_train.shape[1:])
    train(model, data, epochs, learning_rate=3e-3)
    classes = model.predict(data.x_test, verbose=0).argmax(-1)
    rows, files = [], []
    steps = len(data.x_train) // BATCH
    for label, (recipe, rate, arguments) in RECIPES.items():
        keras.utils.set_random_seed(0)
        qat = keras_qat.quantize_model(model, recipe)
        delays = (
            keras_qat.callbacks.QuantDelay(steps),
            keras_qat.callbacks.FreezeBatchNorm(steps * qat_epochs // 2),
        )
        train(qat, data, qat_epochs, rate, delays)
        contents = keras_qat.export_tflite(qat, **arguments)
        report = keras_qat.verify(qat, contents, data.x_test)
        file = FileInterpreter(contents)
        (codes,) = file.run({"image": data.x_test}).values()
        files.append(file)
        accuracy = np.mean(codes.argmax(-1) == data.y_test)
        (output,) = report.outputs
        rows.append(
            f"{label:<22}{accuracy:>10.2%}{output.argmax_agreement:>12.2%}"
            f"{output.identical:>12.2%}{output.max_difference:>8.0f}{file.size / 1000:>9.1f}"
        )
    print(f"\nfloat accuracy {np.mean(classes == data.y_test):.2%}")
    print(
        f"{'':<22}{'accuracy':>10}{'same class':>12}{'same codes':>12}{'LSB':>8}{'kB':>9}{'ms':>9}"
    )
    for row, latency in zip(rows, latencies(files, data.x_test[:1]), strict=True):
        print(f"{row}{latency:>9.3f}")


if __name__ == "__main__":
    main()
