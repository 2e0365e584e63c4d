"""What LayerNormalization costs in float and in integers, in a vision transformer.

    python -m benchmarks.norms                 12 blocks of 192 channels, 197 tokens
    python -m benchmarks.norms --width 64 --tokens 65

The float model, the quantization-aware one with its norms in float, and with norms in integers, in
one process, one call of each in turn: medians of CPU time, and their ratio to the float model's.
Files run on one thread with XNNPACK.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import keras_qat
from benchmarks import markdown
from keras_qat.keras2.backend import keras
from keras_qat.tflite.interpreter import FileInterpreter

layers: Any = keras.layers
FORMS = ("float", "norms in float", "norms in integers")
VERBS = ("first predict", "predict", "training step", "file")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=192, help="channels")
    parser.add_argument("--tokens", type=int, default=197)
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(8, options.tokens, options.width)).astype(np.float32)
    models = dict(zip(FORMS, forms(options, x), strict=True))
    files = {
        form: float_file(model) if form == "float" else keras_qat.export_tflite(model)
        for form, model in models.items()
    }
    predict: dict[str, Callable[[], Any]] = {
        form: partial(model.predict, x, verbose=0) for form, model in models.items()
    }
    first = {form: seconds(call) for form, call in predict.items()}
    y = np.zeros(len(x))
    for model in models.values():
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.train_on_batch(x, y)
    runs: dict[str, dict[str, Callable[[], Any]]] = {
        "predict": predict,
        "training step": {f: partial(m.train_on_batch, x, y) for f, m in models.items()},
        "file": {f: invocation(contents, x[:1]) for f, contents in files.items()},
    }
    times = {verb: in_turns(calls, options.turns) for verb, calls in runs.items()}
    times["first predict"] = first
    widths = (18, *[22] * len(VERBS), 8)
    print(markdown.head(("form", *VERBS, "size"), widths))
    for form in FORMS:
        cells = [
            f"{1000 * times[verb][form]:.1f} ms ({times[verb][form] / times[verb]['float']:.2f}x)"
            for verb in VERBS
        ]
        print(markdown.row((form, *cells, f"{len(files[form]) / 1000:.0f} kB"), widths))


def vision_transformer(blocks: int, width: int, tokens: int) -> Any:
    """Makes blocks of attention and of two Dense layers, each behind a LayerNormalization."""
    inputs = keras.Input((tokens, width))
    x = inputs
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(3, width // 3)(y, y)])
        y = layers.Dense(2 * width, activation="relu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(width)(y)])
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(10)(x))


def forms(options: argparse.Namespace, x: np.ndarray) -> list[Any]:
    """Makes the float model and the calibrated ones."""
    keras.utils.set_random_seed(0)
    model = vision_transformer(options.blocks, options.width, options.tokens)
    recipe = keras_qat.recipes.int8()
    in_integers = recipe.override("LayerNormalization", quantize=True)
    quantized = [keras_qat.quantize_model(model, one) for one in (recipe, in_integers)]
    for one in quantized:
        keras_qat.calibrate(one, x)
    return [model, *quantized]


def float_file(model: Any) -> bytes:
    """Converts the float model, for one example at a time."""
    import tensorflow as tf

    inputs = tf.TensorSpec((1, *model.input_shape[1:]))
    call = tf.function(lambda x: model(x, training=False)).get_concrete_function(inputs)
    return tf.lite.TFLiteConverter.from_concrete_functions([call], model).convert()


def invocation(contents: bytes, x: np.ndarray) -> Callable[[], Any]:
    """Makes a function that runs a file, once its input is set."""
    interpreter = FileInterpreter(contents).interpreter
    (source,) = interpreter.get_input_details()
    interpreter.set_tensor(source["index"], x.astype(source["dtype"]))
    return interpreter.invoke


def seconds(call: Callable[[], Any]) -> float:
    """CPU time of this process."""
    start = time.process_time()
    call()
    return time.process_time() - start


def in_turns(calls: dict[str, Callable[[], Any]], turns: int) -> dict[str, float]:
    """Median of the CPU time of each call, of which one is made in every turn."""
    times: dict[str, list[float]] = {form: [] for form in calls}
    for turn in range(turns + 1):
        for form, call in calls.items():
            passed = seconds(call)
            if turn:
                times[form].append(passed)
    return {form: statistics.median(several) for form, several in times.items()}


if __name__ == "__main__":
    main()
