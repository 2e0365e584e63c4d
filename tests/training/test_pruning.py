"""Pruning and clustering of float models, and what quantization keeps of it."""

import gzip

import numpy as np
import pytest

import keras_qat
from keras_qat import callbacks, recipes
from keras_qat.training.compression import list_weights
from tests.helpers import export_exact, images, keras, rng, scramble
from tests.networks.small import functional, layers, residual_net

X = images(64, (8, 8, 1))
Y = rng().integers(0, 3, len(X))


def fitted(model, *given, epochs=2):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss)
    model.fit(X, Y, batch_size=8, epochs=epochs, verbose=0, callbacks=[*given])
    return model


def kernels(model):
    return [w.numpy() for w in model.trainable_weights if "kernel" in w.name]


def test_schedules():
    constant = callbacks.Constant(0.5, begin=3)
    assert [constant(step) for step in (0, 2, 3, 100)] == [0, 0, 0.5, 0.5]
    rising = callbacks.Polynomial(0.8, 2, 12, initial=0.1)
    assert [rising(step) for step in (0, 1, 2, 12, 50)] == [0, 0, pytest.approx(0.1), 0.8, 0.8]
    assert rising(7) == pytest.approx(0.8 - 0.7 * 0.5**3)
    assert callbacks.Polynomial(0.8, 0, 10, power=1)(5) == pytest.approx(0.4)


def test_the_smallest_weights_are_pruned():
    model = scramble(residual_net())
    before = kernels(model)
    fitted(model, callbacks.Prune(callbacks.Polynomial(0.75, 0, 12), every=4))
    for kernel, start in zip(kernels(model), before, strict=True):
        assert np.mean(kernel == 0) == pytest.approx(0.75, abs=1 / kernel.size)
        assert np.any(kernel != start)
    assert all(
        np.mean(np.abs(start)[kernel == 0]) < np.mean(np.abs(start)[kernel != 0])
        for kernel, start in zip(kernels(model), before, strict=True)
    )


def test_blocks():
    model = scramble(
        functional(
            (8, 8, 1),
            build=lambda x: layers.Dense(3)(
                layers.GlobalMaxPooling2D()(layers.Conv2D(6, 3)(layers.Conv2D(8, 3)(x)))
            ),
        )
    )
    fitted(model, callbacks.Prune(pattern="2:4"))
    first, second, dense = kernels(model)
    blocks = np.moveaxis(second, 2, -1).reshape(-1, 4)
    assert np.all(np.count_nonzero(blocks, axis=-1) == 2)
    assert np.all(first != 0)  # One input channel.
    assert np.all(dense != 0)  # Six of them.


@pytest.mark.slow
def test_channels():
    """Those of the last layer are the model's outputs, which stay unless it is named."""
    model = fitted(scramble(residual_net()), callbacks.Prune(0.5, pattern="channels"))
    last = model.get_layer("logits").kernel
    assert np.all(last.numpy() != 0)
    for weight, axes in list_weights(model):
        if weight is last:
            continue
        others = tuple(axis for axis in range(-len(weight.shape), 0) if axis not in axes)
        shares = np.mean(weight.numpy() == 0, axis=others)
        assert set(shares.ravel()) == {0.0, 1.0}
        assert np.mean(shares) == pytest.approx(0.5, abs=0.5 / shares.size)
    fitted(model, callbacks.Prune(0.5, pattern="channels", layers=["logits"]))
    assert np.any(last.numpy() == 0)


def test_clusters_are_few_and_trained():
    model = scramble(residual_net())
    before = kernels(model)
    fitted(model, callbacks.Cluster(4, begin=2))
    for kernel, start in zip(kernels(model), before, strict=True):
        assert 2 <= len(np.unique(kernel)) <= 4
        assert not np.isin(kernel, start).any()


@pytest.mark.slow
def test_pruned_then_clustered_then_quantized():
    """Files get smaller under gzip at each step, and keep zeros and clusters."""
    size = {}

    def file_of(label, model, recipe):
        qat = fitted(keras_qat.quantize_model(model, recipe))
        contents = export_exact(qat, X)
        size[label] = len(gzip.compress(contents))
        return [n.weights.q for n in keras_qat.resolve(qat).nodes if n.weights is not None]

    model = scramble(
        functional(
            (8, 8, 1),
            build=lambda x: layers.Dense(3)(
                layers.GlobalMaxPooling2D()(layers.Conv2D(32, 3)(layers.Conv2D(32, 3)(x)))
            ),
        )
    )
    file_of("plain", model, recipes.int8())
    fitted(model, callbacks.Prune(0.75))
    for codes in file_of("pruned", model, recipes.int8().preserve("zeros")):
        assert np.mean(codes == 0) >= 0.74
    fitted(model, callbacks.Cluster(8))
    for codes in file_of("clustered", model, recipes.int8().preserve("clusters")):
        assert np.mean(codes == 0) >= 0.74
        assert all(len(np.unique(channel)) <= 8 for channel in codes.reshape(-1, codes.shape[-1]).T)
    assert size["clustered"] < size["pruned"] < size["plain"]


def test_messages():
    with pytest.raises(ValueError, match="pattern='4:2': use 'weights'"):
        callbacks.Prune(pattern="4:2")
    with pytest.raises(ValueError, match="at least 0 and below 1"):
        callbacks.Prune(1.0)
    with pytest.raises(ValueError, match="greater than begin=5"):
        callbacks.Polynomial(0.5, 5, 5)
    with pytest.raises(ValueError, match="every=0"):
        callbacks.Prune(every=0)
    with pytest.raises(ValueError, match="clusters=1"):
        callbacks.Cluster(1)
    qat = keras_qat.quantize_model(residual_net())
    with pytest.raises(ValueError, match="is quantized already"):
        fitted(qat, callbacks.Prune())
    with pytest.raises(ValueError, match="has no layer 'nothing'"):
        fitted(residual_net(), callbacks.Cluster(layers=["nothing"]))
