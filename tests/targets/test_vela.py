"""Tests the table of Ethos-U against Arm's compiler Vela, operator by operator."""

import dataclasses
import functools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import keras_qat
from keras_qat.ops.registry import op_named
from keras_qat.targets import get, problems
from keras_qat.tflite.reader import FileGraph
from tests.helpers import images, keras, observe, scramble
from tests.ops.harness import file_of, node_of
from tests.ops.test_contracts import MATCHING
from tests.targets.test_plan_and_file import FAMILIES

COMPARISONS = ("greater", "greater_equal", "less", "less_equal", "equal", "not_equal")
REFUSED = {
    # Booleans as inputs and outputs of a file.
    "ethos_u55": ("argmax-16", "select", "from_integers", *COMPARISONS),
    # QUANTIZE of int32, which the target lists.
    "ethos_u85": ("argmax-16", "from_integers", "layer_norm-8", "group_norm-8"),
}
"""Beginnings of names of files that Vela 5.2 cannot compile."""

ACCELERATORS = {
    "ethos_u55": "ethos-u55-128",
    "ethos_u65": "ethos-u65-256",
    "ethos_u85": "ethos-u85-256",
}
ZOO = ("MobileNetV2", "MobileNetV3Small", "ResNet50")


@functools.cache
def family_file(name: str) -> bytes:
    qat = keras_qat.quantize_model(scramble(FAMILIES[name].model()), kernels="tflm")
    observe(qat, *FAMILIES[name].inputs(8))
    return keras_qat.export_tflite(qat, batch_size=1)


@functools.cache
def zoo_file(name: str) -> bytes:
    model = getattr(keras.applications, name)(weights=None, input_shape=(64, 64, 3))
    qat = keras_qat.quantize_model(model, target="ethos_u55")
    return keras_qat.export_tflite(observe(qat, images(4, (64, 64, 3)), batches=1))


