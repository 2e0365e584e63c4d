"""Pruned, clustered and quantized: accuracy and size of the compressed file, beside tfmot's.

    TF_USE_LEGACY_KERAS=1 python -m benchmarks.compression [--sparsity 0.95 --clusters 8]

A small convolutional network on scikit-learn's handwritten digits, those of 30 writers to train
on and of 13 others to test. All begin with the same float network. Sizes are those of the TFLite
file compressed with gzip. tfmot's own pipeline runs where it is installed.
"""

from __future__ import annotations

import argparse
import gzip
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter
from sklearn.datasets import load_digits

import keras_qat
from benchmarks.markdown import head, row
from benchmarks.models import has_tfmot
from keras_qat.keras2.backend import keras

layers, callbacks, recipes = keras.layers, keras_qat.callbacks, keras_qat.recipes
TRAINED = 1200
BATCH = 32
TITLES = ("network", "accuracy", "gzip kB", "zeros")
WIDTHS = (40, 14, 9, 7)


def build() -> Any:
    """Makes a network of 30 000 weights."""
    image = keras.Input((8, 8, 1), name="image")
    x = layers.Conv2D(32, 3, padding="same", activation="relu", name="stem")(image)
    x = layers.Conv2D(64, 3, padding="same", activation="relu", name="middle")(x)
    x = layers.MaxPooling2D(name="pool")(x)
    x = layers.Flatten(name="flatten")(x)
    return keras.Model(image, layers.Dense(10, name="logits")(x), name="digits")


