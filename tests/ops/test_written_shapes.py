"""What a file says of its tensors is what an interpreter makes of them."""

import dataclasses

import numpy as np
import pytest

import keras_qat
from keras_qat.ops.registry import op_named
from keras_qat.tflite.interpreter import FileInterpreter
from keras_qat.tflite.schema import OPERATORS, operator_code, unpack
from tests.helpers import images, keras, observe
from tests.networks.small import functional
from tests.ops.examples.example import BATCH
from tests.ops.harness import LACKING, file_of, node_of
from tests.ops.test_contracts import MATCHING


def assert_written_as_computed(contents: bytes, kernels: str = "reference") -> None:
    """Of each tensor the shape; of depthwise convolutions, too, how many channels they multiply."""
    model, interpreter = unpack(contents), FileInterpreter(contents, kernels).interpreter
    (graph,) = model.subgraphs
    interpreter.allocate_tensors()
    computed = {detail["index"]: detail["shape"] for detail in interpreter.get_tensor_details()}
    for index, tensor in enumerate(graph.tensors):
        assert tensor.hasRank
        assert tuple(computed[index]) == tuple(tensor.shape), tensor.name
    for operator in graph.operators:
        if (
            OPERATORS[operator_code(model.operatorCodes[operator.opcodeIndex])]
            == "DEPTHWISE_CONV_2D"
        ):
            before, after = (graph.tensors[end[0]] for end in (operator.inputs, operator.outputs))
            times = operator.builtinOptions.depthMultiplier
            assert before.shape[-1] * times == after.shape[-1]


WEIGHTS = {
    **dict.fromkeys(("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"), range(1, 2)),
    "UNIDIRECTIONAL_SEQUENCE_LSTM": range(1, 9),
}
"""Operator -> which of its inputs are weights."""


@pytest.mark.parametrize("name", ["conv", "depthwise_conv", "dense", "lstm"])
def test_weights_have_no_zero_point(name):
    """Kernels read none, whatever a file says."""
    model = unpack(file_of(node_of(op_named(name), 8, 1)[0], BATCH))
    (graph,) = model.subgraphs
    indices = [
        operator.inputs[at]
        for operator in graph.operators
        for at in WEIGHTS.get(
            OPERATORS[operator_code(model.operatorCodes[operator.opcodeIndex])], ()
        )
    ]
    assert indices
    for index in indices:
        assert not np.any(graph.tensors[index].quantization.zeroPoint)


def test_shapes_of_causal_convolutions():
    convolution = keras.layers.Conv1D(4, 3, padding="causal", dilation_rate=2)
    qat = observe(
        keras_qat.quantize_model(functional((7, 3), build=convolution)), images(9, (7, 3))
    )
    assert_written_as_computed(keras_qat.export_tflite(qat, batch_size=BATCH))


@pytest.mark.sample(10)
@pytest.mark.parametrize(
    "op", [op for op in MATCHING if op.has_kernel_for(8)], ids=lambda op: op.name
)
def test_shapes_are_those_that_the_interpreter_computes(op):
    kernels = "optimized" if (op.name, "reference") in LACKING else "reference"
    assert_written_as_computed(file_of(node_of(op, 8, 1)[0], BATCH), kernels)


def test_several_open_sizes_behind_others_are_refused():
    node, _ = node_of(op_named("linear"), 8, 0)
    ends = (None, 6, None), (None, 3, None, None)
    source, target = (
        dataclasses.replace(tensor, shape=shape)
        for tensor, shape in zip((node.inputs[0], node.output), ends, strict=True)
    )
    with pytest.raises(NotImplementedError, match="several unknown sizes"):
        file_of(dataclasses.replace(node, inputs=(source,), outputs=(target,)))
