"""Tests files that end inside the model: outputs= of quantize_model, and advice of plan."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.keras2.backend import keras, layers
from tests.helpers import export_exact, images, quantize_on, save_and_load

X = images(48, (8, 8, 3))
PRIORS = np.random.default_rng(3).uniform(4, 28, (16, 2)).astype(np.float32)
PARTS = ["boxes", "scores"]


def detector(model_class=keras.Model):
    """Returns a detector that concatenates boxes in pixels and scores from 0 to 1."""
    keras.utils.set_random_seed(0)
    image = keras.Input(X.shape[1:], name="image")
    features = layers.Conv2D(8, 3, strides=2, padding="same", activation="relu")(image)
    boxes = layers.Reshape((16, 4), name="boxes")(layers.Conv2D(4, 1, name="offsets")(features))
    scores = layers.Conv2D(3, 1, activation="sigmoid", name="classes")(features)
    scores = layers.Reshape((16, 3), name="scores")(scores)
    centers, sizes = boxes[..., :2] * 8 + PRIORS, tf.exp(boxes[..., 2:]) * 16
    return model_class(image, layers.Concatenate(name="detections")([centers, sizes, scores]))


@pytest.fixture(scope="module")
def qat():
    return quantize_on(detector(), X, outputs=PARTS)


@pytest.mark.slow
def test_verify_says_that_scores_are_drowned(qat):
    """The signal-to-noise ratio of the whole output is determined by the boxes."""
    whole = keras_qat.quantize_model(detector())
    with pytest.warns(UserWarning, match=r"shares one range, .*outputs=\[\.\.\.\]"):
        keras_qat.calibrate(whole, X)
    with pytest.warns(UserWarning, match="shares one range"):
        contents = keras_qat.export_tflite(whole)
    report = keras_qat.verify(whole, contents, X)
    assert report.outputs[0].float_sqnr > 20
    assert not report.verdict.is_good
    assert "4, 5, 6 of the 7 channels of 'detections'" in report.verdict.likely_cause
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), X).verdict.is_good


def test_the_file_ends_at_the_named_tensors(qat):
    contents = keras_qat.export_tflite(qat)
    report = keras_qat.verify(qat, contents, X, per_layer=True)
    assert [output.name for output in report.outputs] == PARTS
    assert report.identical == 1
    assert not report.float_operations
    assert [*keras_qat.resolve(qat).outputs] == PARTS
    steps = {name: tensor.params.scale for name, tensor in keras_qat.resolve(qat).outputs.items()}
    assert steps["scores"] == pytest.approx(1 / 256)
    assert steps["boxes"] < 0.1


def test_the_model_decodes_what_the_file_gives(qat):
    """Later layers compute in float, on the quantized values of the file."""
    contents = keras_qat.export_tflite(qat, output_dtype="float32")
    boxes, scores = keras_qat.TFLiteModel(contents).predict(X)
    centers, sizes = boxes[..., :2] * 8 + PRIORS, np.exp(boxes[..., 2:]) * 16
    decoded = np.concatenate([centers, sizes, scores], -1)
    np.testing.assert_allclose(qat.predict(X, verbose=0), decoded, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.legacy
@pytest.mark.parametrize("format_", [".keras", ".h5"])
def test_outputs_are_saved_with_the_model(qat, format_, tmp_path):
    loaded = save_and_load(qat, tmp_path / f"qat{format_}")
    assert keras_qat.export_tflite(loaded) == keras_qat.export_tflite(qat)
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), qat.predict(X, verbose=0))
    copy = keras_qat.quantize_model(qat)
    assert keras_qat.export_tflite(copy) == keras_qat.export_tflite(qat)


def test_the_kernels_of_the_model_are_those_of_its_file(qat):
    copy = keras_qat.quantize_model(qat)
    copy.kernels = "reference"
    contents = keras_qat.export_tflite(copy)
    assert keras_qat.verify(copy, contents, X, kernels="reference").identical == 1


class Weighted(keras.Model):
    """A custom loss on the concatenated outputs."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(abs(self(x, training=True) - y))
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        return {"distance": loss}


def test_a_train_step_of_its_own_sees_the_whole_model():
    qat = keras_qat.quantize_model(detector(Weighted), outputs=PARTS)
    qat.compile("sgd")
    truth = np.zeros((len(X), 16, 7), np.float32)
    assert list(qat.fit(X, truth, verbose=0).history) == ["distance"]
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), X).identical == 1


