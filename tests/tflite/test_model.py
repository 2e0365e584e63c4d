"""Tests `TFLiteModel`: files accept data like models, and return the same values."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.helpers import assert_all_equal, images, keras, observe, quantize_on
from tests.networks.small import layers, out_of_order, tiny_net

pytestmark = pytest.mark.legacy
X = images(10, (6, 6, 2))
LEFT, RIGHT = images(10, (4,), seed=1), images(10, (6,), seed=2)


@pytest.fixture(scope="module")
def qat():
    return observe(keras_qat.quantize_model(tiny_net()), X)


@pytest.fixture(scope="module")
def contents(qat):
    return keras_qat.export_tflite(qat)


@pytest.fixture(scope="module")
def file(contents):
    return keras_qat.TFLiteModel(contents)


@pytest.fixture(scope="module")
def expected(qat):
    return qat.predict(X, verbose=0)


@pytest.fixture(scope="module")
def of_two():
    qat = quantize_on(out_of_order(), [RIGHT, LEFT])
    return qat, keras_qat.TFLiteModel(keras_qat.export_tflite(qat))


def test_a_file_is_called_like_a_model(file, expected):
    assert np.array_equal(file(X), expected)


def test_names_of_inputs_and_outputs(of_two):
    _, file = of_two
    with pytest.raises(KeyError, match=rf"no tensor 'logits'.*: {', '.join(file.outputs)}"):
        file.outputs["logits"]
    with pytest.raises(KeyError, match="no tensor 0"):
        file.inputs[0]
    assert "logits" not in file.outputs
    assert file.outputs.get("logits") is None


def parts(size):
    return (X[start : start + size] for start in range(0, len(X), size))


DATA = {
    "array": lambda: X,
    "double": lambda: X.astype(np.float64),
    "by name": lambda: {"image": X},
    "in a list": lambda: [X],
    "generator": lambda: parts(3),
    "function": lambda: lambda: parts(4),
    "dataset": lambda: tf.data.Dataset.from_tensor_slices((X, np.arange(10))).batch(4),
    "examples": lambda: tf.data.Dataset.from_tensor_slices(X),
}


@pytest.mark.parametrize("form", DATA)
def test_predicts_as_the_model_does(file, expected, form):
    np.testing.assert_array_equal(file.predict(DATA[form](), batch_size=4), expected)


def test_codes_in_and_out(file, expected):
    """Arrays of the input's type are quantized values. `codes=True` keeps those of outputs."""
    (image,), (output,) = file.inputs.values(), file.outputs.values()
    codes = file.predict(image.quantize(X), codes=True)
    assert codes.dtype == output.dtype == np.int8
    np.testing.assert_array_equal(output.dequantize(codes), expected)
    np.testing.assert_array_equal(
        image.quantize([image.scale * 0.5, 1e9]), [image.zero_point + 1, 127]
    )


def test_says_what_it_takes_and_gives(qat, file, tmp_path, contents):
    (image,) = file.inputs.values()
    params = keras_qat.resolve(qat).inputs["image"].params
    assert list(file.inputs) == ["image"] and list(file.outputs) == qat.output_names
    assert image.shape == (None, 6, 6, 2) and image.dtype == np.int8
    assert image.scale == np.float32(params.scale)
    (tmp_path / "small.tflite").write_bytes(contents)
    shown = repr(keras_qat.TFLiteModel(tmp_path / "small.tflite", "reference"))
    assert "small.tflite, reference" in shown and "image: TensorInfo(shape=(None, 6, 6, 2)" in shown


def test_steps_and_progress(file, expected, capsys):
    data = (X[:5] for _ in iter(int, 1))
    predicted = file.predict(data, verbose=1, steps=2)
    np.testing.assert_array_equal(predicted, np.concatenate([expected[:5]] * 2))
    assert "2/2" in capsys.readouterr().out


def test_order_is_the_models(of_two):
    """Interpreters sort names, but lists of inputs and outputs are in the model's order."""
    qat, file = of_two
    assert list(file.inputs) == ["right", "left"] and list(file.outputs) == ["zebra", "apple"]
    expected = qat.predict([RIGHT, LEFT], verbose=0)
    for data in ([RIGHT, LEFT], {"right": RIGHT, "left": LEFT}, ((RIGHT, LEFT), np.arange(10))):
        predicted = file.predict(data)
        assert isinstance(predicted, list)
        assert_all_equal(predicted, expected)


