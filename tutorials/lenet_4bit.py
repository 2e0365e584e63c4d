"""LeNet in 8 and in 4 bits, with the recipe of `tf.contrib.quantize`.

    python tutorials/lenet_4bit.py            # Fashion-MNIST: some minutes
    python tutorials/lenet_4bit.py --quick    # handwritten digits, 8x8 pixels: seconds
    python tutorials/lenet_4bit.py --quick --all    # seven recipes instead of two

A small network is trained in float. From there on it is trained three times for the same number
of epochs: in float, with 8-bit and with 4-bit weights and activations. It ends with one table of
what the models and their TFLite files reach on the test images.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Mapping

import numpy as np
from demo_data import Data, digits, fashion_mnist

import keras_qat
from keras_qat.keras2.backend import keras
from keras_qat.recipes import Recipe, contrib
from keras_qat.tflite.interpreter import FileInterpreter

BATCH = 64
RECIPES = {"8 bits": contrib(), "4 bits": contrib(4, 4)}
ALL_RECIPES = {
    "contrib()": contrib(),
    "contrib(symmetric=True)": contrib(symmetric=True),
    "contrib(weight_bits=7)": contrib(weight_bits=7),
    "contrib(7, 7)": contrib(7, 7),
    "contrib(4, 4)": contrib(4, 4),
    "contrib(3, 3)": contrib(3, 3),
    "contrib(weight_bits=2)": contrib(weight_bits=2),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """What one model reached: shares of the test images, from 0 to 1.

    Args:
        name: "float" or the name of the recipe.
        accuracy: of the Keras model.
        tflite_accuracy: of its TFLite file, None without one.
        agreement: images that model and file put in the same class.
        identical: output codes that are the same in model and file.
        size: of the file, in bytes.
    """

    name: str
    accuracy: float
    tflite_accuracy: float | None = None
    agreement: float | None = None
    identical: float | None = None
    size: int | None = None


def build(shape: tuple[int, int, int], classes: int = 10) -> keras.Model:
    """LeNet: two convolutions with pooling, two dense layers."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input(shape, name="image"),
            layers.Conv2D(16, 5, padding="same", activation="relu", name="conv1"),
            layers.MaxPooling2D(name="pool1"),
            layers.Conv2D(32, 5, padding="same", activation="relu", name="conv2"),
            layers.MaxPooling2D(name="pool2"),
            layers.Flatten(name="flatten"),
            layers.Dense(128, activation="relu", name="dense"),
            layers.Dense(classes, name="logits"),
        ],
        name="lenet",
    )


def load(quick: bool) -> Data:
    """Images as cameras give them: 256 levels from 0 to 1, so that 8-bit inputs are exact."""
    if quick:
        data = digits()
    else:
        try:
            data = fashion_mnist()
        except SystemExit as reason:
            print(f"{reason}\nThe digits of scikit-learn take its place: easier, and 8x8 pixels.")
            data = digits()
    return dataclasses.replace(
        data,
        x_train=(np.round(data.x_train * 255) / 255).astype(np.float32),
        x_test=(np.round(data.x_test * 255) / 255).astype(np.float32),
    )


def train(model: keras.Model, data: Data, epochs: int, learning_rate: float) -> None:
    """Trains with a learning rate that falls to zero along a cosine."""
    steps = epochs * -(-len(data.x_train) // BATCH)
    model.compile(
        keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(learning_rate, steps)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(data.x_train, data.y_train, BATCH, epochs, verbose=2)


def accuracy(scores: np.ndarray, data: Data) -> float:
    """Share of test images whose highest score is that of their class."""
    return float(np.mean(scores.argmax(-1) == data.y_test))


def measure(name: str, model: keras.Model, data: Data) -> Row:
    """The accuracy of a quantization-aware model, and of the TFLite file it becomes."""
    # Pixels are codes already: with this range the file's input takes them as they are.
    contents = keras_qat.export_tflite(model, input_range=(0.0, 1.0))
    report = keras_qat.verify(model, contents, data.x_test)
    file = FileInterpreter(contents)
    (codes,) = file.run({"image": data.x_test}).values()
    return Row(
        name,
        accuracy(model.predict(data.x_test, verbose=0), data),
        accuracy(codes, data),
        report.outputs[0].argmax_agreement,
        report.identical,
        file.size,
    )


def run(
    data: Data, epochs: int, fine_tuning: int, recipes: Mapping[str, Recipe] = RECIPES
) -> list[Row]:
    """Trains and measures the float model and one for each recipe."""
    keras.utils.set_random_seed(0)
    model = build(data.x_train.shape[1:])
    print(f"Training in float on {len(data.x_train)} images", flush=True)
    train(model, data, epochs, learning_rate=2e-3)

    rows = []
    for name, recipe in recipes.items():
        print(f"Fine-tuning, {name}", flush=True)
        quantized = keras_qat.quantize_model(model, recipe)
        train(quantized, data, fine_tuning, learning_rate=5e-4)
        rows.append(measure(name, quantized, data))

    print("Fine-tuning in float", flush=True)
    train(model, data, fine_tuning, learning_rate=5e-4)
    return [Row("float", accuracy(model.predict(data.x_test, verbose=0), data)), *rows]


def table(rows: list[Row]) -> str:
    """The result, one line for each model."""
    columns = ("Keras", "TFLite", "same class", "same codes", "file")
    lines = [f"{'accuracy on the test set':<26}" + "".join(f"{column:>12}" for column in columns)]
    for row in rows:
        shares = [row.accuracy, row.tflite_accuracy, row.agreement, row.identical]
        cells = ["-" if share is None else f"{share:.2%}" for share in shares]
        cells.append("-" if row.size is None else f"{row.size / 1000:.1f} kB")
        lines.append(f"{row.name:<26}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Runs the tutorial from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="digits instead of Fashion-MNIST")
    parser.add_argument("--all", action="store_true", help="seven recipes instead of two")
    parser.add_argument("--epochs", type=int, help="epochs in float")
    parser.add_argument("--fine-tuning", type=int, help="epochs of fine-tuning")
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    epochs, fine_tuning = (8, 4) if options.quick else (5, 3)
    rows = run(
        load(options.quick),
        options.epochs or epochs,
        options.fine_tuning or fine_tuning,
        ALL_RECIPES if options.all else RECIPES,
    )
    print(f"\n{table(rows)}\n\n{time.perf_counter() - start:.0f} s in all.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
