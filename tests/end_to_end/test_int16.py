"""Tests 16x8 (int16 activations and int8 weights) in model, integer simulation and file."""

import numpy as np
import pytest
from tensorflow.lite.python import schema_py_generated as schema

import keras_qat
from keras_qat import recipes, specs
from keras_qat.tflite.interpreter import FileInterpreter
from keras_qat.tflite.reader import FileGraph
from tests.comparison import KERNELS, RUNNABLE, Product, assert_identical
from tests.end_to_end.exact import assert_exact_everywhere
from tests.end_to_end.test_families import exported
from tests.helpers import images, keras, observe, quantize_on, scramble
from tests.networks.small import functional, layers, residual_net

X = images(96, (8, 8, 1))


@pytest.fixture(scope="module")
def pair():
    """Returns a calibrated model and its file."""
    qat = quantize_on(scramble(residual_net()), X, "int16x8")
    return qat, keras_qat.export_tflite(qat)


@pytest.mark.legacy
@pytest.mark.parametrize("kernels", KERNELS)
def test_layer_by_layer(pair, kernels):
    report = keras_qat.verify(*pair, X, per_layer=True, kernels=kernels)
    assert {"image", "stem", "depthwise", "project", "merge_relu", "logits"} <= {
        tensor.name for tensor in report.tensors
    }
    for tensor in report.tensors:
        assert tensor.scale_ulps == 0, tensor
        assert tensor.zero_point == tensor.file_zero_point == 0, tensor
        assert tensor.simulated == 1, tensor
        assert tensor.agrees, tensor
    assert not report.findings()
    assert report.verdict.is_good


def test_kernels_multiply_without_an_error(pair):
    """Kernels use 15 bits of a multiplier, and these are all of its bits."""
    graph = FileGraph(pair[1])
    result = 0
    for tensor in graph.tensors:
        operation = graph.producers.get(tensor.index)
        if operation is None or operation.kernel not in ("CONV_2D", "DEPTHWISE_CONV_2D"):
            continue
        x = graph.tensors[operation.inputs[0]]
        kernel = graph._graph.tensors[operation.inputs[1]]
        scales = np.asarray(kernel.quantization.scale, np.float32).astype(np.float64)
        fraction, _ = np.frexp(x.scale * scales / tensor.scale)
        off = fraction * 2**15 - np.round(fraction * 2**15)
        assert np.abs(off).max() < 2**15 * 1e-7
        assert graph._graph.tensors[operation.inputs[2]].type == schema.TensorType.INT64
        result += 1
    assert result == 4


@pytest.mark.parametrize("bits", [4, 8])
def test_channels_without_weights(bits):
    """Only a bias remains, which a 15-bit multiplier and a shift must be able to scale."""
    model = functional((6, 6, 2), build=layers.Conv2D(4, 3, name="conv"))
    kernel, _ = scramble(model).get_layer("conv").get_weights()
    kernel[..., 1], kernel[..., 2] = 0, 1e-12
    model.get_layer("conv").set_weights([kernel, np.array([0.1, 1.5, -2.5, 0.0])])
    x = images(64, (6, 6, 2))
    qat = observe(keras_qat.quantize_model(model, recipes.int16x8(weight_bits=bits)), x)
    contents = keras_qat.export_tflite(qat)
    report = keras_qat.verify(qat, contents, x)
    assert report.identical >= 0.999
    assert report.max_difference <= 1
    (codes,) = FileInterpreter(contents).run({qat.input_names[0]: x}).values()
    scale = FileInterpreter(contents).outputs[qat.output_names[0]].scale
    np.testing.assert_allclose(codes[..., 1] * scale, 1.5, atol=scale)
    np.testing.assert_allclose(codes[..., 2] * scale, -2.5, atol=scale)