@pytest.mark.parametrize("kernels", ["reference", "tflm"])
def test_batches_of_the_file_are_filled_up(qat, kernels):
    """A file for three examples accepts ten."""
    if kernels == "tflm":
        pytest.importorskip("tflite_micro")
    file = keras_qat.TFLiteModel(keras_qat.export_tflite(qat, batch_size=3), kernels)
    predicted = file.predict(X, batch_size=4)
    expected = keras_qat.simulate(qat, X, kernels=kernels).outputs["logits"].values
    np.testing.assert_array_equal(predicted, expected)


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_other_types_of_ends(qat, expected, dtype):
    file = keras_qat.TFLiteModel(
        keras_qat.export_tflite(qat, input_dtype=dtype, output_dtype=dtype)
    )
    assert {array.is_quantized for array in file.inputs.values()} == {dtype == "uint8"}
    np.testing.assert_array_equal(file.predict(X), expected)


def test_float_files_of_other_programs():
    model = tiny_net()
    file = keras_qat.TFLiteModel(tf.lite.TFLiteConverter.from_keras_model(model).convert())
    np.testing.assert_allclose(file.predict(X), model.predict(X, verbose=0), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_files_of_several_functions_are_refused(tmp_path):
    module = tf.Module()
    spec = tf.TensorSpec((None, 2), name="x")
    functions = {name: tf.function(lambda x: x + 1.0, [spec]) for name in ("infer", "train")}
    module.functions = list(functions.values())
    concrete = [function.get_concrete_function() for function in functions.values()]
    folder = str(tmp_path)
    tf.saved_model.save(module, folder, dict(zip(functions, concrete, strict=True)))
    made = tf.lite.TFLiteConverter.from_saved_model(folder, list(functions)).convert()
    with pytest.raises(ValueError, match=r"has 2 signatures. Convert only the function"):
        keras_qat.TFLiteModel(made)


def test_indices_are_integers():
    inputs = keras.Input((3,), dtype="int32", name="words")
    outputs = keras.layers.Dense(2)(keras.layers.Embedding(9, 4)(inputs))
    words = np.arange(6).reshape(2, 3)
    qat = observe(keras_qat.quantize_model(keras.Model(inputs, outputs)), words)
    file = keras_qat.TFLiteModel(keras_qat.export_tflite(qat))
    for same in (words, words.astype(np.float32)):
        np.testing.assert_array_equal(file.predict(same), qat.predict(words, verbose=0))
    with pytest.raises(
        ValueError, match="'words' of 'the file' needs int32 values that are not quantized"
    ):
        file.predict(words + 0.5)


REFUSED = {
    "shape": (lambda: X[:, :5], r"'image' of 'the file' expects arrays of shape \(None, 6, 6, 2"),
    "one example": (lambda: X[0], "That is one example: pass a batch"),
    "name": (
        lambda: {"picture": X},
        "'the file' has the inputs 'image', but the data has 'picture'",
    ),
    "dtype": (lambda: np.full(X.shape, "a"), "'image' of 'the file' expects numbers, not text"),
    "NaN": (lambda: np.where(X > 0, np.nan, X), "contains NaN, first in example 0"),
    "nothing": (lambda: [], "The data for 'the file' is empty"),
    "path": (lambda: "x.npy", "Load files first"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_says_what_is_wrong(file, what):
    data, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        file.predict(data())


def test_number_of_inputs(of_two):
    with pytest.raises(ValueError, match="'the file' has 2 inputs, but the data has 1"):
        of_two[1].predict(LEFT)


def test_what_cannot_be_opened(contents):
    with pytest.raises(ValueError, match="kernels='xnnpac'"):
        keras_qat.TFLiteModel(contents, "xnnpac")
    with pytest.raises(ValueError, match="not a TFLite file"):
        keras_qat.TFLiteModel(b"PK" + contents)
    with pytest.raises(ValueError, match="batch_size=1"):
        keras_qat.TFLiteModel(contents, "tflm")


def test_dicts_are_by_the_models_keys():
    """Other inputs may have these keys as names. Keras uses the keys."""
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    joined = layers.Concatenate()([layers.Dense(3)(a), layers.Dense(2)(b)])
    for keys in (("b", "a"), ("left", "right")):
        model = keras.Model(dict(zip(keys, (a, b), strict=True)), layers.Dense(3)(joined))
        data = {key: images(8, (4,), seed) * 3**seed for seed, key in enumerate(keys)}
        qat = quantize_on(model, data)
        tflite = keras_qat.export_tflite(qat)
        assert keras_qat.read_metadata(tflite)["keys"] == dict(zip("ab", keys, strict=True))
        expected = qat.predict(data, verbose=0)
        np.testing.assert_array_equal(keras_qat.TFLiteModel(tflite).predict(data), expected)
    by_name = dict(zip("ab", data.values(), strict=True))
    np.testing.assert_array_equal(keras_qat.TFLiteModel(tflite).predict(by_name), expected)


def calibrated(activation="elu", **options):
    keras.utils.set_random_seed(0)
    convolutions = [layers.Conv2D(8, 3, activation=activation) for _ in range(2)]
    ends = layers.GlobalAveragePooling2D(), layers.Dense(4)
    model = keras.Sequential([keras.Input((8, 8, 3)), *convolutions, *ends])
    return quantize_on(model, images(48, (8, 8, 3)), **options)


@pytest.mark.parametrize(
    "options", [{"target": "ethos_u55"}, {"kernels": "reference", "activation": "relu"}], ids=str
)
def test_files_run_with_the_kernels_of_their_model(options):
    if "target" in options:
        pytest.importorskip("tflite_micro")
    qat, x = calibrated(**options), images(48, (8, 8, 3))
    contents = keras_qat.export_tflite(qat)
    expected = qat.predict(x, verbose=0)
    assert np.any(keras_qat.TFLiteModel(contents, "xnnpack").predict(x) != expected)
    np.testing.assert_array_equal(keras_qat.TFLiteModel(contents).predict(x), expected)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"target": "edgetpu"}, "no reference kernel"),  # For ELU.
        ({"kernels": "tflm"}, "needs fixed sizes"),
        ({"kernels": "xnnpack_arm64"}, "64-bit ARM only"),
    ],
    ids=["missing kernel", "open batch", "other processor"],
)
def test_other_kernels_stand_in_with_a_warning(options, reason):
    qat = calibrated(**options)
    contents = keras_qat.export_tflite(qat)
    with pytest.warns(UserWarning, match=reason):
        file = keras_qat.TFLiteModel(contents)
    assert file.predict(images(4, (8, 8, 3))).shape == (4, 4)