def vela(contents: bytes, target: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / "file.tflite"
    path.write_bytes(contents)
    run = [sys.executable, "-m", "ethosu.vela", str(path), "--output-dir", str(folder)]
    run += ["--accelerator-config", ACCELERATORS[target]]
    return subprocess.run(run, capture_output=True, text=True, check=False)


def on_the_cpu(contents: bytes, target: str, folder: Path) -> set[str]:
    """Returns the outputs of operators that Vela leaves to the CPU."""
    done = vela(contents, target, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    graph = FileGraph((folder / "file_vela.tflite").read_bytes())
    left = [operation for operation in graph.operations if not operation.kernel.startswith("ethos")]
    return {graph.tensors[index].name for problem in left for index in problem.outputs}


def compared(contents: bytes, target: str, folder: Path) -> tuple[int, list[str]]:
    """Returns how many operators a file has, and those for which the table is wrong."""
    left, graph = on_the_cpu(contents, target, folder), FileGraph(contents)
    # Faults are in the CPU's kernels, and files for the target avoid them.
    table = dataclasses.replace(get(target), faults=())
    refused = Counter(problem.index for problem in problems(contents, table))
    differing = []
    for index, operation in enumerate(graph.operations):
        is_left = any(graph.tensors[output].name in left for output in operation.outputs)
        if is_left != (index in refused):
            differing.append(
                f"{operation.kernel}: Vela has it on the {'CPU' if is_left else 'NPU'}"
            )
    return len(graph.operations), differing


def check(files: dict[str, bytes], target: str, folder: Path) -> None:
    pytest.importorskip("ethosu.vela")
    total, wrong = 0, []
    for name, contents in files.items():
        count, differing = compared(contents, target, folder)
        total += count
        wrong += [f"{name}: {problem}" for problem in differing]
    share = 1 - len(wrong) / total
    print(f"{target}: {total} operators, {share:.2%} as Vela says", *wrong, sep="\n  ")
    assert share >= 0.99, wrong


@pytest.mark.slow
@pytest.mark.parametrize("target", ["ethos_u55", "ethos_u85"])
def test_structures(target, tmp_path):
    check({name: family_file(name) for name in FAMILIES}, target, tmp_path)


_layers = keras.layers

RECURRENT = {
    "gru": lambda: _layers.GRU(6),
    "reset_before": lambda: _layers.GRU(6, reset_after=False, return_sequences=True),
    "simple_rnn": lambda: _layers.SimpleRNN(6, activation="relu"),
    "lstm": lambda: _layers.LSTM(6),
    "kept_states": lambda: _layers.LSTM(6, stateful=True),
    "kept_state": lambda: _layers.GRU(6, stateful=True),
    "bidirectional": lambda: _layers.Bidirectional(_layers.GRU(5, return_sequences=True)),
    "conv_lstm_1d": lambda: keras.Sequential(
        [_layers.Reshape((5, 4, 1)), _layers.ConvLSTM1D(3, 2), _layers.Flatten()]
    ),
    "conv_lstm_2d": lambda: keras.Sequential(
        [_layers.Reshape((5, 2, 2, 1)), _layers.ConvLSTM2D(3, 2, padding="same"), _layers.Flatten()]
    ),
}


def recurrent_file(name: str) -> bytes:
    inputs = keras.Input((5, 4), 1)
    model = keras.Model(inputs, _layers.Dense(3)(RECURRENT[name]()(inputs)))
    qat = keras_qat.quantize_model(scramble(model), kernels="tflm")
    keras_qat.calibrate(qat, images(4, (5, 4)), batch_size=1)
    return keras_qat.export_tflite(qat, batch_size=1)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["ethos_u55", "ethos_u85"])
def test_recurrent_layers(target, tmp_path):
    check({name: recurrent_file(name) for name in RECURRENT}, target, tmp_path)


@pytest.mark.slow
@pytest.mark.xfail(
    strict=True,
    reason="Vela refuses masks that are inputs, writes an invalid file for one without operators, "
    "and has casts of indices and of reduce_all elsewhere than the table says",
)
@pytest.mark.parametrize("target", ["ethos_u55", "ethos_u85"])
def test_operators(target, tmp_path):
    rows = [(op, bits) for op in MATCHING for bits in (8, 16) if op.has_kernel_for(bits)]
    names = [f"{op.name}-{bits}" for op, bits in rows]
    refused = {name for name in names if name.startswith(REFUSED[target])}
    files = {
        name: file_of(node_of(op, bits, 0)[0], 1)
        for (op, bits), name in zip(rows, names, strict=True)
    }
    check({name: files[name] for name in names if name not in refused}, target, tmp_path)
    compiled = [name for name in refused if vela(files[name], target, tmp_path).returncode == 0]
    assert compiled == []


@pytest.mark.slow
@pytest.mark.parametrize("target", list(ACCELERATORS))
def test_networks(target, tmp_path):
    check({name: zoo_file(name) for name in ZOO}, target, tmp_path)


def test_one_network(tmp_path):
    pytest.importorskip("ethosu.vela")
    x = keras.Input((12, 12, 3))
    y = keras.layers.Conv2D(4, 5, strides=4, name="wide", padding="same")(x)
    y = keras.layers.Conv2D(4, 3, activation="relu")(keras.layers.UpSampling2D(2)(y))
    model = keras.Model(x, keras.layers.Dense(3)(keras.layers.Flatten()(y)))
    qat = observe(keras_qat.quantize_model(model, target="ethos_u55"), images(6, (12, 12, 3)))
    contents = keras_qat.export_tflite(qat)
    assert [problem.tensor for problem in problems(contents, get("ethos_u55"))] == ["wide"]
    assert compared(contents, "ethos_u55", tmp_path)[1] == []


@pytest.mark.parametrize("target", ["ethos_u55", "ethos_u85"])
def test_results_without_axes_are_left_to_the_cpu(target, tmp_path):
    pytest.importorskip("ethosu.vela")
    contents = file_of(node_of(op_named("reduce_min"), 8, 2)[0], 1)
    (problem,) = problems(contents, target)
    assert problem.reason == "results with at least one axis only"
    assert compared(contents, target, tmp_path)[1] == []