class Data:
    """Digits from 0 to 1, and the steps of an epoch."""

    def __init__(self) -> None:
        digits = load_digits()
        images = (digits.images[..., None] / 16).astype(np.float32)
        self.x, self.y = images[:TRAINED], digits.target[:TRAINED]
        self.x_test, self.y_test = images[TRAINED:], digits.target[TRAINED:]
        self.steps = -(-len(self.x) // BATCH)


def train(model: Any, data: Data, epochs: int, rate: float, *given: Any) -> Any:
    """Trains a model in place."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss)
    model.fit(data.x, data.y, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=[*given])
    return model


def copy(model: Any) -> Any:
    """Copies a model with its weights."""
    made = keras.models.clone_model(model)
    made.set_weights(model.get_weights())
    return made


def measured(contents: bytes, data: Data) -> tuple[float, float, float]:
    """Returns the accuracy of a file, the kilobytes of it under gzip, and its share of zeros."""
    interpreter = Interpreter(model_content=contents)
    (source,) = interpreter.get_input_details()
    interpreter.resize_tensor_input(source["index"], data.x_test.shape)
    interpreter.allocate_tensors()
    scale, zero_point = source["quantization"]
    x = data.x_test
    if source["dtype"] == np.int8:
        x = np.clip(np.floor(x / scale + 0.5) + zero_point, -128, 127).astype(np.int8)
    interpreter.set_tensor(source["index"], x)
    interpreter.invoke()
    (output,) = interpreter.get_output_details()
    right = interpreter.get_tensor(output["index"]).argmax(-1) == data.y_test
    kernels = [
        interpreter.get_tensor(detail["index"])
        for detail in interpreter.get_tensor_details()
        if detail["dtype"] == np.int8 and len(detail["quantization_parameters"]["scales"]) > 1
    ]
    zeros = [np.count_nonzero(kernel == 0) for kernel in kernels]
    share = sum(zeros) / max(1, sum(kernel.size for kernel in kernels))
    return float(np.mean(right)), len(gzip.compress(contents, 9)) / 1000, share


def ours(model: Any, data: Data, sparsity: float, clusters: int) -> dict[str, Callable[[], bytes]]:
    """Rows of this library."""
    steps = data.steps

    def quantized(float_model: Any, preserve: Any = None) -> bytes:
        recipe = recipes.int8() if preserve is None else recipes.int8().preserve(preserve)
        qat = keras_qat.quantize_model(float_model, recipe)
        keras_qat.calibrate(qat, data.x[:256])
        return keras_qat.export_tflite(train(qat, data, 5, 1e-4))

    def pruned(pattern: str = "weights") -> Any:
        share = 0.5 if pattern == "channels" else sparsity
        schedule = callbacks.Polynomial(share, 0, 6 * steps)
        prune = callbacks.Prune(schedule, every=steps // 2, pattern=pattern)
        return train(copy(model), data, 10, 1e-3, prune)

    def clustered(start: Any) -> Any:
        # A cluster changes by the mean of its weights' changes, which is far less than one of them.
        return train(copy(start), data, 5, 3e-3, callbacks.Cluster(clusters))

    return {
        "int8": lambda: quantized(copy(model)),
        f"{sparsity:.0%} pruned": lambda: quantized(pruned(), "zeros"),
        "2:4 pruned": lambda: quantized(pruned("2:4"), "zeros"),
        "half of the channels pruned": lambda: quantized(pruned("channels"), "zeros"),
        f"{clusters} clusters": lambda: quantized(clustered(model), "clusters"),
        f"{sparsity:.0%} pruned, {clusters} clusters": lambda: quantized(
            clustered(pruned()), "clusters"
        ),
    }


def of_tfmot(
    model: Any, data: Data, sparsity: float, clusters: int
) -> dict[str, Callable[[], bytes]]:
    """The same by tfmot, which prunes no channels; its converted files hold the same integers."""
    import tensorflow_model_optimization as tfmot
    from tensorflow_model_optimization.python.core.quantization.keras.collab_opts.cluster_preserve import (  # noqa: E501
        default_8bit_cluster_preserve_quantize_scheme as keeps_clusters,
    )
    from tensorflow_model_optimization.python.core.quantization.keras.collab_opts.prune_preserve import (  # noqa: E501
        default_8bit_prune_preserve_quantize_scheme as keeps_zeros,
    )

    pruning, clustering = tfmot.sparsity.keras, tfmot.clustering.keras
    keep_zeros = keeps_zeros.Default8BitPrunePreserveQuantizeScheme
    keep_clusters = keeps_clusters.Default8BitClusterPreserveQuantizeScheme

    def converted(qat: Any) -> bytes:
        converter = tf.lite.TFLiteConverter.from_keras_model(qat)
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
        return bytes(converter.convert())

    def quantized(float_model: Any, scheme: Any = None) -> bytes:
        annotated = tfmot.quantization.keras.quantize_annotate_model(float_model)
        given = [] if scheme is None else [scheme]
        qat = tfmot.quantization.keras.quantize_apply(annotated, *given)
        return converted(train(qat, data, 5, 1e-4))

    def pruned(share: float = sparsity, **options: Any) -> Any:
        schedule = pruning.PolynomialDecay(0.0, share, 0, 6 * data.steps, 3, data.steps // 2)
        wrapped = pruning.prune_low_magnitude(copy(model), schedule, **options)
        train(wrapped, data, 10, 1e-3, pruning.UpdatePruningStep())
        return pruning.strip_pruning(wrapped)

    def pruned_two_of_four() -> Any:
        return pruned(0.5, sparsity_m_by_n=(2, 4))

    def clustered(start: Any, **options: Any) -> Any:
        from tensorflow_model_optimization.python.core.clustering.keras.experimental import cluster

        initial = clustering.CentroidInitialization.KMEANS_PLUS_PLUS
        wrapped = cluster.cluster_weights(copy(start), clusters, initial, **options)
        return clustering.strip_clustering(train(wrapped, data, 5, 3e-4))

    return {
        "tfmot: int8": lambda: quantized(copy(model)),
        f"tfmot: {sparsity:.0%} pruned": lambda: quantized(pruned(), keep_zeros()),
        "tfmot: 2:4 pruned": lambda: quantized(pruned_two_of_four(), keep_zeros()),
        f"tfmot: {clusters} clusters": lambda: quantized(clustered(model), keep_clusters(False)),
        f"tfmot: {sparsity:.0%} pruned, {clusters} clusters": lambda: quantized(
            clustered(pruned(), preserve_sparsity=True), keep_clusters(True)
        ),
    }


def main() -> None:
    """Prints a table of means over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sparsity", type=float, default=0.8)
    parser.add_argument("--clusters", type=int, default=16)
    options = parser.parse_args()
    data, results = Data(), dict[str, list[tuple[float, float, float]]]()
    for seed in range(options.seeds):
        keras.utils.set_random_seed(seed)
        model = train(build(), data, 20, 2e-3)
        as_float = tf.lite.TFLiteConverter.from_keras_model(model).convert()
        results.setdefault("float", []).append(measured(as_float, data))
        rows = ours(model, data, options.sparsity, options.clusters)
        if has_tfmot():
            rows |= of_tfmot(model, data, options.sparsity, options.clusters)
        for label, make in rows.items():
            keras.utils.set_random_seed(seed)
            results.setdefault(label, []).append(measured(make(), data))
            print(seed, label, results[label][-1], flush=True)
    print(head(TITLES, WIDTHS))
    for label, measures in results.items():
        accuracies, sizes, zeros = (np.array(column) for column in zip(*measures, strict=True))
        accuracy = f"{100 * accuracies.mean():.2f} ± {100 * accuracies.std():.2f}"
        print(row([label, accuracy, f"{sizes.mean():.1f}", f"{zeros.mean():.0%}"], WIDTHS))


if __name__ == "__main__":
    main()