def test_sums_that_need_64_bits():
    """Full-scale inputs times full-scale weights, summed 9 * 256 times, exceed 2^31."""
    model = functional((4, 4, 256), build=layers.Conv2D(2, 3, name="conv"))
    model.get_layer("conv").set_weights([np.ones((3, 3, 256, 2)), np.array([3.0, -2.0])])
    x = np.ones((8, 4, 4, 256), np.float32)
    qat = observe(keras_qat.quantize_model(model, "int16x8"), x, batches=1)
    file = FileInterpreter(keras_qat.export_tflite(qat))
    (codes,) = file.run({qat.input_names[0]: x}).values()
    (detail,) = file.outputs.values()
    expected = 9 * 256 + np.array([3.0, -2.0])
    np.testing.assert_allclose(codes[0, 0, 0] * detail.scale, expected, rtol=1e-4)


@pytest.mark.sample(2)
@pytest.mark.parametrize("output_dtype", ["int16", "float32"])
@pytest.mark.parametrize("input_dtype", ["int16", "float32"])
def test_types_of_the_ends(input_dtype, output_dtype):
    model = scramble(functional((6,), build=layers.Dense(4, name="y")))
    x = images(64, (6,))
    qat = observe(keras_qat.quantize_model(model, "int16x8"), x)
    contents = keras_qat.export_tflite(qat, input_dtype=input_dtype, output_dtype=output_dtype)
    file = FileInterpreter(contents)
    assert [array.dtype for array in file.inputs.values()] == [np.dtype(input_dtype)]
    assert [output.dtype for output in file.outputs.values()] == [np.dtype(output_dtype)]
    assert keras_qat.verify(qat, contents, x).max_difference <= 1.01
    for wrong in ("int8", "uint8"):
        with pytest.raises(ValueError, match=f"input_dtype='{wrong}': use 'int16' or 'float32'"):
            keras_qat.export_tflite(qat, input_dtype=wrong)


@pytest.mark.legacy
def test_settings_that_are_refused():
    with pytest.raises(ValueError, match=r"symmetric.*int16x8"):
        specs.QuantSpec(16)
    with pytest.raises(ValueError, match="from 2 to 8"):
        specs.QuantSpec(12, symmetric=True)
    with pytest.raises(ValueError, match="from 2 to 8"):
        recipes.int16x8(weight_bits=16)
    with pytest.raises(ValueError, match="do not mix widths"):
        recipes.int16x8().override("Dense", activation_bits=8)
    recipe = recipes.int16x8().override("head", quantize=False)
    assert recipes.Recipe.from_config(recipe.to_config()) == recipe


@pytest.mark.sample(1)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("merge", [layers.Add, layers.Subtract])
def test_sums_of_many_codes(merge, kernels):
    """TFLite's optimized and portable kernels differ in one of a million sums.

    The optimized kernel leaves the values after the last block of 16 to the portable kernel.
    """
    shape = (301, 301, 3)
    model = functional(shape, shape, build=lambda a, b: merge()([a, b]))
    numbers = np.random.default_rng(0)
    x = [(scale * numbers.normal(size=(8, *shape))).astype(np.float32) for scale in (1, 0.13)]
    qat = observe(keras_qat.quantize_model(model, "int16x8"), *x)
    assert_identical(qat, x, kernels)


def test_codes_as_inputs():
    result = exported("dense", "int16x8")
    simulated = keras_qat.simulate(result.model, result.x)
    codes = simulated.tensors[result.model.input_names[0]].codes
    assert codes.dtype == np.int16
    again = keras_qat.simulate(result.model, codes)
    for name, output in simulated.outputs.items():
        np.testing.assert_array_equal(again.outputs[name].codes, output.codes)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kernels", KERNELS)
def test_layers_without_exact_multipliers(kernels):
    """A layer with two outputs' ranges has one scale for its weights. Custom layers keep theirs.

    Their kernels round multipliers to 15 bits, and the simulation does so, too.
    """
    keras_qat.register_op(Product, "dense", weights={"kernel": ()})
    conv, norm = layers.Conv2D(4, 3, padding="same"), layers.BatchNormalization()

    def build(x):
        once = norm(conv(x))
        return [once, norm(conv(layers.ReLU()(once))), Product()(layers.Flatten()(x))]

    model = scramble(functional((6, 6, 4), build=build))
    x = images(64, (6, 6, 4))
    qat = keras_qat.quantize_model(model, "int16x8")
    keras_qat.freeze_batch_norm(qat)
    qat(x, training=True)
    assert_identical(qat, x, kernels)


