"""Tests that zeros stay zeros and clusters stay clusters, in training and in the file."""

import numpy as np
import pytest

import keras_qat
from keras_qat import recipes
from tests.helpers import images, keras, rng, scramble, train
from tests.networks.small import residual_net

pytestmark = pytest.mark.legacy
X = images(32, (8, 8, 1))


def kernels(model):
    return [weight for weight in model.trainable_weights if "kernel" in weight.name]


def pruned(share=0.75):
    model = scramble(residual_net())
    for kernel in kernels(model):
        value = kernel.numpy()
        kernel.assign(np.where(np.abs(value) < np.quantile(np.abs(value), share), 0, value))
    return model


def clustered(count=5):
    model = scramble(residual_net())
    for kernel in kernels(model):
        value = kernel.numpy()
        centers = np.quantile(value, np.linspace(0, 1, count)).astype(np.float32)
        kernel.assign(centers[np.abs(value[..., None] - centers).argmin(-1)])
    return model


def trained(model, what, optimizer):
    recipe = recipes.int8(4) if what is None else recipes.int8(4).preserve(what)
    qat = train(keras_qat.quantize_model(model, recipe), X, steps=2)
    qat.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    qat.fit(X, rng().integers(0, 3, len(X)), batch_size=8, epochs=2, verbose=0)
    return qat


def test_zeros_stay_zeros():
    model = pruned()
    before = [kernel.numpy() for kernel in kernels(model)]
    qat = trained(model, "zeros", keras.optimizers.Adam(1e-3))
    for one, other in zip(kernels(qat), before, strict=True):
        np.testing.assert_array_equal(one.numpy() == 0, other == 0)
        assert np.any(one.numpy() != other)
    for node in keras_qat.resolve(qat).nodes:
        if node.weights is not None and node.weights.q.size > 10:
            assert np.mean(node.weights.q == 0) >= 0.7
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), X).identical == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_clusters_stay_clusters(name):
    model = clustered()
    before = [kernel.numpy() for kernel in kernels(model)]
    qat = trained(model, "clusters", name)
    for one, other in zip(kernels(qat), before, strict=True):
        value = one.numpy()
        assert len(np.unique(value)) == len(np.unique(other)) <= 5
        assert np.any(value != other)
        for center in np.unique(other):
            assert len(np.unique(value[other == center])) == 1
    assert recipes.Recipe.from_config(qat.recipe.to_config()) == qat.recipe


@pytest.mark.slow
def test_models_that_tfmot_pruned_and_clustered():
    sparsity = pytest.importorskip("tensorflow_model_optimization").sparsity.keras
    clustering = pytest.importorskip("tensorflow_model_optimization").clustering.keras
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def fit(model, *callbacks):
        model.compile("adam", loss)
        model.fit(X, rng().integers(0, 3, len(X)), 8, 2, verbose=0, callbacks=[*callbacks])
        return model

    schedule = sparsity.ConstantSparsity(0.5, 0, frequency=1)
    wrapped = sparsity.prune_low_magnitude(scramble(residual_net()), schedule)
    model = sparsity.strip_pruning(fit(wrapped, sparsity.UpdatePruningStep()))
    qat = fit(keras_qat.quantize_model(model, recipes.int8().preserve("zeros")))
    shares = {kernel.name: np.mean(kernel.numpy() == 0) for kernel in kernels(qat)}
    assert [share for name, share in shares.items() if "depthwise" not in name] == [0.5] * 3
    initial = clustering.CentroidInitialization.KMEANS_PLUS_PLUS
    wrapped = clustering.cluster_weights(scramble(residual_net()), 4, initial)
    model = clustering.strip_clustering(fit(wrapped))
    qat = fit(keras_qat.quantize_model(model, recipes.int8().preserve("clusters")))
    counts = {kernel.name: len(np.unique(kernel.numpy())) for kernel in kernels(qat)}
    assert all(count <= 4 for name, count in counts.items() if "depthwise" not in name), counts


def test_bad_input():
    with pytest.raises(ValueError, match="preserve='signs': use 'zeros' or 'clusters'"):
        recipes.int8().preserve("signs")
    with pytest.raises(ValueError, match="'contrib' has one range for all weights"):
        recipes.contrib().preserve("zeros")