def test_verify_runs_operators_that_a_target_leaves_to_the_cpu():
    qat = calibrated(target="edgetpu")
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), images(16, (8, 8, 3)))
    assert report.verdict.is_same


@pytest.mark.sample(2)
@pytest.mark.parametrize("kernels", ["xnnpack", "reference", "tflm"])
@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_token_ids_beyond_the_table_are_named(kernels, dtype):
    """TFLite Micro would read memory after the table."""
    if kernels == "tflm":
        pytest.importorskip("tflite_micro")
    tokens = keras.Input((4,), dtype=dtype, name="tokens")
    y = keras.layers.Dense(2)(keras.layers.Flatten()(keras.layers.Embedding(9, 3)(tokens)))
    qat = keras_qat.quantize_model(keras.Model(tokens, y))
    ids = np.arange(8).reshape(2, 4).astype(dtype)
    keras_qat.calibrate(qat, np.tile(ids, (20, 1)))
    contents = keras_qat.export_tflite(qat, batch_size=1)
    file = keras_qat.TFLiteModel(contents, kernels)
    file.predict(ids + 1)
    for wrong, first in ((ids + 3, 9), (ids - 1, -1)):
        with pytest.raises(ValueError, match=f"id {first} of input 'tokens' .*Embedding's 9 rows"):
            file.predict(wrong)
    with pytest.raises(ValueError, match="Ids must be 0 to 8"):
        keras_qat.verify(qat, contents, ids + 3)
