"""Other forms of weights: what LiteRT, TFLite Micro and onnxruntime compute of them.

    python -m benchmarks.weight_forms

A dense layer of 64 inputs with weights of 2 bits, four in a byte, between int8 tensors; the same
behind float inputs ("hybrid"), with weights of 2 and of 8 bits; and onnxruntime's MatMulNBits, with
a scale for each block of 32 weights. Values are compared with the model in integers, or with the
product of the inputs and the weights in float.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType

import keras_qat
from keras_qat.keras2.backend import keras

INPUTS, UNITS, BLOCK = 64, 8, 32
LITERT = {
    "LiteRT with XNNPACK": OpResolverType.AUTO,
    "LiteRT without it": OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
    "reference kernels": OpResolverType.BUILTIN_REF,
}
Run = Callable[[np.ndarray], np.ndarray]


def packed(q: np.ndarray, bits: int) -> np.ndarray:
    """Packs whole numbers into bytes, the first in the lowest bits."""
    rows = (q.astype(np.int32) & (2**bits - 1)).astype(np.uint8).reshape(-1, 8 // bits)
    shifted = rows << (bits * np.arange(8 // bits, dtype=np.uint8))
    return np.bitwise_or.reduce(shifted, 1)


def dense_file(qat: Any, bits: int, is_hybrid: bool) -> tuple[bytes, np.ndarray]:
    """Returns a file whose weights have so many bits, and its real weights."""
    contents = keras_qat.export_tflite(
        qat, batch_size=1, input_dtype="float32", output_dtype="float32"
    )
    model = schema.ModelT.InitFromPackedBuf(contents, 0)
    (graph,) = model.subgraphs
    codes = [code.builtinCode for code in model.operatorCodes]
    index = codes.index(schema.BuiltinOperator.FULLY_CONNECTED)
    (dense,) = [operator for operator in graph.operators if operator.opcodeIndex == index]
    weights = graph.tensors[dense.inputs[1]]
    buffer = model.buffers[weights.buffer]
    q = np.asarray(buffer.data, np.uint8).view(np.int8).reshape(weights.shape)
    unit = np.abs(q[q != 0]).min() if bits == 2 else 1  # 2 bits are -1, 0 and 1.
    scales = np.asarray(weights.quantization.scale, np.float32) * np.float32(unit)
    weights.quantization.scale = scales.tolist()
    buffer.data = packed(q // unit, bits)
    if bits == 2:
        weights.type = schema.TensorType.INT2
    if is_hybrid:
        graph.operators = [dense]
        dense.inputs = [int(graph.inputs[0]), int(dense.inputs[1]), -1]
        dense.outputs = [int(graph.outputs[0])]
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output()), (q // unit) * scales[:, None]


def in_litert(contents: bytes, resolver: OpResolverType) -> Run:
    interpreter = Interpreter(model_content=contents, experimental_op_resolver_type=resolver)
    interpreter.allocate_tensors()
    (read,), (written,) = interpreter.get_input_details(), interpreter.get_output_details()

    def run(row: np.ndarray) -> np.ndarray:
        interpreter.set_tensor(read["index"], row[None])
        interpreter.invoke()
        return interpreter.get_tensor(written["index"])[0]

    return lambda x: np.stack([run(row) for row in x])


def in_tflite_micro(contents: bytes) -> Run:
    from tflite_micro import runtime

    interpreter = runtime.Interpreter.from_bytes(contents, arena_size=100_000)

    def run(row: np.ndarray) -> np.ndarray:
        interpreter.set_input(row[None], 0)
        interpreter.invoke()
        return interpreter.get_output(0)[0]

    return lambda x: np.stack([run(row) for row in x])


def blocks(bits: int, accuracy_level: int, x: np.ndarray) -> float:
    """Returns the largest error of MatMulNBits, as a share of the largest result."""
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    numbers = np.random.default_rng(bits)
    q = numbers.integers(0, 2**bits, (UNITS, INPUTS // BLOCK, BLOCK))
    scales = numbers.uniform(0.01, 0.1, q.shape[:2]).astype(np.float32)
    weights = ((q - 2 ** (bits - 1)) * scales[..., None]).reshape(UNITS, INPUTS)
    data = packed(q, bits).reshape(UNITS, INPUTS // BLOCK, -1)
    options: dict[str, Any] = {"K": INPUTS, "N": UNITS, "bits": bits, "block_size": BLOCK}
    options["accuracy_level"] = accuracy_level
    domain = "com.microsoft"
    node = helper.make_node("MatMulNBits", ["x", "q", "scales"], ["y"], domain=domain, **options)
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [len(x), size])
        for name, size in (("x", INPUTS), ("y", UNITS))
    ]
    constants = [numpy_helper.from_array(data, "q"), numpy_helper.from_array(scales, "scales")]
    graph = helper.make_graph([node], "blocks", ends[:1], ends[1:], constants)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(domain, 1)]
    model = helper.make_model(graph, opset_imports=opsets)
    model.ir_version = 8
    session = onnxruntime.InferenceSession(model.SerializeToString())
    exact = x @ weights.T
    return float(np.abs(session.run(None, {"x": x})[0] - exact).max() / np.abs(exact).max())


def main() -> None:
    """Prints a line for each form and runtime."""
    warnings.filterwarnings("ignore")
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(256, INPUTS)).astype(np.float32)
    image = keras.Input((INPUTS,))
    model = keras.Model(image, keras.layers.Dense(UNITS)(image))
    runs: dict[str, Callable[[bytes], Run]] = {
        name: lambda contents, resolver=resolver: in_litert(contents, resolver)  # type: ignore[misc]
        for name, resolver in LITERT.items()
    }
    runs["TFLite Micro"] = in_tflite_micro
    for bits, is_hybrid in ((2, False), (2, True), (8, True)):
        qat = keras_qat.quantize_model(model, keras_qat.recipes.int8(weight_bits=bits))
        keras_qat.calibrate(qat, x)
        contents, weights = dense_file(qat, bits, is_hybrid)
        (output,) = keras_qat.resolve(qat).outputs.values()
        assert output.params is not None
        for name, opened in runs.items():
            kernels = "xnnpack" if "XNNPACK" in name else "reference"
            try:
                y = opened(contents)(x)
            except (RuntimeError, ValueError) as refusal:
                told = f"refused: {str(refusal).splitlines()[0]}"
            else:
                if is_hybrid:
                    exact = x @ weights.T
                    share = np.abs(y - exact).max() / np.abs(exact).max()
                    told = f"{share:.1%} of the largest result away from float"
                else:
                    expected = keras_qat.simulate(qat, x, kernels).outputs
                    (values,) = (output.values for output in expected.values())
                    same = np.rint(y / output.params.scale) == np.rint(values / output.params.scale)
                    told = f"{np.mean(same):.2%} of the codes of kernels={kernels!r}"
            form = f"{bits} bits, {'float' if is_hybrid else 'int8'} inputs"
            print(f"{form}, {name}: {told}", flush=True)
    for bits, level in itertools.product((2, 4, 8), (0, 4)):
        error = blocks(bits, level, x)
        print(f"MatMulNBits, {bits} bits, accuracy_level {level}: {error:.1e} away from float")


if __name__ == "__main__":
    main()
