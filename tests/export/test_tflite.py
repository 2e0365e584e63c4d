"""Tests the file: types and names of inputs and outputs, and refused exports."""

import threading

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.tflite.interpreter import FileInterpreter, dequantize
from tests.helpers import assert_all_equal, images, keras, observe, scramble
from tests.networks.small import functional, layers, out_of_order

pytestmark = pytest.mark.legacy


def test_file_is_written_and_returned(exported, tmp_path):
    path = tmp_path / "model.tflite"
    path.write_bytes(b"old")
    contents = keras_qat.export_tflite(exported.model, str(path))
    assert path.read_bytes() == contents == exported.tflite
    assert [path.name for path in tmp_path.iterdir()] == ["model.tflite"]


def test_a_saved_model_is_not_replaced(exported, tmp_path):
    for name in ("qat.keras", "qat.h5"):
        path = tmp_path / name
        path.write_bytes(b"a model")
        with pytest.raises(FileExistsError, match=f"{name}: an export would replace the saved"):
            keras_qat.export_tflite(exported.model, path)
        assert path.read_bytes() == b"a model"


def test_exporting_does_not_change_the_model(exported):
    before = exported.model.get_weights()
    assert keras_qat.export_tflite(exported.model) == exported.tflite
    assert_all_equal(exported.model.get_weights(), before)


@pytest.mark.sample(2)
@pytest.mark.parametrize("output_dtype", ["int8", "uint8", "float32"])
@pytest.mark.parametrize("input_dtype", ["int8", "uint8", "float32"])
def test_types_of_inputs_and_outputs(input_dtype, output_dtype):
    qat = keras_qat.quantize_model(scramble(functional((6,), build=layers.Dense(4))))
    x = images(64, (6,))
    observe(qat, x)
    contents = keras_qat.export_tflite(qat, input_dtype=input_dtype, output_dtype=output_dtype)
    file = FileInterpreter(contents)
    ((_, taken),), ((name, given),) = file.inputs.items(), file.outputs.items()
    assert taken.dtype == np.dtype(input_dtype)
    assert given.dtype == np.dtype(output_dtype)
    # The values are the same for every type.
    values = dequantize(file.run({qat.input_names[0]: x})[name], given.scale, given.zero_point)
    int8 = FileInterpreter(keras_qat.export_tflite(qat))
    expected = int8.outputs[name].dequantize(int8.run({qat.input_names[0]: x})[name])
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)
    report = keras_qat.verify(qat, contents, x)
    assert report.identical >= 0.99
    assert report.max_difference <= 1


@pytest.mark.parametrize("dtype", [tf.uint8, np.uint8, np.dtype("uint8")])
def test_types_as_the_converter_takes_them(dtype, exported):
    contents = keras_qat.export_tflite(exported.model, input_dtype=dtype)
    assert contents == keras_qat.export_tflite(exported.model, input_dtype="uint8")


def test_names_and_order_of_several_inputs_and_outputs():
    qat = keras_qat.quantize_model(scramble(out_of_order()))
    x = [images(64, (6,), 1), images(64, (4,), 2)]
    observe(qat, *x)
    contents = keras_qat.export_tflite(qat)
    file = FileInterpreter(contents)
    for end, names in ((file.inputs, ["right", "left"]), (file.outputs, ["zebra", "apple"])):
        assert end.keys() == set(names)
        assert all(tensor.name == name for name, tensor in end.items())
    interpreter = file.interpreter
    assert [tensor["name"] for tensor in interpreter.get_input_details()] == ["right", "left"]
    assert [tensor["name"] for tensor in interpreter.get_output_details()] == ["zebra", "apple"]
    assert list(interpreter.get_signature_list()) == ["serving_default"]
    runner = interpreter.get_signature_runner("serving_default")
    assert runner.get_output_details().keys() == {"zebra", "apple"}
    report = keras_qat.verify(qat, contents, x)
    assert [tensor.name for tensor in report.outputs] == ["zebra", "apple"]
    assert report.identical >= 0.99


@pytest.mark.parametrize("end", ["input_dtype", "output_dtype"])
def test_unknown_type(exported, end):
    with pytest.raises(ValueError, match=f"{end}='int16'.*'int8', 'uint8' or 'float32'"):
        keras_qat.export_tflite(exported.model, **{end: "int16"})


def test_outputs_that_are_inputs_or_the_same():
    x = keras.Input((4,), name="x")
    y = layers.Dense(3, name="y")(x)
    qat = keras_qat.quantize_model(keras.Model(x, [y, x, layers.ReLU(name="z")(y), y]))
    data = images(32, (4,))
    observe(qat, data)
    file = FileInterpreter(keras_qat.export_tflite(qat))
    codes = file.run({"x": data})
    expected = dict(zip(qat.output_names, qat.predict(data, verbose=0), strict=True))
    assert codes.keys() == expected.keys()
    for name, values in expected.items():
        real = file.outputs[name].dequantize(codes[name])
        np.testing.assert_allclose(real, values, atol=0.05)