def test_strict_does_not_count_what_is_cut_off():
    model = detector()
    keras_qat.quantize_model(model, outputs=PARTS, strict=True)
    planned = keras_qat.plan(model, outputs=PARTS)
    assert set(planned.float_layers.values()) == {"after the outputs of exported files"}
    assert planned.file_outputs == tuple(PARTS)


def test_a_file_may_end_at_a_tensor_that_other_layers_read():
    qat = quantize_on(detector(), X, outputs=["offsets", "boxes"])
    export_exact(qat, X)
    assert [*keras_qat.resolve(qat).outputs] == ["offsets", "boxes"]
    assert "sigmoid" not in {node.op.name for node in keras_qat.resolve(qat).nodes if node.op}


def half_precision_detector():
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        return detector()
    finally:
        keras.mixed_precision.set_global_policy("float32")


@pytest.mark.sample(1)
@pytest.mark.parametrize("build", [detector, half_precision_detector])
def test_files_end_inside_of_layers_at_all_tensors_that_plan_lists(build):
    """A sub-operation of a layer, such as the logits of a sigmoid, has the name in `plan`."""
    model = build()
    names = ["classes_before_activation", "offsets"]
    assert set(names) <= {row.tensor for row in keras_qat.plan(model).rows}
    qat = quantize_on(model, X, outputs=names)
    file = keras_qat.TFLiteModel(keras_qat.export_tflite(qat))
    logits, offsets = file.predict(X)
    classes = qat.predict(X, verbose=0)[..., 4:]
    expected = classes.reshape(logits.shape)
    np.testing.assert_allclose(1 / (1 + np.exp(-logits)), expected, atol=2 / 256)
    exact = keras.Model(model.inputs, model.get_layer("offsets").output).predict(X, verbose=0)
    assert np.abs(offsets - exact).max() < 0.05 * np.abs(exact).max()


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        (["box"], "'box', which is not a float tensor.*Did you mean 'boxes'"),
        (["boxes", "boxes"], "'boxes' twice"),
        (["image"], "an input of the model"),
        ([], "pass the names of the layers"),
    ],
)
def test_outputs_that_there_are_none_of_are_refused(outputs, reason):
    with pytest.raises(ValueError, match=f"(?s){reason}"):
        keras_qat.plan(detector(), outputs=outputs)


def test_contrib_has_no_outputs_of_files():
    with pytest.raises(ValueError, match="does not support outputs="):
        keras_qat.plan(detector(), keras_qat.recipes.contrib(), outputs=PARTS)


def test_plan_names_what_is_joined_in_one_range():
    model = detector()
    planned = keras_qat.plan(model)
    (joined,) = planned.joined_outputs
    assert joined.output == "detections"
    assert joined.parts[-1] == "scores"
    assert "outputs=[" in str(planned).splitlines()[-1]
    cut = keras_qat.quantize_model(model, outputs=joined.parts)
    assert list(cut.file_outputs) == list(joined.parts)
    assert not keras_qat.plan(model, outputs=joined.parts).joined_outputs


def test_like_parts_may_be_joined():
    """Boxes of two image sizes have similar ranges. They are concatenated along their axis."""
    image = keras.Input((8, 8, 3))
    levels = [layers.Conv2D(4, 1, strides=size)(image) for size in (1, 2)]
    boxes = layers.Concatenate(axis=1)([layers.Reshape((-1, 4))(level) for level in levels])
    assert not keras_qat.plan(keras.Model(image, boxes)).joined_outputs


@pytest.mark.parametrize("form", ["list", "dict"])
def test_a_file_takes_the_inputs_that_it_reads(form):
    """Data may be for the model, or for the file."""
    image, label = keras.Input((8,), name="image"), keras.Input((1,), name="label")
    embedding = layers.Dense(4, name="embedding")(image)
    ends = {"list": [label, image], "dict": {"x": image, "y": label}}[form]
    joined = layers.Dense(3)(layers.Concatenate()([embedding, label]))
    qat = keras_qat.quantize_model(keras.Model(ends, joined), outputs=["embedding"])
    x, y = images(16, (8,)), images(16, (1,), 2)
    data = [y, x] if form == "list" else {"x": x, "y": y}
    keras_qat.calibrate(qat, data)
    contents = keras_qat.export_tflite(qat)
    file = keras_qat.TFLiteModel(contents)
    assert list(file.inputs) == ["image"]
    for given in (data, x, {"image": x}):
        assert keras_qat.verify(qat, contents, given).identical == 1
    simulated = keras_qat.simulate(qat, data).outputs["embedding"].values
    np.testing.assert_array_equal(file.predict(x), simulated)
    assert qat.predict(data, verbose=0).shape == (16, 3)
