"""What a file says of its tensors is what an interpreter makes of them."""

from __future__ import annotations

import pytest

from keras_qat.tflite.interpreter import FileInterpreter
from keras_qat.tflite.schema import OPERATORS, code_of, unpack
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
        if OPERATORS[code_of(model.operatorCodes[operator.opcodeIndex])] == "DEPTHWISE_CONV_2D":
            before, after = (graph.tensors[end[0]] for end in (operator.inputs, operator.outputs))
            times = operator.builtinOptions.depthMultiplier
            assert before.shape[-1] * times == after.shape[-1]


@pytest.mark.sample(40)
@pytest.mark.parametrize(
    "op", [op for op in MATCHING if op.has_kernel_for(8)], ids=lambda op: op.name
)
def test_shapes_are_those_that_the_interpreter_computes(op):
    kernels = "optimized" if (op.name, "reference") in LACKING else "reference"
    assert_written_as_computed(file_of(node_of(op, 8, 1)[0], BATCH), kernels)