def test_metadata(exported, tmp_path):
    path = tmp_path / "model.tflite"
    path.write_bytes(exported.tflite)
    for file in (exported.tflite, path, str(path)):
        metadata = keras_qat.read_metadata(file)
        assert metadata["version"] == keras_qat.__version__
        assert keras_qat.recipes.Recipe.from_config(metadata["recipe"]) == exported.model.recipe
    with pytest.raises(ValueError, match="not a TFLite file"):
        keras_qat.read_metadata(b"no file at all")
    converter = tf.lite.TFLiteConverter.from_keras_model(exported.float_model)
    with pytest.raises(ValueError, match="no metadata of keras_qat"):
        keras_qat.read_metadata(converter.convert())


def test_another_process_writes_the_same_bytes(exported, tmp_path, fresh_process):
    path = str(tmp_path / "qat.keras")
    exported.model.save(path)
    printed = fresh_process(
        f"""
import keras_qat
model = keras_qat.keras.models.load_model({path!r})
result = np.frombuffer(keras_qat.export_tflite(model), np.uint8)
"""
    )
    assert printed.tobytes() == exported.tflite


def test_weights_that_int8_kernels_do_not_hold():
    """The warning names the line that exports."""
    uneven = keras.initializers.RandomUniform(-0.2, 1.0, seed=1)
    model = functional((6,), build=layers.Dense(9, kernel_initializer=uneven))
    qat = observe(keras_qat.quantize_model(model, "contrib"), images(16, (6,)))
    with pytest.warns(UserWarning, match="weights of 1 layer are rounded again") as result:
        keras_qat.export_tflite(qat, input_range=(-4.0, 4.0))
    assert result[0].filename == __file__


@pytest.mark.slow
def test_threads_that_export_at_once():
    """Layers have other weights during an export."""
    x = images(8, (2, 3))
    models = [
        observe(keras_qat.quantize_model(functional((2, 3), build=build)), x)
        for build in (
            lambda x: layers.LayerNormalization()(layers.Dense(3, "relu")(x)),
            lambda x: layers.Bidirectional(layers.GRU(3))(x),
        )
    ]
    alone = [keras_qat.export_tflite(model) for model in models]
    files = {}

    def work(number):
        files[number] = keras_qat.export_tflite(models[number % 2])
        assert keras_qat.verify(models[number % 2], files[number], x).identical == 1

    threads = [threading.Thread(target=work, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert files == {number: alone[number % 2] for number in range(4)}


def test_one_tensor_of_open_sizes_as_two_outputs():
    x = keras.Input((None, 4, 2))
    y = tf.nn.relu(x)
    qat = observe(keras_qat.quantize_model(keras.Model(x, [y, y])), images(6, (5, 4, 2)))
    contents = keras_qat.export_tflite(qat)
    for shape in ((7, 4, 2), (1, 4, 2)):
        data = images(4, shape)
        first, second = keras_qat.TFLiteModel(contents).predict(data)
        np.testing.assert_array_equal(first, qat.predict(data, verbose=0)[0])
        np.testing.assert_array_equal(second, first)


def test_an_input_of_bytes_may_be_float32_in_the_file():
    """Callers that only use float can pass pixels as float."""
    pixels = keras.Input((4, 4, 3), dtype="uint8", name="pixels")
    y = layers.Dense(2)(layers.Flatten()(layers.Rescaling(1 / 255)(pixels)))
    qat = keras_qat.quantize_model(keras.Model(pixels, y))
    x = np.random.default_rng(0).integers(0, 256, (16, 4, 4, 3)).astype(np.uint8)
    keras_qat.calibrate(qat, x)
    for dtype, given in ((None, "uint8"), ("uint8", "uint8"), ("float32", "float32")):
        contents = keras_qat.export_tflite(qat, input_dtype=dtype)
        file = keras_qat.TFLiteModel(contents)
        assert file.inputs["pixels"].dtype == given
        np.testing.assert_array_equal(file.predict(x.astype(given)), qat.predict(x, verbose=0))
        assert keras_qat.verify(qat, contents, x, per_layer=True).identical == 1


@pytest.mark.parametrize("bits", [2, 4])
def test_fewer_bits_use_the_lower_codes_only(bits):
    recipe = keras_qat.recipes.int8(weight_bits=bits, activation_bits=bits)
    model = scramble(functional((8, 8, 4), build=layers.Conv2D(6, 3, activation="relu")))
    qat = keras_qat.quantize_model(model, recipe)
    x = images(64)
    observe(qat, x)
    contents = keras_qat.export_tflite(qat)
    file = FileInterpreter(contents)
    (codes,) = file.run({qat.input_names[0]: x}).values()
    assert len(np.unique(codes)) <= 2**bits
    report = keras_qat.verify(qat, contents, x)
    assert report.identical >= 0.99
    assert report.max_difference <= 1
