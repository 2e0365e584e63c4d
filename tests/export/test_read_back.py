"""Tests that export reads files back, and refuses a file that differs from the model anywhere."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import flatbuffers
import numpy as np
import pytest

import keras_qat
from keras_qat.export import tflite
from keras_qat.export.read_back import check_contents
from keras_qat.tflite.builder import Builder
from keras_qat.tflite.schema import unpack
from tests.helpers import images, keras, layers, observe, scramble

Change = Callable[[Any], None]


@pytest.fixture(scope="module")
def written() -> tuple[bytes, Any, Any]:
    """Writes a network with most structures. Returns the file, its `ModelT`, and the graph."""
    inputs = keras.Input((8, 8, 4))
    x = layers.Conv2D(6, 3, activation="relu")(inputs)
    x = layers.BatchNormalization()(layers.DepthwiseConv2D(3, padding="same")(x))
    x = layers.Add()([layers.ReLU(6.0)(x), x])
    outputs = layers.Dense(3, activation="softmax")(layers.GlobalAveragePooling2D()(x))
    qat = observe(keras_qat.quantize_model(scramble(keras.Model(inputs, outputs))), images())
    taken: list[Any] = []
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(tflite, "check_contents", lambda *args: taken.extend(args))
        keras_qat.export_tflite(qat)
    return tuple(taken)


def packed(model: Any) -> bytes:
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def changes(part: Any, path: str = "") -> Iterator[tuple[str, Change]]:
    """Yields functions that each change one field of a `ModelT`, or of a component of it."""
    for name, value in vars(part).items():
        where = f"{path}.{name}"
        if hasattr(value, "__dict__"):
            yield from _inside(changes(value, where), lambda it, name=name: getattr(it, name))
        elif isinstance(value, list) and value and hasattr(value[0], "__dict__"):
            for index, entry in enumerate(value):
                inner = changes(entry, f"{where}[{index}]")
                yield from _inside(inner, lambda it, n=name, i=index: getattr(it, n)[i])
        elif isinstance(value, np.ndarray) and value.size:
            yield where, lambda it, name=name: setattr(it, name, _first_changed(getattr(it, name)))
        elif isinstance(value, (bool, np.bool_)):
            yield where, lambda it, name=name: setattr(it, name, not getattr(it, name))
        elif isinstance(value, (int, float)) and name != "builtinOptionsType":
            yield where, lambda it, name=name: setattr(it, name, getattr(it, name) + 1)
        elif isinstance(value, bytes):
            yield where, lambda it, name=name: setattr(it, name, getattr(it, name) + b"!")


def _inside(inner: Iterator[tuple[str, Change]], part: Callable[[Any], Any]) -> Iterator[Any]:
    for where, change in inner:
        yield where, lambda it, change=change: change(part(it))


def _first_changed(values: np.ndarray) -> np.ndarray:
    changed = values.copy()
    changed.reshape(-1)[:1] += 1  # Arrays wrap around. For a scalar, 255 + 1 would be a warning.
    return changed


def test_the_largest_codes_are_changed_too():
    """The first value depends on the weights, which depend on earlier tests."""
    for dtype in (np.int8, np.uint8, np.int16, np.int32):
        values = np.full((2, 2), np.iinfo(dtype).max, dtype)
        assert np.count_nonzero(_first_changed(values) != values) == 1


def test_a_written_file_passes(written):
    check_contents(*written)


def test_every_field_that_is_packed_otherwise_is_seen(written):
    contents, model, graph = written
    unpacked = unpack(contents)
    unseen, count = [], 0
    for where, change in changes(unpacked):
        other = copy.deepcopy(unpacked)
        change(other)
        count += 1
        try:
            check_contents(packed(other), model, graph)
        except RuntimeError:
            continue
        unseen.append(where)
    assert count > 250
    assert not unseen


def test_numbers_that_are_not_the_models_are_seen(written):
    """`ModelT` and file have the same mistake, so only the resolved graph reveals it."""
    _, whole, graph = written
    main = whole.subgraphs[0]
    quantized = {
        f".subgraphs[0].tensors[{index}]"
        for index, tensor in enumerate(main.tensors)
        if tensor.name.startswith(b"keras_qat/quant_") and whole.buffers[tensor.buffer].data is None
        if tensor.type == 9 and b"unclipped" not in tensor.name
    }
    weights = {
        f".buffers[{main.tensors[operator.inputs[1]].buffer}].data"
        for operator in main.operators
        if whole.operatorCodes[operator.opcodeIndex].builtinCode in (3, 4, 9)
    }
    wanted = {f"{tensor}.{field}" for tensor in quantized for field in ("shape", "type")}
    wanted |= {
        f"{tensor}.quantization.{it}" for tensor in quantized for it in ("scale", "zeroPoint")
    }
    wanted |= weights | {f".subgraphs[0].operators[{i}].inputs" for i in range(len(main.operators))}
    seen = set()
    for where, change in changes(whole):
        if where in wanted:
            other = copy.deepcopy(whole)
            change(other)
            with pytest.warns(UserWarning, match="may compute something other"):
                check_contents(packed(other), other, graph)
            seen.add(where)
    assert len(quantized) >= 5
    assert len(weights) == 3
    assert seen == wanted


def test_options_that_the_schema_does_not_have_are_seen(monkeypatch):
    """Packing silently omits a misspelled option."""
    operator = Builder.operator

    def misspelled(self: Builder, code: str, *args: Any, **options: Any) -> None:
        options = {name.replace("strideW", "stride_w"): value for name, value in options.items()}
        operator(self, code, *args, **options)

    qat = keras_qat.quantize_model(keras.Sequential([layers.Conv2D(2, 3, input_shape=(8, 8, 1))]))
    observe(qat, images(4, (8, 8, 1)))
    keras_qat.export_tflite(qat)
    monkeypatch.setattr(Builder, "operator", misspelled)
    with pytest.raises(RuntimeError, match="stride_w"):
        keras_qat.export_tflite(qat)
