"""Tests C++ source for microcontrollers: it compiles, and contains what its comments state."""

import errno
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import keras_qat
from keras_qat.export.c_source import _get_resolver_name
from keras_qat.tflite.schema import OPERATORS
from tests.helpers import build_model, keras, layers, quantize_on, rng
from tests.networks.small import tiny_net

RESOLVER = """
Abs Add AddN ArgMax ArgMin AveragePool2D BatchToSpaceNd BroadcastArgs BroadcastTo Cast Ceil
Concatenation Conv2D Cos CumSum DepthToSpace DepthwiseConv2D Dequantize Div Elu Equal Exp ExpandDims
Fill Floor FloorDiv FloorMod FullyConnected Gather GatherNd Greater GreaterEqual HardSwish If
L2Normalization L2Pool2D LeakyRelu Less LessEqual Log LogicalAnd LogicalNot LogicalOr Logistic
LogSoftmax MaxPool2D Maximum Mean Minimum MirrorPad Mul Neg NotEqual Pack Pad PadV2 Prelu Quantize
ReduceMax Relu Relu6 Reshape ResizeBilinear ResizeNearestNeighbor Round Rsqrt SelectV2 Shape Sin
Slice Softmax SpaceToBatchNd SpaceToDepth Split SplitV Sqrt Square SquaredDifference Squeeze
StridedSlice Sub Sum Svdf Tanh Transpose TransposeConv UnidirectionalSequenceLSTM Unpack While
ZerosLike BatchMatMul
"""
"""The operators of TFLite that tflite::MicroMutableOpResolver can add."""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    qat = keras_qat.quantize_model(tiny_net())
    x = rng(1).uniform(-1, 1, (4, *qat.input_shape[1:])).astype(np.float32)
    keras_qat.calibrate(qat, x)
    path = tmp_path_factory.mktemp("source") / "key-words 2.cc"
    contents = keras_qat.export_c(qat, path, examples=x[:2])
    return qat, x, path, contents


def numbers(text: str, name: str) -> list[int]:
    (body,) = re.findall(rf"{name}(?:\[\d*\])+ = {{(.*?)}};", text, re.DOTALL)
    return [int(match, 0) for match in re.findall(r"-?\w+", body)]


def test_the_array_is_the_file(exported):
    qat, _, path, contents = exported
    assert bytes(numbers(path.read_text(), "kFile")) == contents
    assert contents == keras_qat.export_tflite(qat, batch_size=1)


def test_the_examples_are_those_of_the_simulation(exported):
    qat, x, path, _ = exported
    codes = keras_qat.simulate(qat, x[:2], "tflm").outputs["logits"].codes
    assert numbers(path.read_text(), "kGoldenLogits") == codes.reshape(-1).tolist()


def test_constants_of_names_that_look_alike_are_told_apart(tmp_path):
    """An input `file` had the constant of the file's size, and two outputs had one constant."""
    inputs = keras.Input((4,), name="file")
    outputs = [layers.Dense(2, name=name)(inputs) for name in ("examples", "a_b", "a.b")]
    qat = keras_qat.quantize_model(keras.Model(inputs, outputs))
    x = rng(1).normal(size=(4, 4)).astype(np.float32)
    keras_qat.calibrate(qat, x)
    keras_qat.export_c(qat, tmp_path / "model.cc", examples=x[:1])
    text = (tmp_path / "model.h").read_text()
    sizes = ["kFile2Size", "kExamples2Size", "kABSize", "kAB2Size"]
    assert re.findall(r"constexpr size_t (k\w+Size)", text) == sizes
    if shutil.which("g++"):
        command = ["g++", "-fsyntax-only", "-Wall", "-Werror", tmp_path / "model.cc"]
        subprocess.run(command, check=True)


