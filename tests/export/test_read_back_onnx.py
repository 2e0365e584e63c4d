"""ONNX files are read back: what is not the model's is warned of."""

from typing import Any

import numpy as np
import pytest

import keras_qat
from keras_qat.export import onnx as exporter
from keras_qat.export.onnx import check_onnx
from tests.helpers import images, keras, layers, observe, scramble

onnx = pytest.importorskip("onnx", reason="needs the extra: pip install 'keras-qat[onnx]'")
pytest.importorskip("tf2onnx")


@pytest.fixture(scope="module")
def written() -> tuple[Any, Any]:
    """The protocol buffer and the resolved graph."""
    inputs = keras.Input((6, 6, 3))
    x = layers.Conv2D(4, 3, activation="relu")(inputs)
    x = layers.Add()([x, layers.DepthwiseConv2D(3, padding="same")(x)])
    outputs = layers.Dense(3)(layers.Flatten()(x))
    qat = keras_qat.quantize_model(scramble(keras.Model(inputs, outputs)))
    observe(qat, images(16, (6, 6, 3)))
    taken: list[Any] = []
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(exporter, "check_onnx", lambda *args: taken.extend(args))
        keras_qat.export_onnx(qat)
    contents, proto, graph = taken
    check_onnx(contents, proto, graph)
    return proto, graph


def test_bytes_that_are_not_what_was_written(written):
    proto, graph = written
    other = onnx.ModelProto.FromString(proto.SerializeToString())
    other.graph.node[0].name += "!"
    with pytest.raises(RuntimeError, match="is damaged"):
        check_onnx(other.SerializeToString(), proto, graph)


def test_numbers_that_are_not_the_models(written):
    """Any scale, zero point and weight, and names."""
    proto, graph = written
    read = {
        name: node.op_type
        for node in proto.graph.node
        for name in node.input
        if node.op_type == "QuantizeLinear" or name.endswith(("input_1/quantized", "input_1/scale"))
    }
    names = [array.name for array in proto.graph.initializer if array.name in read]
    assert len(names) >= 6 + 3 * 2
    for name in names:
        other = onnx.ModelProto.FromString(proto.SerializeToString())
        (array,) = [array for array in other.graph.initializer if array.name == name]
        values = onnx.numpy_helper.to_array(array).copy()
        values.flat[0] = (
            np.nextafter(values.flat[0], 9) if values.dtype.kind == "f" else 1 + values.flat[0]
        )
        array.CopyFrom(onnx.numpy_helper.from_array(values, name))
        with pytest.warns(UserWarning, match="may compute something other"):
            check_onnx(other.SerializeToString(), other, graph)
    for end in ("input", "output"):
        other = onnx.ModelProto.FromString(proto.SerializeToString())
        getattr(other.graph, end)[0].name += "!"
        with pytest.warns(UserWarning, match=f"its {end}s have other names"):
            check_onnx(other.SerializeToString(), other, graph)
