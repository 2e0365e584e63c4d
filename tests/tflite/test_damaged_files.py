"""Tests damaged and malicious files: they are refused, or read as far as they are valid."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.lite.python.schema_py_generated import TensorType
from tensorflow.lite.tools import flatbuffer_utils

import keras_qat
from keras_qat.tflite.schema import OPERATORS, operator_code, unpack
from tests.helpers import images, keras, observe
from tests.networks.small import functional, layers
from tests.processes import fork, run_all


def damaged(contents: bytes, numbers: np.random.Generator) -> bytes:
    """Returns a file's contents, truncated or with some flipped bits."""
    if numbers.random() < 0.2:
        return contents[: numbers.integers(len(contents))]
    changed = bytearray(contents)
    end = 300 if numbers.random() < 0.5 else len(changed)  # The most important fields come first.
    for place in numbers.integers(0, end, numbers.integers(1, 20)):
        changed[place] ^= 1 << int(numbers.integers(8))
    return bytes(changed)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Saves a model in both formats of Keras in a folder, with its outputs."""
    folder = tmp_path_factory.mktemp("saved")
    model = functional((6,), build=lambda x: layers.Dense(3)(layers.Dense(4, "relu")(x)))
    x = images(8, (6,))
    qat = observe(keras_qat.quantize_model(model), x)
    for ending in (".keras", ".h5"):
        qat.save(folder / f"model{ending}")
    return folder, x, qat.predict(x, verbose=0)


def _load_damaged(ending, numbers, saved, tmp_path):
    folder, x, expected = saved
    contents = (folder / f"model{ending}").read_bytes()
    path = tmp_path / f"model{ending}"
    path.write_bytes(damaged(contents, numbers))
    try:
        loaded = keras.models.load_model(path)
    except Exception:  # Errors of Keras and of all libraries that it uses.
        return
    predicted = loaded.predict(x, verbose=0)
    if ending == ".keras":  # .keras files have checksums, .h5 files do not.
        np.testing.assert_array_equal(predicted, expected)


@pytest.mark.parametrize("ending", [".keras", ".h5"])
def test_damaged_models(ending, saved, tmp_path):
    """No crash. A file with checksums that can be loaded has the saved values."""
    for seed in range(5):
        _load_damaged(ending, np.random.default_rng(seed), saved, tmp_path)


@pytest.mark.slow
def test_many_damaged_models(seeds, saved, tmp_path):
    for seed in range(5, 5 + 2 * seeds):
        _load_damaged(".keras", np.random.default_rng(seed), saved, tmp_path)


@pytest.mark.slow
def test_many_damaged_h5_files(seeds, saved, tmp_path):
    """No file crashes. For one of 400, HDF5's library loops forever, in plain Keras, too.

    That file has a damaged length in the heap with the configuration. Its superblock, its size and
    all that `h5py.File` checks are correct.
    """
    for seed in range(5, 5 + seeds):
        numbers = np.random.default_rng(seed)
        (code,) = run_all(fork(_load_damaged, ".h5", numbers, saved, tmp_path), seconds=30.0)
        assert code in (0, None), f"seed {seed}: {code}"


def _read_damaged(exported, seed):
    contents = damaged(exported.tflite, np.random.default_rng(seed))
    for read in (
        keras_qat.read_metadata,
        lambda it: keras_qat.verify(exported.model, it, exported.x[:8], per_layer=True),
        lambda it: keras_qat.TFLiteModel(it).predict(exported.x[:8]),
    ):
        with contextlib.suppress(ValueError):
            read(contents)


@pytest.mark.filterwarnings("ignore:The file .* other")
def test_damaged_tflite_files(exported):
    """Changed or missing bytes cause a `ValueError` or a result, but no crash."""
    for seed in range(30):
        _read_damaged(exported, seed)


def _without_text(model):
    model.subgraphs[0].tensors[0].name = b"\xff\xfe"


def _without_text_in_signature(model):
    model.signatureDefs[0].inputs[0].name = b"\xff\xfe"


@pytest.mark.parametrize("damage", [_without_text, _without_text_in_signature])
def test_files_that_the_schema_takes(damage, exported):
    model = unpack(exported.tflite)
    damage(model)
    contents = bytes(flatbuffer_utils.convert_object_to_bytearray(model))
    for read in (
        lambda: keras_qat.verify(exported.model, contents, exported.x[:8]),
        lambda: keras_qat.TFLiteModel(contents).predict(exported.x[:8]),
    ):
        with pytest.raises(ValueError, match=r"damaged or cut short .*Export it again"):
            read()


def test_operators_without_outputs(exported):
    model = unpack(exported.tflite)
    model.subgraphs[0].operators[0].outputs = None
    contents = bytes(flatbuffer_utils.convert_object_to_bytearray(model))
    with pytest.raises(ValueError, match="damaged or cut short"):
        keras_qat.targets.problems(contents, "xnnpack")


def _first(graph, kind):
    """Returns the first quantized tensor, weight or operator."""
    if kind == "operator":
        return graph.operators[0]
    read = graph.operators[0].inputs
    return graph.tensors[int(read[1 if kind == "weight" else 0])]


def _quantized_by(kind, **fields):
    def change(model):
        vars(_first(model.subgraphs[0], kind).quantization).update(fields)

    return change


def _with(kind, **fields):
    return lambda model: vars(_first(model.subgraphs[0], kind)).update(fields)


def _cut(model):
    buffer = model.buffers[_first(model.subgraphs[0], "weight").buffer]
    buffer.data = buffer.data[:-1]


DEADLY = {
    "a scale of .* is": _quantized_by("tensor", scale=[float("nan")]),
    "the scale of .* is 0": _quantized_by("tensor", scale=[0.0]),
    "a scale of tensor 'keras_qat/.* is": _quantized_by("weight", scale=[-1.0]),
    "a zero point of": _quantized_by("tensor", zeroPoint=[10**12]),
    "a zero point of tensor 'image' is": _quantized_by("tensor", zeroPoint=[200]),
    "has 2 scales": _quantized_by("weight", scale=[1.0, 1.0], zeroPoint=[0, 0]),
    "it has no graph": lambda model: vars(model).update(subgraphs=None),
    "has the shape": _with("tensor", shape=[-3]),
    "bytes instead of": _cut,
    "there is no buffer 99": _with("weight", buffer=99),
    "there is no tensor 999": _with("operator", outputs=[999]),
    "there is no operator code 77": _with("operator", opcodeIndex=77),
    "is read before it is computed": lambda model: model.subgraphs[0].operators.reverse(),
    "has strideW 0": lambda model: vars(model.subgraphs[0].operators[0].builtinOptions).update(
        strideW=0
    ),
    "is read before": lambda model: model.subgraphs[0].operators.pop(0),
    "names no input": lambda model: vars(model.signatureDefs[0].inputs[0]).update(tensorIndex=1),
    "has no outputs": lambda model: vars(model.signatureDefs[0]).update(outputs=[]),
}


def _split_model():
    """Returns a file with operators whose kernels do not check the file."""

    def build(x):
        left, right = tf.split(x, 2, axis=-1)
        return left * right

    qat = observe(keras_qat.quantize_model(functional((8, 4), build=build)), images(8, (8, 4)))
    return unpack(keras_qat.export_tflite(qat))


def _find_operator(model, kind):
    codes = [OPERATORS[operator_code(code)] for code in model.operatorCodes]
    return next(it for it in model.subgraphs[0].operators if codes[it.opcodeIndex] == kind)


TRUSTED = {
    "SPLIT has 2 outputs": lambda _, it: vars(it.builtinOptions).update(numSplits=7),
    "SPLIT has 1 inputs": lambda _, it: vars(it).update(inputs=it.inputs[:1]),
    "SPLIT reads no integers": lambda _, it: vars(it).update(inputs=it.inputs[::-1]),
    "SPLIT computes no values": lambda graph, it: vars(graph.tensors[it.outputs[0]]).update(
        type=TensorType.VARIANT
    ),
    "MUL reads the shapes": lambda graph, it: vars(it).update(
        inputs=np.array([graph.inputs[0], it.inputs[1]])
    ),
}


@pytest.mark.parametrize("fault", TRUSTED)
def test_what_kernels_do_not_check(fault):
    model = _split_model()
    TRUSTED[fault](model.subgraphs[0], _find_operator(model, fault.split()[0]))
    contents = bytes(flatbuffer_utils.convert_object_to_bytearray(model))
    with pytest.raises(ValueError, match=f"is damaged or cut short .*{fault}.* Export it"):
        keras_qat.TFLiteModel(contents)


@pytest.mark.parametrize("fault", DEADLY)
def test_what_would_end_the_process_is_found_before(fault, exported):
    """In LiteRT or TFLite Micro, most of them would crash."""
    model = unpack(exported.tflite)
    DEADLY[fault](model)
    contents = bytes(flatbuffer_utils.convert_object_to_bytearray(model))
    for read in (
        lambda: keras_qat.TFLiteModel(contents),
        lambda: keras_qat.TFLiteModel(contents, "reference"),
        lambda: keras_qat.TFLiteModel(contents, "tflm"),
        lambda: keras_qat.targets.problems(contents, "tflm"),
        lambda: keras_qat.verify(exported.model, contents, exported.x[:8]),
    ):
        with pytest.raises(ValueError, match=f"is damaged or cut short .*{fault}.* Export it"):
            read()


def test_files_cut_short(exported):
    for end in (9, 40, len(exported.tflite) // 2, len(exported.tflite) - 40):
        for read in (
            lambda it: keras_qat.targets.problems(it, "tflm"),
            lambda it: keras_qat.TFLiteModel(it, "tflm"),
            keras_qat.TFLiteModel,
        ):
            with pytest.raises(ValueError, match="damaged or cut short"):
                read(exported.tflite[:end])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The file .* other")
def test_many_damaged_tflite_files(exported, seeds):
    for seed in range(30, 30 + 5 * seeds):
        _read_damaged(exported, seed)