@pytest.mark.parametrize("standard", ["c++11", "c++14", "c++17"])
def test_it_compiles_and_its_header_says_what_the_file_holds(standard, exported, tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("no compiler")
    qat, _, path, contents = exported
    logits = keras_qat.simulate(qat, np.zeros((1, *qat.input_shape[1:]))).outputs["logits"]
    (tmp_path / "main.cc").write_text(
        f"""
        #include "{path.with_suffix(".h").name}"
        struct Resolver {{
          int AddConv2D() {{ return 0; }}
          int AddReshape() {{ return 0; }}
          int AddFullyConnected() {{ return 0; }}
        }};
        int main() {{
          using namespace key_words_2;
          Resolver resolver;
          static_assert(kOperators == 3 && kLogitsSize == 3 && kGoldenExamples == 2, "");
          static_assert(kLogitsScale == {float(logits.scale)!r}f, "");
          static_assert(kLogitsZeroPoint == {logits.zero_point}, "");
          bool aligned = reinterpret_cast<uintptr_t>(kFile) % 16 == 0;
          return !(AddOperators(resolver) && aligned && kFileSize == {len(contents)});
        }}
        """
    )
    program = tmp_path / "main"
    command = ["g++", f"-std={standard}", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    command.append(f"-I{path.parent}")
    subprocess.run([*command, path, tmp_path / "main.cc", "-o", program], check=True)
    subprocess.run([program], check=True)


def test_operators_have_the_resolvers_names():
    known = {name.lower(): name for name in RESOLVER.split()}
    for kernel in OPERATORS.values():
        plain = kernel.replace("_", "").lower()
        if plain in known:
            assert _get_resolver_name(kernel) == known[plain]


@pytest.mark.slow
def test_operators_inside_of_loops_are_added(tmp_path):
    inputs = keras.Input((5, 4), name="steps")
    qat = quantize_on(
        keras.Model(inputs, layers.GRU(3)(inputs)),
        rng(1).normal(size=(4, 5, 4)).astype(np.float32),
        "int16x8",
    )
    keras_qat.export_c(qat, tmp_path / "model.cc")
    text = (tmp_path / "model.h").read_text()
    assert "resolver.AddWhile() == 0" in text and "resolver.AddLess() == 0" in text
    assert f"kOperators = {text.count('resolver.Add')};" in text


@pytest.mark.parametrize("path", ["model.c", "model.tflite", "model"])
def test_other_endings_are_refused(path, exported, tmp_path):
    with pytest.raises(ValueError, match="name a C\\+\\+ source"):
        keras_qat.export_c(exported[0], tmp_path / path)


def test_examples_need_integers(exported, tmp_path):
    qat, x, *_ = exported
    with pytest.raises(ValueError, match="is float, and float results"):
        keras_qat.export_c(qat, tmp_path / "model.cc", examples=x, input_dtype="float32")


def test_uint8_ends(exported, tmp_path):
    qat, x, *_ = exported
    path = tmp_path / "model.cc"
    keras_qat.export_c(qat, path, examples=x[:1], output_dtype="uint8")
    codes = keras_qat.simulate(qat, x[:1], "tflm").outputs["logits"].codes
    assert (
        numbers(path.read_text(), "kGoldenLogits") == (codes.reshape(-1).astype(int) + 128).tolist()
    )


def test_examples_of_a_file_of_pixels_are_pixels(exported, tmp_path):
    qat, x, *_ = exported
    path, rescaling = tmp_path / "model.cc", (1 / 127.5, -1)
    pixels = np.arange(2 * x[0].size).reshape(2, *x.shape[1:]) % 256
    given = (pixels / 127.5 - 1).astype(np.float32)
    keras_qat.export_c(qat, path, examples=given, input_dtype="uint8", rescaling=rescaling)
    assert "// Pixels, 0 to 255." in path.with_suffix(".h").read_text()
    assert numbers(path.read_text(), "kGoldenImage") == pixels.reshape(-1).tolist()
    codes = keras_qat.simulate(qat, given, "tflm").outputs["logits"].codes
    assert numbers(path.read_text(), "kGoldenLogits") == codes.reshape(-1).tolist()


def test_examples_are_integers_as_the_model_takes_them(tmp_path):
    """Indices have no scale, and were described as float. int8 indices are values, too."""
    words, more = keras.Input((3,), dtype="int32", name="words"), keras.Input((3,), name="more")
    y = layers.Flatten()(layers.Embedding(5, 3)(words))
    y = layers.Dense(2, name="logits")(layers.Concatenate()([y, more]))
    qat = keras_qat.quantize_model(keras.Model([words, more], y))
    x = [np.array([[0, 4, 2]], np.int32), np.array([[1, 7, -9]], np.int8)]
    keras_qat.calibrate(qat, [np.repeat(row, 4, 0) for row in x])
    keras_qat.export_c(qat, tmp_path / "model.cc", examples=x)
    text, file = (tmp_path / "model.cc").read_text(), keras_qat.export_tflite(qat, batch_size=1)
    assert numbers(text, "kGoldenWords") == [0, 4, 2]
    runner = keras_qat.TFLiteModel(file)
    codes = runner.inputs["more"].quantize(x[1].astype(np.float32))
    assert numbers(text, "kGoldenMore") == codes.reshape(-1).tolist()
    result = keras_qat.simulate(qat, x, "tflm").outputs["logits"].codes
    assert numbers(text, "kGoldenLogits") == result.reshape(-1).tolist()


def test_what_tflite_micro_lacks_is_named(tmp_path):
    inputs = keras.Input((4,))
    qat = quantize_on(
        keras.Model(inputs, layers.Activation("gelu", name="bent")(inputs)),
        rng(1).normal(size=(4, 4)).astype(np.float32),
    )
    with pytest.warns(UserWarning, match=r"missing, .* do not run\n  .*GELU: no kernel"):
        keras_qat.export_c(qat, tmp_path / "model.cc")


def test_the_source_holds_the_file_of_the_model_s_target(tmp_path):
    model = build_model((7, 4), layers.Conv1D(4, 4, 3, "same"))
    qat = quantize_on(model, rng(1).normal(size=(8, 7, 4)).astype(np.float32), target="cmsis_nn")
    contents = keras_qat.export_c(qat, tmp_path / "model.cc")
    assert contents == keras_qat.export_tflite(qat)
    assert contents != keras_qat.export_tflite(qat, target="tflm")


def test_a_full_disk_leaves_both_files(exported, tmp_path, monkeypatch):
    keras_qat.export_c(exported[0], tmp_path / "model.cc")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    write, written = Path.write_bytes, []

    def first_alone(self, contents):
        written.append(self)
        if len(written) > 1:
            raise OSError(errno.ENOSPC, "No space left on device", str(self))
        return write(self, contents)

    monkeypatch.setattr(Path, "write_bytes", first_alone)
    with pytest.raises(OSError, match=r"No space left.*unchanged"):
        keras_qat.export_c(exported[0], tmp_path / "model.cc", examples=exported[1][:2])
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