@pytest.mark.sample(1)
@pytest.mark.parametrize("off", [0.0, 3e-4, -3e-4])
@pytest.mark.parametrize("exponent", [-12, -11])
@pytest.mark.parametrize("function", ["sigmoid", "tanh"])
def test_activations_of_inputs_that_end_next_to_a_power_of_two(function, exponent, off):
    """Kernels of sigmoid and tanh treat such scales specially, and returned other values."""
    model = functional((64,), build=layers.Activation(function))
    scale = 2.0**exponent * (1 + off)
    x = np.linspace(-scale * 32767, scale * 32767, 64 * 64).astype(np.float32).reshape(64, 64)
    qat = quantize_on(model, x, "int16x8")
    (quantizer, _) = keras_qat.quantizers(qat)
    assert abs((quantizer.maximum - quantizer.minimum) / 65535 / scale - 1) < 1e-6
    for kernels in RUNNABLE:
        assert_exact_everywhere(qat, x, kernels)


RECURRENT = {
    "lstm": ((5, 4), lambda: layers.LSTM(3)),
    "bidirectional": ((5, 4), lambda: layers.Bidirectional(layers.LSTM(3))),
    "time_distributed": ((3, 5, 4), lambda: layers.TimeDistributed(layers.LSTM(3))),
    "gru": ((5, 4), lambda: layers.GRU(3)),
    "simple_rnn": ((5, 4), lambda: layers.SimpleRNN(3)),
    "conv_lstm": ((3, 6, 4), lambda: layers.ConvLSTM1D(3, 2)),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_train_in_float_as_files_compute_them(kind):
    """Layers once trained with inner 8-bit values. Only TFLite Micro's LSTM kernel has 16 bits."""
    shape, build = RECURRENT[kind]
    model, x = functional(shape, build=lambda x: build()(x)), images(64, shape)
    assert len(keras_qat.plan(model, "int16x8").float_layers) == 1 + (kind == "bidirectional")
    qat = observe(keras_qat.quantize_model(model, "int16x8"), x)
    contents = keras_qat.export_tflite(qat)
    for kernels in KERNELS:
        assert keras_qat.verify(qat, contents, x, kernels=kernels).identical >= 0.99
    output = keras_qat.quantizers(qat)[-1]
    step = (output.maximum - output.minimum) / 65535
    keras_qat.freeze_ranges(qat)
    trained = qat(x, training=True)
    np.testing.assert_allclose(trained, qat.predict(x, verbose=0), atol=3 * step)


def test_tensors_have_the_ranges_of_their_quantizers():
    """Entries of a lookup table have them, too."""
    words = keras.Input((6,), dtype="int32")
    outputs = layers.Conv1D(3, 2, activation="relu")(layers.Embedding(20, 4)(words))
    qat = keras_qat.quantize_model(keras.Model(words, outputs), "int16x8")
    observe(qat, np.arange(96).reshape(16, 6) % 20)
    of_outputs = [q.maximum for q in keras_qat.quantizers(qat) if q.name.endswith("/output")]
    in_graph = [32767 * node.output.params.scale for node in keras_qat.resolve(qat).nodes]
    assert in_graph == pytest.approx(of_outputs, rel=1e-6)


def test_embeddings_train_with_the_table_of_the_file():
    """The table has 16 bits. Training also rounded it to the bits of weights."""
    words = keras.Input((6,), dtype="int32")
    model = keras.Model(words, layers.Embedding(20, 4)(words))
    x = np.arange(96).reshape(16, 6) % 20
    qat = observe(keras_qat.quantize_model(model, recipes.int16x8(weight_bits=4)), x)
    (output,) = keras_qat.resolve(qat).outputs.values()
    trained = qat(x, training=True)
    np.testing.assert_allclose(trained, qat.predict(x, verbose=0), atol=output.params.scale)
